"""State that survives a fork: one lock for short critical sections, and descriptors that children must not keep.

A descriptor copied by a fork keeps alive what it stands for: a lock that a killed parent held, or the pipe that tells
compilers of its death.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

# Held across forks, so that none happens in a section that holds it. For short sections only.
guard = threading.RLock()
_private: set[int] = set()


def open_private(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open ``path``; forked children close their copy at once.

    Raises:
        OSError: it cannot be opened.
    """
    with guard:
        descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
        _private.add(descriptor)
        return descriptor


def private_pipe() -> tuple[int, int]:
    """A pipe's ends for reading and writing; forked children close their copies at once."""
    with guard:
        ends = os.pipe()
        _private.update(ends)
        return ends


def close_private(descriptor: int) -> None:
    """Close a private descriptor; does nothing in a child, where it is closed already."""
    with guard:
        if descriptor in _private:
            _private.remove(descriptor)
            os.close(descriptor)


def _in_child() -> None:
    for descriptor in _private:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _private.clear()
    guard.release()


os.register_at_fork(before=guard.acquire, after_in_parent=guard.release, after_in_child=_in_child)
