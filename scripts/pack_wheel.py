"""Kernel packs: compiled kernels as a wheel, which cutlass_w8a8 finds once it is installed.

The wheel's one package is a cache directory to read from (``v1/entries``, ``v1/objects``), and its entry point says so.
It holds no code. Equal kernels give equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
import platform
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from cutlass_w8a8 import pipeline
from cutlass_w8a8.cache.files import write_synced
from cutlass_w8a8.cache.location import PACKS_GROUP
from cutlass_w8a8.cache.shelf import LIBRARY, MANIFEST
from cutlass_w8a8.errors import ArgumentError, CacheError
from cutlass_w8a8.spec import KernelSpec, QuantSpec, Spec
from cutlass_w8a8.version import VERSION

# Of the ZIP format, which knows nothing earlier.
_EPOCH = (1980, 1, 1, 0, 0, 0)
# What pip knows as manylinux begins there.
_OLDEST_GLIBC = 17


def default_name(specs: Sequence[Spec]) -> str:
    """Architectures and operand types, such as ``sm86_sm90_e4m3``."""
    archs = dict.fromkeys(spec.arch.name for spec in specs)
    operands = {
        spec.operand.value if isinstance(spec, KernelSpec) else spec.target.value
        for spec in specs
        if isinstance(spec, (KernelSpec, QuantSpec))
    }
    return "_".join([*archs, *sorted(operands)])


def check_name(name: str) -> str:
    """``name``, fit for a Python package.

    Raises:
        ArgumentError: it is not.
    """
    if not re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", name):
        raise ArgumentError(
            f"--name {name!r}: use lower-case letters and digits, joined by single _, such as sm90_llama"
        )
    return name


def write_wheel(specs: Sequence[Spec], folder: Path, name: str) -> Path:
    """Write the wheel of ``specs``, which are in the cache, into ``folder``; where it is.

    Raises:
        CacheError: one of them is not in the cache.
        OSError: it cannot be written.
    """
    package = f"cutlass_w8a8_kernels_{name}"
    kernels = kernel_files(specs)
    tag = f"py3-none-{platform_tag(kernels)}"
    info = f"{package}-{VERSION}.dist-info"
    files = {f"{package}/{path}": content for path, content in kernels.items()}
    summary = f"{len(specs)} kernels for cutlass_w8a8 {VERSION}"
    files[f"{package}/__init__.py"] = f'"""{summary}: data for its entry point, no code."""\n'.encode()
    texts = {
        # Keys contain the version: those of another one would never be found.
        "METADATA": f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {VERSION}\n"
        f"Summary: {summary}\nRequires-Dist: cutlass-w8a8 (=={VERSION})\n",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: cutlass_w8a8 {VERSION}\nRoot-Is-Purelib: false\nTag: {tag}\n",
        "entry_points.txt": f"[{PACKS_GROUP}]\n{name} = {package}\n",
    }
    files |= {f"{info}/{file}": text.encode() for file, text in texts.items()}
    record = "".join(f"{path},sha256={_digest(content)},{len(content)}\n" for path, content in sorted(files.items()))
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{package}-{VERSION}-{tag}.whl"
    fresh = folder / f".{path.name}.new"
    try:
        write_synced(fresh, b"")
        with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for member, content in sorted(files.items()):
                entry = zipfile.ZipInfo(member, _EPOCH)
                entry.compress_type, entry.external_attr, entry.create_system = zipfile.ZIP_DEFLATED, 0o100644 << 16, 3
                archive.writestr(entry, content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return path


def kernel_files(specs: Sequence[Spec]) -> dict[str, bytes]:
    """The files of a cache that holds ``specs`` and nothing else, by their paths.

    Raises:
        CacheError: one of them is not in the cache.
    """
    files = {}
    for spec in specs:
        entry = pipeline.find(spec)
        if entry is None:
            raise CacheError(f"kernel {spec.name} is not in the cache; compile it with: {spec.command('build')}")
        layout = entry.directory.parent.parent
        found = [entry.directory / name for name in (*entry.manifest["files"], MANIFEST)]
        for path in [layout / "entries" / f"{entry.key}.json", *found]:
            files[path.relative_to(layout.parent).as_posix()] = path.read_bytes()
    return files


def platform_tag(files: Mapping[str, bytes]) -> str:
    """Where the libraries among ``files`` run: with the newest glibc that one of them asks for, or a newer one.

    Of other libraries they need only libstdc++, and of that what every manylinux has. So pip refuses the wheel exactly
    where loading a kernel would fail.
    """
    libraries = [content for path, content in files.items() if path.endswith(f"/{LIBRARY}")]
    needed = [int(minor) for content in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)(?:\.\d+)?\0", content)]
    return f"manylinux_2_{max([_OLDEST_GLIBC, *needed])}_{platform.machine()}"


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
