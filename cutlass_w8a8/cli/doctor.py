"""``doctor``: what was found on this machine, whether it is good enough, and what to do where it is not."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from cutlass_w8a8.arch import ARCHS, Match, match
from cutlass_w8a8.cache.location import ROOT_VARIABLE, cache_root, size_limit
from cutlass_w8a8.cli import about
from cutlass_w8a8.cli.finding import Finding, Verdict
from cutlass_w8a8.errors import W8A8Error
from cutlass_w8a8.pipeline import JIT_VARIABLE, Jit, jit_enabled, jit_policy
from cutlass_w8a8.runtime.device import ARCH_VARIABLE, arch_from_environment, arch_of, device
from cutlass_w8a8.toolchain.discover import find_cxx, find_nvcc, require
from cutlass_w8a8.toolchain.headers import PINNED_HEADERS_DIGEST, PINNED_PACKAGE, require_headers
from cutlass_w8a8.toolchain.process import compile_timeout
from cutlass_w8a8.worker import default_jobs


def doctor(_: argparse.Namespace) -> int:
    """Print every finding; the exit status is 1 if one of them is bad."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    styles = {Verdict.GOOD: "green", Verdict.NOTE: "yellow", Verdict.BAD: "bold red"}
    bad = 0
    for finding in findings():
        bad += finding.verdict is Verdict.BAD
        mark = Text(f"{finding.verdict.value:5}", styles[finding.verdict])
        console.print(mark + Text(f"{finding.what:20}{finding.found}"))
        if finding.remedy:
            console.print(Text(" " * 25 + finding.remedy))
    console.print("everything suffices" if not bad else f"{bad} of these must be mended to compile and run kernels")
    return 1 if bad else 0


def findings() -> Iterator[Finding]:
    """All findings, in the order in which the parts are used."""
    for what, check in _CHECKS:
        try:
            yield from check()
        except W8A8Error as error:
            finding = Finding(what, "not usable", Verdict.BAD, str(error))
            yield _to_compile(finding) if check in _COMPILATION else finding


def _to_compile(finding: Finding) -> Finding:
    """``finding``, about a part that is bad, judged by whether anything is to be compiled here."""
    if _compiles():
        remedy = f"{finding.remedy}; needed to compile kernels, cached kernels run without"
        return replace(finding, remedy=remedy)
    remedy = f"not needed while {JIT_VARIABLE}={os.environ[JIT_VARIABLE]}; only cached kernels run"
    return replace(finding, verdict=Verdict.NOTE, remedy=remedy)


def _compiles() -> bool:
    try:
        return jit_enabled()
    except W8A8Error:  # the variable makes no sense, which is a finding of its own
        return True


def _nvcc() -> Iterator[Finding]:
    toolkit = find_nvcc()
    version = ".".join(map(str, toolkit.version))
    found = f"{version}, {toolkit.nvcc} (from {toolkit.origin})"
    able, reasons = [], []
    for arch in ARCHS.values():
        compiled = []
        for operand in arch.operands:
            try:
                require(toolkit, arch, operand)
                compiled.append(operand.value)
            except W8A8Error as error:
                reasons.append(str(error))
        if compiled:
            able.append(arch.name if len(compiled) == len(arch.operands) else f"{arch.name} ({compiled[0]})")
    if not able:
        yield _to_compile(Finding("nvcc", found, Verdict.BAD, reasons[0]))
    elif reasons:
        yield Finding("nvcc", f"{found}; compiles {', '.join(able)}", Verdict.NOTE, "for others: " + reasons[-1])
    else:
        yield Finding("nvcc", f"{found}; compiles {', '.join(able)}")


def _host_compiler() -> Iterator[Finding]:
    path, identity = find_cxx()
    yield Finding("C++ compiler", f"{identity.splitlines()[0]}, {path}")


def _headers() -> Iterator[Finding]:
    headers = require_headers()
    found = f"{headers.version}, {headers.include}"
    if headers.digest == PINNED_HEADERS_DIGEST:
        yield Finding("CUTLASS headers", found)
    else:
        yield Finding(
            "CUTLASS headers",
            found,
            Verdict.NOTE,
            f"these are not the headers of {PINNED_PACKAGE}, which kernels are tested with; kernels built with them "
            "have keys of their own",
        )


def _emitter() -> Iterator[Finding]:
    from cutlass_w8a8.evt.cppgen import import_cppgen

    import_cppgen()
    yield Finding("emitter", "cutlass_cppgen can be imported")


def _torch() -> Iterator[Finding]:
    import torch

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs only"
    found = f"{torch.__version__}, {build}"
    if torch.version.cuda is None and Path("/proc/driver/nvidia/version").exists():
        yield Finding(
            "torch", found, Verdict.BAD, "there is a GPU here, which this torch cannot use; install one built for CUDA"
        )
    else:
        yield Finding("torch", found)


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding(
            "GPU",
            "none that torch can use",
            Verdict.NOTE,
            "kernels can be compiled here, but not run; CPU tensors use the evaluator",
        )
        return
    yield _driver()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = properties.major, properties.minor
        found = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        try:
            serving = Match(arch_of(device(index))) if arch_from_environment() else match(capability)
            verdict = Verdict.NOTE if serving.note else Verdict.GOOD
            yield Finding(f"GPU {index}", f"{found}: {serving.arch.name} kernels", verdict, serving.note)
        except W8A8Error as error:
            yield Finding(f"GPU {index}", found, Verdict.BAD, str(error))


def _architecture() -> Iterator[Finding]:
    forced = arch_from_environment()
    if forced:
        remedy = "they serve every GPU in place of those made for it; unset the variable if that is not wanted"
        yield Finding("architecture", f"{ARCH_VARIABLE}: kernels of {forced.name}", Verdict.NOTE, remedy)


def _driver() -> Finding:
    from cuda.bindings import driver

    result, number = driver.cuDriverGetVersion()
    if result != driver.CUresult.CUDA_SUCCESS:
        return Finding("driver", "no answer", Verdict.BAD, f"cuDriverGetVersion says {result}; reinstall the driver")
    major, minor = number // 1000, number % 1000 // 10
    found = f"{about.driver_version()}for CUDA {major}.{minor} and older"
    try:
        toolkit_major = find_nvcc().version[0]
    except W8A8Error:
        return Finding("driver", found)
    if major < toolkit_major:
        return Finding(
            "driver",
            found,
            Verdict.BAD,
            f"it cannot load what nvcc {toolkit_major} compiles; update the driver, or use a CUDA {major} toolkit",
        )
    return Finding("driver", found)


def _cache() -> Iterator[Finding]:
    root = cache_root()
    # The nearest directory that exists decides; nothing is created just to look.
    existing = next(path for path in (root, *root.parents) if path.exists())
    if not _compiles() and root.is_dir() and not os.access(root, os.W_OK) and os.access(root, os.R_OK | os.X_OK):
        yield Finding("cache", f"{root}, read-only")
    elif not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Finding(
            "cache", str(root), Verdict.BAD, f"{existing} is not a writable directory; set {ROOT_VARIABLE} to one"
        )
    else:
        yield Finding("cache", f"{root}, writable, {shutil.disk_usage(existing).free / 1e9:.1f} GB free")


def _jit() -> Iterator[Finding]:
    policy = jit_policy()
    found = f"{policy.value} ({JIT_VARIABLE})" if os.environ.get(JIT_VARIABLE) else policy.value
    if policy is Jit.OFF:
        remedy = "a kernel that is not in the cache is an error; cutlass-w8a8 build still compiles"
        yield Finding("first-use compile", found, Verdict.NOTE, remedy)
        return
    # What a compilation asks for before it begins.
    compile_timeout()
    size_limit()
    if policy is Jit.BACKGROUND:
        yield Finding("first-use compile", f"{found}, {default_jobs()} at a time")
    else:
        yield Finding("first-use compile", found)


_CHECKS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("cutlass_w8a8", about.package),
    ("python", about.python),
    ("system", about.system),
    ("packages", about.packages),
    ("nvcc", _nvcc),
    ("C++ compiler", _host_compiler),
    ("CUTLASS headers", _headers),
    ("emitter", _emitter),
    ("torch", _torch),
    ("architecture", _architecture),
    ("GPU", _gpus),
    ("tuned tables", about.tuned_tables),
    ("cache", _cache),
    ("packs", about.packs),
    ("first-use compile", _jit),
    ("variables", about.variables),
)
_COMPILATION = (_nvcc, _host_compiler, _headers)
