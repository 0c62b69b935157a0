"""The disk as the cache uses it: files that are there when the call returns, and renames that leave nothing half done.

Everything that changes the cache goes through these functions and `cache.lock`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from cutlass_w8a8.forks import guard

# What file systems answer that have no such operation on directories.
_UNSYNCABLE = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
# Of renameat2 in <fcntl.h> and <stdio.h>.
_HERE, _EXCHANGE = -100, 2


def sha256(data: bytes) -> str:
    """SHA-256 of ``data``, in hex."""
    return hashlib.sha256(data).hexdigest()


def is_directory(path: Path) -> bool:
    """Whether ``path`` is a directory itself, not a link to one, and not out of reach."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def is_link(path: Path) -> bool:
    """Whether ``path`` is a symbolic link, not out of reach."""
    try:
        return path.is_symlink()
    except OSError:
        return False


def read_regular(path: Path, size: int | None = None) -> bytes:
    """What the regular file ``path`` holds; never waits, as opening a pipe would.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, or not of ``size`` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path.name} is no regular file")
        if size is not None and status.st_size != size:
            raise ValueError(f"{path.name} has {status.st_size} bytes instead of {size}")
        return file.read()


def write_synced(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` and wait for the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Wait until the names in the directory ``path`` are on the disk, where the file system can tell."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSYNCABLE:
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Create ``path`` and its parents where they are missing; ``mode`` is for ``path`` alone."""
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(path, mode)  # noqa: PTH102  (pathlib of Python 3.10 keeps a copy of os.mkdir)
        except FileNotFoundError:
            if path.parent == path:
                raise
            make_directory(path.parent)
            os.mkdir(path, mode)  # noqa: PTH102
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def private_directory(parent: Path, prefix: str = "") -> Path:
    """A new directory under ``parent``, which is created if it is missing, for this user alone."""
    make_directory(parent)
    # tempfile has a lock of its own, which no child may find locked.
    with guard:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def readable_to_all(path: Path, mode: int) -> None:
    """Give ``path`` this mode where the file system has modes; nothing depends on it but copies for other users."""
    with contextlib.suppress(OSError):
        os.chmod(path, mode)  # noqa: PTH101


def rename(source: Path, target: Path) -> None:
    """Rename, replacing a file (not a directory) that is there."""
    os.rename(source, target)  # noqa: PTH104


def exchange(one: Path, other: Path) -> None:
    """Have two paths change places, in one step.

    Raises:
        OSError: they cannot, or the file system or the C library has no such operation.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(one))


def remove_file(path: Path) -> bool:
    """Remove a file. Returns whether there was one.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        os.unlink(path)  # noqa: PTH108
    except FileNotFoundError:
        return False
    return True


def remove_tree(path: Path) -> None:
    """Remove a directory and all in it, or a file, as far as possible."""
    if is_directory(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108


def tree_bytes(directory: Path) -> int:
    """Bytes in the files under ``directory``, or in that file, as far as they can be looked at."""
    if not is_directory(directory):
        with contextlib.suppress(OSError):
            return directory.lstat().st_size
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118
    return total
