"""Files that are on the disk when the call returns."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sha256(data: bytes) -> str:
    """SHA-256 of ``data``, in hex."""
    return hashlib.sha256(data).hexdigest()


def write_synced(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` and wait for the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in the directory ``path`` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
