#!/usr/bin/env python3
"""What a process waits for before its first kernel runs, and what each call costs after. A GPU is used if there is one.

    python scripts/measure_start.py --json start.json

Milliseconds are medians of fresh processes whose files are in memory; behind them, the least. Each imports torch first,
which takes seconds and is not counted: as many do that at a time as there are cores, then they measure one by one. The
kernels are those of ``quantize_per_token`` (bf16 to int8) and, with --gemm, of ``scaled_mm``; they are compiled
first if not cached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.installed import require_package

require_package()

import torch

from cutlass_w8a8 import calls, pipeline, prepare, scaled_mm
from cutlass_w8a8.arch import ARCHS, arch_named
from cutlass_w8a8.bench import machine
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import W8A8Error
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.problem import Problem
from cutlass_w8a8.request import check
from cutlass_w8a8.runtime.device import arch_of, device
from cutlass_w8a8.spec import KernelSpec, QuantSpec, Spec

M, N, K = 16, 4096, 4096

# Each leaves seconds in ``took``. They run in processes of their own, where torch has been imported.
FIND = """
begin = time.perf_counter()
import cutlass_w8a8
took["import cutlass_w8a8, beyond torch"] = time.perf_counter() - begin
begin = time.perf_counter()
from cutlass_w8a8 import acquire, dispatch, pipeline
from cutlass_w8a8.runtime.abi import Library
from cutlass_w8a8.spec import spec_from_json
spec = spec_from_json(sys.argv[1])
imported = time.perf_counter()
pipeline.kernel_key(spec)
keyed = time.perf_counter()
entry = pipeline.find(spec)
found = time.perf_counter()
Library(str(entry.library))
loaded = time.perf_counter()
took |= {"modules of the first call": imported - begin, "key": keyed - imported, "look-up": found - keyed,
         "dlopen": loaded - found, "all of these": loaded - begin}
"""
LAUNCH = """
import cutlass_w8a8
m, n, k = json.loads(sys.argv[2])
x = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
a, b = x.to(torch.float8_e4m3fn), torch.zeros(n, k, device="cuda").to(torch.float8_e4m3fn).t()
scale_a, scale_b = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")
(x + x).sum().item()
begin = time.perf_counter()
if "quantize" in sys.argv[1]:
    cutlass_w8a8.quantize_per_token(x, torch.int8)
else:
    cutlass_w8a8.scaled_mm(a, b, scale_a, scale_b)
torch.cuda.synchronize()
took["first call, from the cache to the result"] = time.perf_counter() - begin
from cutlass_w8a8 import counters
assert not counters.stats.compiles, "the kernel was not the one in the cache"
"""
FRAME = """
import json, sys, time
import torch
print("ready", flush=True)
input()
took = {{}}
{body}
print(json.dumps({{name: 1000 * seconds for name, seconds in took.items()}}), flush=True)
"""


class ProcessError(Exception):
    """A process that measures has failed; it has said why."""


def in_processes(body: str, runs: int, *words: str) -> dict[str, list[float]]:
    """Median and least milliseconds of what ``body`` measures, over ``runs`` processes; one before does not count.

    Raises:
        ProcessError: one of them failed.
    """
    found: dict[str, list[float]] = {}
    cores = len(os.sched_getaffinity(0))
    for first in range(0, runs + 1, cores):
        told = [json.loads(line) for line in _batch(body, min(cores, runs + 1 - first), words)]
        for took in told if first else told[1:]:
            for name, value in took.items():
                found.setdefault(name, []).append(value)
    return {name: middle_and_least(values) for name, values in found.items()}


def _batch(body: str, count: int, words: Sequence[str]) -> Iterator[str]:
    """What so many processes print, which get ready side by side and run ``body`` one after the other."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    # Modules compiled to byte code are what an installed package is run from.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", FRAME.format(body=body), *words]
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        started = [
            stack.enter_context(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True))
            for _ in range(count)
        ]
        for process in started:
            _line(process)
        for process in started:
            cast(IO[str], process.stdin).write("\n")
            cast(IO[str], process.stdin).flush()
            yield _line(process)
            process.wait()


def _line(process: subprocess.Popen[str]) -> str:
    line = cast(IO[str], process.stdout).readline()
    if not line:
        raise ProcessError(f"a process that measures ended with status {process.wait()}")
    return line


def middle_and_least(values: list[float]) -> list[float]:
    return [round(statistics.median(values), 3), round(min(values), 3)]


def chosen(arch: str) -> KernelSpec:
    """The kernel of the measured GEMM: the one that the GPU at hand is served by, else a typical one's."""
    facts: dict[str, Any] = {}
    if torch.cuda.is_available():
        where = device(torch.cuda.current_device())
        facts = {"sm_count": where.sm_count, "device": where.name}
    problem = Problem(arch_named(arch), M, N, K, DType.E4M3, DType.BF16, EpilogueSpec.of(), **facts)
    from cutlass_w8a8.dispatch import select

    return KernelSpec(problem.arch, problem.operand, problem.out, problem.epilogue, select(problem))


def hits(rounds: int = 401, repeats: int = 100) -> dict[str, list[float]]:
    """Median and least microseconds of a call whose signature has been met, all but the launch of its kernel.

    On CPU tensors, with a launch that does nothing: so it is measured alike with and without a GPU.
    """
    a, b = torch.zeros(M, 64, dtype=torch.int8), torch.zeros(8, 64, dtype=torch.int8).t()
    scale_a, scale_b, out = torch.ones(M, 1), torch.ones(1, 8), torch.empty(M, 8, dtype=torch.bfloat16)
    request = check(a, b, scale_a, scale_b, torch.bfloat16, None, None, None, out)

    def launch(*_: int) -> int:
        return 0

    resolved = calls.Resolved(request, launch, (0, 1), (False, False))  # type: ignore[arg-type]
    real = calls.resolve, calls.current_device, calls.raw_stream
    calls.resolve = lambda *_: resolved  # type: ignore[assignment]
    calls.current_device, calls.raw_stream = lambda: -1, lambda _: 0
    try:
        mm = prepare(b, scale_b)
        ways: dict[str, Callable[[], object]] = {
            "scaled_mm, out given": lambda: scaled_mm(a, b, scale_a, scale_b, torch.bfloat16, out=out),
            "prepared, out given": lambda: mm(a, scale_a, out=out),
            "an empty function": lambda: None,
        }
        for way in ways.values():
            way()
        key = next(key for key, value in calls._kept.items() if value is resolved)
        ways["the dictionary look-up in it"] = lambda: calls.find(key)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                begin = time.perf_counter()
                for _ in range(repeats):
                    way()
                times[name].append((time.perf_counter() - begin) / repeats * 1e6)
        return {name: middle_and_least(values) for name, values in times.items()}
    finally:
        calls.resolve, calls.current_device, calls.raw_stream = real
        calls.forget()


def show(what: str, lines: dict[str, list[float]], unit: str, digits: int) -> None:
    print(what)
    for name, (middle, least) in lines.items():
        print(f"  {name:44}{middle:8.{digits}f} {unit} {least:8.{digits}f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemm", action="store_true", help="also a GEMM's kernel, compiled in a minute if need be")
    parser.add_argument("--arch", choices=list(ARCHS), help="default: the GPU's, else sm90")
    parser.add_argument("--runs", type=int, default=7, metavar="N", help="processes a line; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error(f"--runs is {options.runs}; pass 1 or more")
    gpu = torch.cuda.is_available()
    microseconds = hits()
    show("a call whose signature is known, but for the launch", microseconds, "us", 2)
    milliseconds: dict[str, dict[str, list[float]]] = {}
    try:
        own = arch_of(device(torch.cuda.current_device())).name if gpu else "sm90"
        arch = options.arch or own
        specs: list[Spec] = [QuantSpec(arch_named(arch), DType.BF16, DType.INT8)]
        specs += [chosen(arch)] if options.gemm else []
        for spec in specs:
            pipeline.build(spec)
            milliseconds[spec.name] = in_processes(FIND, options.runs, spec.to_json())
            show(spec.name, milliseconds[spec.name], "ms", 1)
            if gpu and own == arch:
                first = in_processes(LAUNCH, options.runs, spec.to_json(), json.dumps([M, N, K]))
                show(f"{spec.name}, on the GPU", first, "ms", 1)
                milliseconds[spec.name] |= first
    except (ProcessError, W8A8Error) as error:
        print(f"measure_start: {error}", file=sys.stderr)
        return 1
    print(f"load average {os.getloadavg()[0]:.1f}; {'on a GPU' if gpu else 'no GPU: first calls were not timed'}")
    if options.json:
        load = {"load": os.getloadavg(), "runs": options.runs}
        result = {"milliseconds": milliseconds, "microseconds": microseconds}
        machine.write_json(options.json, {"machine": machine.facts() | load, **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
