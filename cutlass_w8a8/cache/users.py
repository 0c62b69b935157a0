"""What running processes use, so that nothing is evicted under them.

Every process that uses objects of a cache keeps one file under ``users/``, locked as long as it lives, with the digest
of an object on each line. Its children by fork share it, as they share the loaded kernels. A process that cannot write
there uses the cache all the same: no more than a compilation is at stake.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import tempfile
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import NamedTuple

from cutlass_w8a8 import forks
from cutlass_w8a8.cache import lock
from cutlass_w8a8.cache.files import make_directory, rename
from cutlass_w8a8.cache.location import Layout

# Whoever removes objects holds this lock alone, whoever begins to use one holds it with others, for milliseconds.
REMOVAL = "removal"
_WAIT_SECONDS = 5.0
_SUFFIX, UNLOCKED = ".use", ".new"


class _File(NamedTuple):
    """This process's file for one cache.

    Attributes:
        path: where it is.
        descriptor: open and locked, for this process and its children by fork.
        listed: the objects on its lines.
    """

    path: Path
    descriptor: int
    listed: set[str]


# By the cache's root.
_mine: dict[Path, _File] = {}


def mark(layout: Layout, object_digest: str) -> bool:
    """List an object as used by this process. Returns whether it is listed, and so will not be evicted.

    Call it before looking whether the object is there: afterwards, what is there stays.
    """
    with forks.guard:
        if object_digest in _listed(layout):
            return True
    try:
        if not layout.root.is_dir():
            return False
        make_directory(layout.locks)
        make_directory(layout.users)
        removal = lock.acquire(layout.locks / REMOVAL, shared=True, seconds=_WAIT_SECONDS)
        if removal is None:
            return False
        try:
            with forks.guard:
                file = _mine.get(layout.root) or _begin(layout)
                os.write(file.descriptor, f"{object_digest}\n".encode())
                file.listed.add(object_digest)
        finally:
            lock.release(removal)
    except (OSError, lock.NoLocksError):
        return False
    return True


def in_use(layout: Layout) -> set[str]:
    """What running processes use; files of processes that have ended are removed.

    Call it while holding `REMOVAL` alone, or the answer may be out of date when it is given.

    Raises:
        OSError: it cannot be found out.
        NoLocksError: the file system has no locks.
    """
    found: set[str] = set()
    with suppress(FileNotFoundError):
        for path in layout.users.glob(f"*{_SUFFIX}"):
            with lock.attempt(path) as abandoned:
                if not abandoned:
                    found.update(path.read_text(encoding="ascii", errors="replace").split())
    return found


def _listed(layout: Layout) -> set[str]:
    """What this process's file lists, if that is still where others look."""
    file = _mine.get(layout.root)
    if file is None:
        return set()
    if os.fstat(file.descriptor).st_nlink:
        return file.listed
    # Somebody has removed the cache.
    del _mine[layout.root]
    os.close(file.descriptor)
    return set()


def _begin(layout: Layout) -> _File:
    """This process's file; others' that were left behind are removed on the way."""
    in_use(layout)
    # Children keep it, on purpose: they use what their parent used.
    descriptor, name = tempfile.mkstemp(prefix=f"{os.getpid()}-", suffix=UNLOCKED, dir=layout.users)
    path = Path(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under its final name it is locked from the start: an unlocked one is taken for a dead process's.
        rename(path, path.with_suffix(_SUFFIX))
    except OSError:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    if not _mine:
        atexit.register(leave)
        # Children of multiprocessing end without the other.
        util.Finalize(None, leave, exitpriority=0)
    _mine[layout.root] = _File(path.with_suffix(_SUFFIX), descriptor, set())
    return _mine[layout.root]


def leave() -> None:
    """Remove this process's files, unless children by fork still share them; these will."""
    with forks.guard:
        for file in _mine.values():
            with suppress(OSError, lock.NoLocksError):
                os.close(file.descriptor)
                if file.path.exists():
                    with lock.attempt(file.path):
                        pass
        _mine.clear()
