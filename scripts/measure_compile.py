#!/usr/bin/env python3
"""How long a kernel takes to compile: this package's way beside plain nvcc, in turns. No GPU; an idle machine.

    python scripts/measure_compile.py --pairs 3 --json compile.json

Ours compiles the two halves of kernel.cu side by side, each with the headers it needs. Plain is ``nvcc -shared`` of one
file with the same kernel type, the same flags, the headers that CUTLASS's examples include, and CUTLASS's own adapter
to launch it. Both start from text that is there, and end with a shared library; what either makes is thrown away.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.installed import require_package

require_package()

from cutlass_w8a8 import emit, pipeline
from cutlass_w8a8.arch import SM90
from cutlass_w8a8.bench import machine
from cutlass_w8a8.cache.location import ROOT_VARIABLE
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import W8A8Error
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.spec import KernelSpec
from cutlass_w8a8.toolchain.discover import Toolkit, find_toolkit
from cutlass_w8a8.toolchain.flags import flags_for
from cutlass_w8a8.toolchain.headers import require_headers
from cutlass_w8a8.toolchain.process import compiler_environment
from cutlass_w8a8.toolchain.progress import QUIET_VARIABLE

UMBRELLAS = (
    "cutlass/cutlass.h",
    "cutlass/gemm/device/gemm_universal_adapter.h",
    "cutlass/gemm/kernel/gemm_universal.hpp",
    "cutlass/gemm/kernel/tile_scheduler.hpp",
    "cutlass/gemm/collective/collective_builder.hpp",
    "cutlass/epilogue/collective/collective_builder.hpp",
    "cutlass/epilogue/fusion/operations.hpp",
    "cutlass/util/packed_stride.hpp",
)
BAR = 0.55
# Where kernel.cu's types end, and its halves begin.
HALVES = "#if defined(__CUDACC__)"
LAUNCHER = """
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<GemmKernel>;

extern "C" int plain_launch(typename Gemm::Arguments const& arguments, void* workspace, cudaStream_t stream) {
  Gemm gemm;
  if (gemm.initialize(arguments, workspace, stream) != cutlass::Status::kSuccess) return 1;
  return gemm.run(stream) == cutlass::Status::kSuccess ? 0 : 2;
}
"""


@dataclass(frozen=True)
class Run:
    """One compilation.

    Attributes:
        way: ``ours`` or ``plain``.
        wall, cpu: seconds by the clock, and of all cores together.
        load: the machine's load average over the minute before.
    """

    way: str
    wall: float
    cpu: float
    load: float


def timed(way: str, compile_once: Callable[[], object]) -> Run:
    load = os.getloadavg()[0]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    compile_once()
    wall, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    run = Run(way, round(wall, 2), round(cpu, 2), round(load, 2))
    print(f"{way:6}{wall:6.1f} s, {cpu:.1f} s of cores, load before {load:.1f}", flush=True)
    return run


def ours(spec: KernelSpec) -> None:
    """Compile by the package, into a cache that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[ROOT_VARIABLE] = folder
        if not pipeline.build(spec, force=True, explicit=True).compiled:
            raise RuntimeError("nothing was compiled")


def plain(spec: KernelSpec, toolkit: Toolkit, include: Path) -> None:
    """Compile by nvcc alone."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in emit.render(spec).items():
            # Stubs are for our host half.
            if not name.startswith("stubs/"):
                (Path(folder) / name).write_text(text)
        umbrellas = "".join(f'#include "{name}"\n' for name in umbrellas_of(include))
        types, halves, _ = (Path(folder) / "kernel.cu").read_text().partition(HALVES)
        if not halves:
            raise RuntimeError(f"kernel.cu has no line {HALVES!r}")
        (Path(folder) / "plain.cu").write_text(umbrellas + types + LAUNCHER)
        flags = [flag for flag in flags_for(spec).device if flag != "-fatbin"]
        command = [str(toolkit.nvcc), *flags, f"-ccbin={toolkit.cxx}", f"-I{include}", "-shared", "-Xcompiler=-fPIC"]
        done = subprocess.run(
            [*command, "plain.cu", "-o", "plain.so"],
            cwd=folder,
            env=compiler_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode or not (Path(folder) / "plain.so").is_file():
            raise RuntimeError(f"plain nvcc failed: {done.stdout[-3000:]}")


def umbrellas_of(include: Path) -> list[str]:
    """Those of the umbrella headers that the tree has: ``util`` is apart in CUTLASS's own tree."""
    return [name for name in UMBRELLAS if (include / name).is_file()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=KernelConfig.parse, default="128x128x128_2x1_pingpong", metavar="NAME")
    parser.add_argument("--a-dtype", choices=[dtype.value for dtype in SM90.operands], default="e4m3")
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    options = parser.parse_args(arguments)
    spec = KernelSpec(SM90, DType(options.a_dtype), DType.BF16, EpilogueSpec.of(), options.config)
    os.environ[QUIET_VARIABLE] = "1"
    ways: dict[str, Callable[[], None]] = {}
    runs: list[Run] = []
    try:
        toolkit, headers = find_toolkit(), require_headers()
        # What a process does once is neither's: importing the emitter, hashing headers, reading them from the disk.
        emit.render(spec)
        pipeline.kernel_key(spec)
        ways = {"ours": lambda: ours(spec), "plain": lambda: plain(spec, toolkit, headers.include)}
        print(f"{spec.name}\n{toolkit.nvcc}, {'.'.join(map(str, toolkit.version))}; {os.cpu_count()} cores")
        for pair in range(options.pairs):
            # Each goes first as often as the other.
            order = list(ways) if pair % 2 == 0 else list(ways)[::-1]
            runs += [timed(way, ways[way]) for way in order]
    except (W8A8Error, RuntimeError) as error:
        print(f"measure_compile: {error}", file=sys.stderr)
        return 1
    walls = {way: [run.wall for run in runs if run.way == way] for way in ways}
    ratios = [round(mine / theirs, 3) for mine, theirs in zip(walls["ours"], walls["plain"], strict=True)]
    median = statistics.median(ratios)
    medians = {way: statistics.median(times) for way, times in walls.items()}
    print(f"ours {medians['ours']:.1f} s, plain {medians['plain']:.1f} s (medians); of a pair, ours takes "
          f"{median:.2f} of plain ({min(ratios):.2f} to {max(ratios):.2f}); the bar is {BAR}")  # fmt: skip
    if options.json:
        facts = machine.facts() | {"nvcc": toolkit.identity, "cxx": toolkit.cxx_identity, "headers": headers.version}
        result = {
            "kernel": spec.name,
            "umbrellas": umbrellas_of(headers.include),
            "runs": [asdict(run) for run in runs],
        }
        machine.write_json(options.json, {"machine": facts, **result, "ratios": ratios, "median": median, "bar": BAR})
    return 0


if __name__ == "__main__":
    sys.exit(main())
