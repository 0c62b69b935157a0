"""Finding a CUDA toolkit and a host compiler, without a GPU and without importing anything heavy."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cutlass_w8a8.arch import Arch, spell
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ToolchainError
from cutlass_w8a8.paths import user_path
from cutlass_w8a8.toolchain.process import probe

NVCC_VARIABLE = "CUTLASS_W8A8_NVCC"
# The wheels that together make a compiler; each is needed, and pip does not pull all of them in.
WHEELS = (
    "pip install nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 "
    "nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85"
)
_DEFAULT = Path("/usr/local/cuda")
_ENVIRONMENT = (NVCC_VARIABLE, "CUDA_HOME", "CUDA_PATH", "PATH", "CXX")


@dataclass(frozen=True)
class Nvcc:
    """A CUDA toolkit without a host compiler.

    Attributes:
        nvcc: the executable that was probed and will be run.
        version: (major, minor, build).
        identity: the full text of ``nvcc --version``.
        includes: the toolkit's header directories, in search order, for the host half.
        system_includes: those it searches after them.
        origin: where nvcc was found, in words.
        targets: the targets it compiles for, by its own list (``sm_90``).
    """

    nvcc: Path
    version: tuple[int, int, int]
    identity: str
    includes: tuple[Path, ...]
    system_includes: tuple[Path, ...]
    origin: str
    targets: frozenset[str]


@dataclass(frozen=True)
class Toolkit(Nvcc):
    """A CUDA toolkit and the host compiler that goes with it.

    Attributes:
        cxx: the host C++ compiler.
        cxx_identity: the full text of its ``--version``.
    """

    cxx: Path
    cxx_identity: str


def find_toolkit() -> Toolkit:
    """The toolkit to compile with; remembered for as long as the environment variables it depends on stay the same.

    Searched in this order: ``CUTLASS_W8A8_NVCC`` (the executable), ``CUDA_HOME``, ``CUDA_PATH``, ``nvcc`` on
    ``PATH``, the CUDA wheels of this Python, ``/usr/local/cuda``. The host compiler is ``CXX``, else ``g++``, else
    ``c++`` on ``PATH``.

    Raises:
        ToolchainError: nothing was found, a variable that is set points nowhere, or what was found does not work.
            The message lists the places searched and the remedy.
    """
    return _find(tuple(os.environ.get(name) for name in _ENVIRONMENT))


def find_nvcc() -> Nvcc:
    """The CUDA part of `find_toolkit`, looked for anew.

    Raises:
        ToolchainError: as there.
    """
    return _nvcc({name: os.environ.get(name) for name in _ENVIRONMENT})


def find_cxx() -> tuple[Path, str]:
    """The host compiler of `find_toolkit` and the full text of its ``--version``, looked for anew.

    Raises:
        ToolchainError: as there.
    """
    return _cxx({name: os.environ.get(name) for name in _ENVIRONMENT})


def require(toolkit: Nvcc, arch: Arch, operand: DType | None) -> None:
    """Check that ``toolkit`` can compile kernels of ``arch`` that multiply ``operand``, before it is run.

    ``operand`` is None for kernels without tensor-core instructions.

    Raises:
        ToolchainError: it is too old, or its own list of targets lacks this one.
        UnsupportedError: ``arch`` has no such kernels.
    """
    wanted = arch.min_toolkit if operand is None else arch.toolkit_for(operand)
    # Some releases list "sm_90a" beside "sm_90", others only the latter; each of them compiles for both.
    listed = not toolkit.targets.isdisjoint({f"sm_{arch.target}", f"sm_{arch.target.rstrip('af')}"})
    if toolkit.version[:2] >= wanted and listed:
        return
    found = f"{toolkit.nvcc} (from {toolkit.origin}) is CUDA {spell(toolkit.version)}"
    kernels = "kernels" if operand is None else f"{operand.value} kernels"
    need = f"{kernels} for {arch.name} (target sm_{arch.target}) need CUDA {spell(wanted)} or newer"
    if toolkit.version[:2] >= wanted:
        need = f"by its own list it does not compile for {arch.name} (target sm_{arch.target})"
    raise ToolchainError(f"{found}; {need}. Point {NVCC_VARIABLE} to another nvcc, or run: {WHEELS}")


@functools.cache
def _find(environment: tuple[str | None, ...]) -> Toolkit:
    values = dict(zip(_ENVIRONMENT, environment, strict=True))
    nvcc = _nvcc(values)
    cxx, cxx_identity = _cxx(values)
    return Toolkit(**vars(nvcc), cxx=cxx, cxx_identity=cxx_identity)


def _nvcc(values: dict[str, str | None]) -> Nvcc:
    nvcc, origin = _find_nvcc(values)
    identity = probe([str(nvcc), "--version"])
    match = re.search(r"release (\d+)\.(\d+)(?:, V\d+\.\d+\.(\d+))?", identity)
    if match is None:
        raise ToolchainError(f"{nvcc} (from {origin}) is not nvcc: --version printed {identity.strip()[:500]!r}")
    version = int(match[1]), int(match[2]), int(match[3] or 0)
    includes, system_includes = _includes(nvcc, origin)
    return Nvcc(
        nvcc=nvcc,
        version=version,
        identity=identity,
        includes=includes,
        system_includes=system_includes,
        origin=origin,
        # Toolkits too old for every arch may lack this option.
        targets=frozenset(probe([str(nvcc), "--list-gpu-code"]).split()) if version >= (12, 0) else frozenset(),
    )


def _cxx(values: dict[str, str | None]) -> tuple[Path, str]:
    cxx = _find_cxx(values)
    return cxx, probe([str(cxx), "--version"])


def _find_nvcc(values: dict[str, str | None]) -> tuple[Path, str]:
    if explicit := values[NVCC_VARIABLE]:
        path = user_path(NVCC_VARIABLE, explicit).absolute()
        if not _is_executable(path):
            raise ToolchainError(
                f"{NVCC_VARIABLE}={explicit} is not an executable file; set it to the path of nvcc, or unset it"
            )
        return path, NVCC_VARIABLE
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := values[variable]:
            path = user_path(variable, home).absolute() / "bin" / "nvcc"
            if not _is_executable(path):
                raise ToolchainError(
                    f"{variable}={home} holds no bin/nvcc; set it to a CUDA toolkit, unset it, "
                    f"or name the compiler in {NVCC_VARIABLE}"
                )
            return path, variable
    searched = [f"{NVCC_VARIABLE}, CUDA_HOME and CUDA_PATH (not set)"]
    if found := shutil.which("nvcc", path=values["PATH"] or ""):
        return Path(found).absolute(), "PATH"
    searched.append(f"PATH ({values['PATH'] or 'empty'})")
    for path in (home / "bin" / "nvcc" for home in wheel_homes()):
        if _is_executable(path):
            return path, "the CUDA wheels of this Python"
        searched.append(str(path))
    path = _DEFAULT / "bin" / "nvcc"
    if _is_executable(path):
        return path, str(_DEFAULT)
    searched.append(str(path))
    raise ToolchainError(
        "no CUDA compiler (nvcc) was found. Searched: "
        + "; ".join(searched)
        + f". Install a CUDA toolkit and set CUDA_HOME, or run: {WHEELS}"
    )


def wheel_homes() -> Iterator[Path]:
    """Where the CUDA wheels put a toolkit, newest first. Those for CUDA 12 hold ptxas and NVVM but no nvcc."""
    # "nvidia" is a namespace package: one directory per site-packages, nothing to import.
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        homes = sorted(Path(location).absolute().glob("cu[0-9]*"), key=_major, reverse=True)
        yield from homes or [Path(location).absolute() / "cu13"]


def _major(home: Path) -> int:
    digits = re.sub(r"\D", "", home.name)
    return int(digits)


def _find_cxx(values: dict[str, str | None]) -> Path:
    path = values["PATH"] or ""
    if explicit := values["CXX"]:
        if found := shutil.which(explicit, path=path):
            return Path(found).absolute()
        raise ToolchainError(
            f"CXX={explicit} is not an executable; set it to one C++ compiler (a wrapper script, if it needs "
            f"arguments), or unset it"
        )
    for name in ("g++", "c++"):
        if found := shutil.which(name, path=path):
            return Path(found).absolute()
    raise ToolchainError(
        f"no C++ compiler was found: CXX is not set, and neither g++ nor c++ is on PATH ({path or 'empty'}). "
        "Install g++ (Debian and Ubuntu: apt-get install g++), or set CXX"
    )


def _includes(nvcc: Path, origin: str) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The header directories nvcc itself would search.

    Asked of nvcc rather than derived from its path, which may be a wrapper script or a link.
    """
    text = probe([str(nvcc), "-dryrun", "-E", "-x", "cu", os.devnull])
    plain, system = (_listed(text, name, flag) for name, flag in (("INCLUDES", "-I"), ("SYSTEM_INCLUDES", "-isystem")))
    if not any((directory / "cuda_runtime.h").is_file() for directory in plain + system):
        raise ToolchainError(
            f"the toolkit of {nvcc} (from {origin}) is incomplete: cuda_runtime.h is in none of "
            f"{', '.join(map(str, plain + system)) or 'its (empty) list of include directories'}. Install the whole "
            f"toolkit, or run: {WHEELS}"
        )
    return plain, system


def _listed(dryrun: str, name: str, flag: str) -> tuple[Path, ...]:
    match = re.search(rf"^#\$ {name}=(.*)$", dryrun, re.MULTILINE)
    if match is None:
        return ()
    directories = []
    words = iter(shlex.split(match[1]))
    for word in words:
        path = next(words, "") if word == flag else word.removeprefix(flag)
        directories.append(Path(path).resolve())
    return tuple(directory for directory in directories if directory.is_dir())


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
