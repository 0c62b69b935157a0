"""Where the cache is."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from cutlass_w8a8.errors import CacheError
from cutlass_w8a8.paths import user_path

ROOT_VARIABLE = "CUTLASS_W8A8_CACHE_DIR"


def cache_root() -> Path:
    """The cache directory: ``CUTLASS_W8A8_CACHE_DIR``, else this user's cache directory. It need not exist yet.

    Raises:
        ArgumentError: the variable names a home that does not exist.
        CacheError: the variable holds a relative path, or the directory belongs to another user, whose libraries
            would run in this process.
    """
    explicit = os.environ.get(ROOT_VARIABLE)
    root = user_path(ROOT_VARIABLE, explicit) if explicit else platformdirs.user_cache_path("cutlass_w8a8")
    if not root.is_absolute():
        raise CacheError(
            f"{ROOT_VARIABLE}={explicit} is a relative path, which would mean another cache in every directory; "
            "give an absolute one"
        )
    if root.exists():
        refuse_foreign(root)
    return root


def refuse_foreign(path: Path) -> None:
    """Refuse a path of the cache that another user owns and could therefore have filled.

    Root may use any cache: containers mount directories of their host's users.

    Raises:
        CacheError: ``path`` belongs to neither this user nor root.
        OSError: ``path`` does not exist or cannot be looked at.
    """
    owner, me = path.stat().st_uid, os.geteuid()
    if me != 0 and owner not in (0, me):
        raise CacheError(
            f"{path} belongs to user {owner}, and libraries in the cache would run as user {me}; copy it, or set "
            f"{ROOT_VARIABLE} to a directory of your own"
        )


def ensure_root(root: Path) -> None:
    """Create the cache directory, readable by this user alone, if it is missing.

    Raises:
        CacheError: it cannot be created or is no directory.
    """
    try:
        root.mkdir(parents=True, mode=0o700, exist_ok=True)
    except OSError as error:
        raise CacheError(
            f"the cache {root} cannot be created ({error}); set {ROOT_VARIABLE} to a writable directory"
        ) from error
