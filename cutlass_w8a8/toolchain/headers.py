"""CUTLASS's headers: where they are, and which."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cutlass_w8a8.errors import ToolchainError
from cutlass_w8a8.paths import user_path

HEADERS_VARIABLE = "CUTLASS_W8A8_CUTLASS_DIR"
PINNED_PACKAGE = "nvidia-cutlass==4.2.0.0"

# Digest of the header tree in PINNED_PACKAGE. A machine that only loads kernels need not have the headers, yet
# must compute the keys of the machine that built them.
PINNED_HEADERS_DIGEST = "d9d97ebc1fdd943659ea0fcaf398eb10d3865b4113279a7fca89c51830122820"

_TREES = ("cutlass", "cute")


@dataclass(frozen=True)
class Headers:
    """A CUTLASS header tree.

    Attributes:
        include: the directory to hand to ``-I``.
        version: as in ``cutlass/version.h``, for instance ``4.2.0``.
        digest: content hash of ``cutlass/`` and ``cute/``: equal trees, equal digest, wherever they are.
    """

    include: Path
    version: str
    digest: str


def find_headers() -> Headers | None:
    """The CUTLASS headers to compile against, or None where there are none.

    ``CUTLASS_W8A8_CUTLASS_DIR`` names a CUTLASS checkout or its ``include`` directory; otherwise the headers of
    the installed nvidia-cutlass package are used. The first call in a process reads the whole tree (27 MB,
    0.04 s when the files are in memory); later calls remember its digest.

    Raises:
        ToolchainError: the variable is set and names no CUTLASS tree.
    """
    explicit = os.environ.get(HEADERS_VARIABLE)
    if explicit:
        root = user_path(HEADERS_VARIABLE, explicit).absolute()
        for include in (root, root / "include"):
            if _is_tree(include):
                return _read(include)
        raise ToolchainError(
            f"{HEADERS_VARIABLE}={explicit} holds no CUTLASS headers: neither cutlass/version.h nor "
            f"include/cutlass/version.h is there; point it to a CUTLASS checkout, or unset it and run: "
            f"pip install {PINNED_PACKAGE}"
        )
    # find_spec on an undotted name does not import the package, which would cost seconds.
    spec = importlib.util.find_spec("cutlass_library")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        include = Path(location).absolute() / "source" / "include"
        if _is_tree(include):
            return _read(include)
    return None


def require_headers() -> Headers:
    """Like `find_headers`, for a caller about to compile.

    Raises:
        ToolchainError: there are no headers; the message gives the remedy.
    """
    headers = find_headers()
    if headers is None:
        raise ToolchainError(
            f"the CUTLASS headers are missing: {HEADERS_VARIABLE} is not set and the nvidia-cutlass package is not "
            f"installed; run: pip install {PINNED_PACKAGE}"
        )
    return headers


def headers_digest() -> str:
    """Digest of the headers found, or of the pinned package's where there are none."""
    headers = find_headers()
    return PINNED_HEADERS_DIGEST if headers is None else headers.digest


def forget() -> None:
    """Read the headers anew when they are asked for next: they have changed."""
    _read.cache_clear()


def stamp(include: Path) -> str:
    """What changes whenever a file of the header trees is written, at an eighth of the cost of reading them."""
    state = hashlib.sha256()
    for name in _files(include):
        status = os.stat(f"{include}/{name}")  # noqa: PTH116
        state.update(f"{name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}\n".encode())
    return state.hexdigest()


def tree_digest(include: Path) -> str:
    """Content hash of the header trees under ``include``: relative names and bytes, in sorted order."""
    # Each process that looks for a kernel waits for this, and no date or size of a file proves that it was not edited:
    # all is read, then, without what a Path costs, which is 802 files in 0.035 s rather than 0.055.
    root = str(include)
    digest = hashlib.sha256()
    for name in _files(include):
        with open(f"{root}/{name}", "rb", buffering=0) as file:  # noqa: PTH123
            content = file.read()
        digest.update(f"{len(name)}:{name}{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def _files(include: Path) -> list[str]:
    """The files of the header trees, relative to ``include``, in sorted order."""
    root = str(include)
    return sorted(path[len(root) + 1 :] for tree in _TREES for path in _walk(f"{root}/{tree}"))


def _walk(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)
            elif entry.is_file():
                yield entry.path


def _is_tree(include: Path) -> bool:
    return (include / "cutlass" / "version.h").is_file() and (include / "cute").is_dir()


@functools.cache
def _read(include: Path) -> Headers:
    text = (include / "cutlass" / "version.h").read_text(errors="replace")
    parts = [re.search(rf"#define\s+CUTLASS_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    version = ".".join(match[1] if match else "?" for match in parts)
    return Headers(include, version, tree_digest(include))
