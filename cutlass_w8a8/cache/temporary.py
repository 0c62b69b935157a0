"""A private cache in the temporary folder, for a process whose own cannot be written."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from multiprocessing import util
from pathlib import Path

from cutlass_w8a8 import forks
from cutlass_w8a8.cache.store import Store
from cutlass_w8a8.errors import UnwritableError

PREFIX = "cutlass_w8a8-"
# The directory and the process that made it; a child by fork may read its parent's, and makes its own to write.
_made: list[tuple[Path, int]] = []


def existing() -> list[Store]:
    """The temporary caches of this process and of those it was forked from, the latest first."""
    with forks.guard:
        return [Store(path) for path, _ in reversed(_made)]


def create() -> Store:
    """This process's temporary cache, for this user alone and until the process ends; made by the first call.

    Raises:
        UnwritableError: there is no temporary folder that can be written.
    """
    with forks.guard:
        for path, owner in _made:
            if owner == os.getpid() and path.is_dir():
                return Store(path)
        try:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
        except OSError as error:
            raise UnwritableError(
                f"the temporary folder cannot be written either ({error}); free space, or set TMPDIR to a directory"
            ) from error
        _made.append((path, os.getpid()))
        atexit.register(_remove, path, os.getpid())
        # Children of multiprocessing end without the other.
        util.Finalize(None, _remove, (path, os.getpid()), exitpriority=0)
        return Store(path)


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
