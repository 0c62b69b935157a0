"""What ``doctor`` says that is neither good nor bad, for whoever reads it from afar: versions, settings, tables."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cutlass_w8a8.cache.location import installed_packs, named_packs
from cutlass_w8a8.cli.finding import Finding
from cutlass_w8a8.dispatch import tuned
from cutlass_w8a8.version import VERSION
from cutlass_w8a8.worker import GB_PER_JOB, default_jobs

# What kernels are made with and loaded by, apart from torch, of which more is said.
_PACKAGES = ("nvidia-cutlass", "cuda-bindings", "jinja2", "platformdirs", "rich")
_WHEELS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
# Those of others that change what is found.
_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CXX", "CUDA_VISIBLE_DEVICES")
_PREFIX = "CUTLASS_W8A8_"
_DRIVER = Path("/proc/driver/nvidia/version")


def package() -> Iterator[Finding]:
    """This package."""
    yield Finding("cutlass_w8a8", f"{VERSION}, {Path(__file__).resolve().parents[1]}")


def python() -> Iterator[Finding]:
    """The interpreter."""
    yield Finding("python", f"{sys.version.split()[0]}, {sys.executable}")


def system() -> Iterator[Finding]:
    """The system, and what limits compilations at a time."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cores = len(os.sched_getaffinity(0))
    jobs = f"{default_jobs()} compilations at a time, of {GB_PER_JOB} GB each"
    yield Finding("system", f"{platform.platform()}, {cores} cores, {memory:.0f} GB: {jobs}")


def packages() -> Iterator[Finding]:
    """The packages that this one is built on, and the wheels a compiler is made of, if they are installed."""
    found = [f"{name} {_version(name) or 'missing'}" for name in _PACKAGES]
    found += [f"{name} {known}" for name in _WHEELS if (known := _version(name))]
    yield Finding("packages", ", ".join(found))


def tuned_tables() -> Iterator[Finding]:
    """Tuned tables in the order in which they count.

    Raises:
        TableError: one of them cannot be used.
    """
    tables = tuned.tables()
    origin = f"; {tuned.TABLES_VARIABLE} goes before the shipped ones" if os.environ.get(tuned.TABLES_VARIABLE) else ""
    listed = [f"{table.device} ({table.sm_count} multiprocessors, {table.arch.name})" for table in tables]
    yield Finding("tuned tables", (", ".join(listed) or "none") + origin)


def packs() -> Iterator[Finding]:
    """The packs of kernels that are searched, those that the variable names first.

    Raises:
        ArgumentError: the variable names one by a relative path.
    """
    yield Finding("packs", ", ".join(map(str, (*named_packs(), *installed_packs()))) or "none")


def variables() -> Iterator[Finding]:
    """Environment variables that are set and change what this package does."""
    names = sorted(name for name in os.environ if name.startswith(_PREFIX) or name in _VARIABLES)
    yield Finding("variables", ", ".join(f"{name}={os.environ[name]}" for name in names) or "none set")


def driver_version() -> str:
    """The driver's release followed by a comma, or nothing where it does not say."""
    try:
        match = re.search(r"Module(?: for \S+)?\s+(\d+[.\d]+)", _DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return f"{match[1]}, " if match else ""


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
