"""Where everything is: the cache, the packs that are searched besides it, and what a cache directory holds."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import platformdirs

from cutlass_w8a8 import forks
from cutlass_w8a8.cache.files import make_directory
from cutlass_w8a8.errors import ArgumentError, CacheError, UnwritableError
from cutlass_w8a8.paths import user_path

ROOT_VARIABLE = "CUTLASS_W8A8_CACHE_DIR"
PACKS_VARIABLE = "CUTLASS_W8A8_PACKS"
LIMIT_VARIABLE = "CUTLASS_W8A8_CACHE_LIMIT"
# Wheels that hold kernels name, under this group, the package whose directory is the pack.
PACKS_GROUP = "cutlass_w8a8.packs"
# Three times what all kernels take that dispatch may choose on any architecture, 7900 of at most 155 KB. More is what
# other versions left, or a tuner.
DEFAULT_LIMIT = 4 * 10**9
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
_LAYOUT = "v1"
_log = logging.getLogger("cutlass_w8a8")
_warned: set[str] = set()


@dataclass(frozen=True)
class Layout:
    """What a cache directory holds, by name.

    Attributes:
        root: the directory.
    """

    root: Path

    @property
    def objects(self) -> Path:
        """A directory for each compiled kernel."""
        return self.root / _LAYOUT / "objects"

    @property
    def entries(self) -> Path:
        """A file for each key."""
        return self.root / _LAYOUT / "entries"

    @property
    def locks(self) -> Path:
        """Lock files, while something is compiled or removed."""
        return self.root / _LAYOUT / "locks"

    @property
    def work(self) -> Path:
        """Working directories, while something is compiled, written or removed."""
        return self.root / _LAYOUT / "work"

    @property
    def users(self) -> Path:
        """What each running process uses."""
        return self.root / _LAYOUT / "users"

    @property
    def failed(self) -> Path:
        """Source and log of kernels that did not compile."""
        return self.root / "failed"


def cache_root() -> Path:
    """The cache directory: ``CUTLASS_W8A8_CACHE_DIR``, else this user's cache directory. It need not exist yet.

    Raises:
        ArgumentError: the variable names a home that does not exist.
        UnwritableError: it is not set, and this user has no home.
        CacheError: the variable holds a relative path, or the directory belongs to another user, whose libraries
            would run in this process.
    """
    explicit = os.environ.get(ROOT_VARIABLE)
    root = user_path(ROOT_VARIABLE, explicit) if explicit else platformdirs.user_cache_path("cutlass_w8a8")
    if not root.is_absolute():
        if explicit:
            raise CacheError(
                f"{ROOT_VARIABLE}={explicit} is a relative path, which would mean another cache in every directory; "
                "give an absolute one"
            )
        raise UnwritableError(
            f"this user's cache would be {root}: there is no home directory, or XDG_CACHE_HOME is a relative path; "
            f"set {ROOT_VARIABLE} to a directory"
        )
    # Missing or out of reach: a miss to readers, and writers will be told.
    with contextlib.suppress(OSError):
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
            f"{path} belongs to user {owner}, and libraries in it would run as user {me}; copy it, or set "
            f"{ROOT_VARIABLE} to a directory of your own"
        )


def ensure_root(root: Path) -> None:
    """Create the cache directory, readable by this user alone, if it is missing.

    Raises:
        UnwritableError: it cannot be created or is no directory.
    """
    try:
        make_directory(root, 0o700)
    except OSError as error:
        raise UnwritableError(
            f"the cache {root} cannot be created ({error}); set {ROOT_VARIABLE} to a writable directory"
        ) from error


def named_packs() -> list[Path]:
    """The packs that ``CUTLASS_W8A8_PACKS`` names, without those that cannot be used, which are warned of once.

    None if it is ``none``.

    Raises:
        ArgumentError: one is named by a relative path, or in a home that does not exist.
    """
    found: list[Path] = []
    if _no_packs():
        return found
    for text in filter(None, os.environ.get(PACKS_VARIABLE, "").split(os.pathsep)):
        path = user_path(PACKS_VARIABLE, text)
        if not path.is_absolute():
            raise ArgumentError(
                f"{PACKS_VARIABLE} names {text}, a relative path, which would mean another pack in every directory; "
                f"give absolute paths, separated by {os.pathsep!r}"
            )
        if _usable(path, f"named in {PACKS_VARIABLE}"):
            found.append(path)
    return found


def installed_packs() -> tuple[Path, ...]:
    """The packs that installed wheels advertise; none if ``CUTLASS_W8A8_PACKS`` is ``none``.

    The first call in a process reads every wheel's metadata (0.1 s). Nothing is imported, so a pack cannot slow down or
    break this process by code of its own.
    """
    return () if _no_packs() else _advertised()


@functools.cache
def _advertised() -> tuple[Path, ...]:
    found = []
    for point in sorted(entry_points(group=PACKS_GROUP), key=lambda point: (point.name, point.value)):
        path = _directory_of(point)
        if path is None:
            warn_once(
                f"the kernel pack {point.name} cannot be used: its entry point names {point.value}, which is no "
                "installed package; reinstall its wheel"
            )
        elif _usable(path, f"of the entry point {point.name}"):
            found.append(path)
    return tuple(found)


def warn_once(message: str) -> None:
    """Log a warning, the first time it is given in this process."""
    with forks.guard:
        if message in _warned:
            return
        _warned.add(message)
    _log.warning("%s", message)


def size_limit() -> int | None:
    """Bytes that the kernels in the cache may take: ``CUTLASS_W8A8_CACHE_LIMIT``, else `DEFAULT_LIMIT`; None: any.

    Raises:
        ArgumentError: the variable holds no size.
    """
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    return parse_size(LIMIT_VARIABLE, text) if text else DEFAULT_LIMIT


def parse_size(what: str, text: str) -> int | None:
    """Bytes in a size such as ``2GB``, ``500 MiB`` or ``1000000``; None for ``none``.

    Raises:
        ArgumentError: ``text`` is no size; the message names ``what`` was to hold it.
    """
    if text.strip().lower() == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?I?B?)", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise ArgumentError(f"{what}={text} is no size; write it like 2GB, 500MB, 1GiB or 1000000 (bytes), or none")
    return int(float(match[1]) * _UNITS[match[2]])


def _no_packs() -> bool:
    return os.environ.get(PACKS_VARIABLE, "").strip().lower() == "none"


def _usable(path: Path, whence: str) -> bool:
    try:
        if not path.is_dir():
            raise CacheError("it is no directory")
        refuse_foreign(path)
    except (OSError, CacheError) as error:
        warn_once(f"the kernel pack {path}, {whence}, is left out: {error}")
        return False
    return True


def _directory_of(point: EntryPoint) -> Path | None:
    """The directory of the package that ``point`` names, found without importing it."""
    top, *rest = point.module.split(".")
    try:
        # Of an undotted name: a dotted one would import its parents.
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location, *rest).absolute()
        if os.path.isdir(path):  # noqa: PTH112  (False for what is out of reach)
            return path
    return None
