"""Locks between processes and between threads, which end with the process whatever ends it.

``flock`` on a descriptor of its own for each holder: it excludes threads as well, has a shared form, and the system
releases it when the process dies. Holders remove lock files when they are done: whoever gets a lock checks that its
file is still the one of that name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cutlass_w8a8 import forks

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
# A file that is another one each time it is looked at is not one that can be locked.
_MOST_REPLACED = 100


class NoLocksError(Exception):
    """The file system takes the file but refuses to lock it."""


def acquire(path: Path, *, shared: bool = False, seconds: float = 0.0) -> int | None:
    """Lock the file ``path``, which is created if it is missing, but not its directory.

    Args:
        path: the lock file.
        shared: together with others who ask for the same.
        seconds: how long to wait for other holders.

    Returns:
        what `release` takes, or None if others held it for all that time.

    Raises:
        OSError: the file cannot be opened.
        NoLocksError: the file system refuses to lock it.
    """
    deadline = time.monotonic() + seconds
    pause = _SHORTEST_PAUSE
    replaced = 0
    while True:
        descriptor = forks.open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
            replaced += 1
            if replaced > _MOST_REPLACED:
                raise NoLocksError(f"{path} is another file each time it is opened")
            busy = False
        except BlockingIOError:
            forks.close_private(descriptor)
            busy = True
        except OSError as error:
            forks.close_private(descriptor)
            raise NoLocksError(f"{path}: {error.strerror or error}") from error
        except BaseException:
            forks.close_private(descriptor)
            raise
        if not busy:
            forks.close_private(descriptor)
            continue
        if time.monotonic() >= deadline:
            return None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def release(descriptor: int, path: Path | None = None) -> None:
    """Give a lock back; with ``path``, remove its file first."""
    if path is not None:
        with contextlib.suppress(OSError):
            if _is_at(descriptor, path):
                os.unlink(path)  # noqa: PTH108
    forks.close_private(descriptor)


@contextmanager
def attempt(path: Path) -> Iterator[bool]:
    """Try to hold a lock alone, without waiting, and remove its file afterwards; says whether it is held.

    Raises:
        OSError: the file cannot be opened.
        NoLocksError: the file system refuses to lock it.
    """
    descriptor = acquire(path)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            release(descriptor, path)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))  # noqa: PTH116
    except FileNotFoundError:
        return False
