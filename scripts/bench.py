#!/usr/bin/env python3
"""Measure ours and its peers side by side in one run, on one GPU.

    python scripts/bench.py --vllm _C_stable_libtorch.abi3.so --json bench.json
    python scripts/bench.py --configs 64x16x128_1x1_pingpong_swap,128x128x128_2x1_pingpong --json configs.json

160 points: eight weight shapes, ten M, two types; per-token x per-channel scales, no bias, bf16 out. Method and how
to read the result: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

PROVIDERS = ("ours", "vllm", "torch_row", "int_mm", "bf16")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, metavar="FILE", help="vLLM's _C_stable_libtorch.abi3.so")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help=f"comma-separated, of {', '.join(PROVIDERS)}")
    parser.add_argument("--configs", default="", help="comma-separated configurations of ours to measure as well")
    parser.add_argument("--dtypes", default="fp8,int8", help="comma-separated, of fp8 and int8")
    parser.add_argument("--m", default="1,16,32,64,128,256,512,1024,4096,8192", help="comma-separated M")
    parser.add_argument("--weights", default="", metavar="NxK,...", help="other weight shapes than the eight")
    parser.add_argument("--budget", type=float, default=25, metavar="MS", help="device time per provider and point")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="kernel cache (sets CUTLASS_W8A8_CACHE_DIR)")
    parser.add_argument("--no-compile", action="store_true", help="a kernel missing from the cache is an error")
    parser.add_argument("--no-host", action="store_true", help="leave out the host time of eager calls")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements and conditions")
    parser.add_argument("--commit", help="recorded in the JSON")
    options = parser.parse_args()
    unknown = set(options.providers.split(",")) - set(PROVIDERS)
    if unknown:
        parser.error(f"--providers: {', '.join(sorted(unknown))} not among {', '.join(PROVIDERS)}")
    return options


OPTIONS = parse() if __name__ == "__main__" else argparse.Namespace(cache=None, no_compile=False)
sys.path.insert(0, str(ROOT))

from scripts.installed import require_package, set_cache

set_cache(OPTIONS.cache, OPTIONS.no_compile)
require_package()

import torch

import cutlass_w8a8
from cutlass_w8a8.bench import machine
from cutlass_w8a8.bench import providers as bench_providers
from cutlass_w8a8.bench import report as bench_report
from cutlass_w8a8.bench import timing as bench_timing
from cutlass_w8a8.bench.providers import Provider
from cutlass_w8a8.bench.shapes import WEIGHTS, Point


def choose_providers(options: argparse.Namespace) -> tuple[list[Provider], dict[str, str]]:
    """The providers to measure, and why the others are missing."""
    wanted = options.providers.split(",")
    missing = {name: "not asked for" for name in PROVIDERS if name not in wanted}
    makers = {
        "ours": bench_providers.ours,
        "vllm": lambda: bench_providers.vllm(options.vllm.resolve()),
        "torch_row": bench_providers.torch_row_wise,
        "int_mm": bench_providers.torch_int_mm,
        "bf16": bench_providers.bf16,
    }
    if "vllm" in wanted and options.vllm is None:
        missing["vllm"] = "no --vllm FILE"
    providers = []
    for name in wanted:
        if name in missing:
            continue
        try:
            providers.append(makers[name]())
        except (OSError, RuntimeError, AttributeError) as error:
            missing[name] = f"{type(error).__name__}: {error}"
    providers += [bench_providers.ours(config) for config in options.configs.split(",") if config]
    return providers, missing


def points(options: argparse.Namespace) -> list[Point]:
    """All points, those of one weight together, since making weights is slow."""
    shapes = [tuple(map(int, text.split("x"))) for text in options.weights.split(",") if text] or WEIGHTS
    batches = [int(m) for m in options.m.split(",")]
    return [Point(dtype, m, n, k) for n, k in shapes for dtype in options.dtypes.split(",") for m in batches]


def host(providers: list[Provider]) -> dict[str, float]:
    """Host microseconds of one eager call, M=16, N=K=4096, fp8: with a given output, and allocating one."""
    point = Point("fp8", 16, 4096, 4096)
    x = bench_providers.make_operands(point, bench_providers.FP8, 1)
    a, b = bench_providers.pick(x, 0)
    calls: dict[str, Any] = {}
    names = {provider.name for provider in providers}
    if "ours" in names:
        scaled_mm, bfloat16 = cutlass_w8a8.scaled_mm, torch.bfloat16
        calls["ours, output given"] = lambda: scaled_mm(a, b, x.scale_a, x.scale_b, bfloat16, out=x.out)
        calls["ours, output allocated"] = lambda: scaled_mm(a, b, x.scale_a, x.scale_b, bfloat16)
    if "vllm" in names:
        operator = torch.ops._C.cutlass_scaled_mm

        def allocating() -> None:
            out = torch.empty((16, 4096), dtype=torch.bfloat16, device=a.device)
            operator(out, a, b, x.scale_a, x.scale_b, None)

        calls["vllm, output given"] = lambda: operator(x.out, a, b, x.scale_a, x.scale_b, None)
        calls["vllm, output allocated"] = allocating
    if "torch_row" in names:
        calls["torch_row, output allocated"] = lambda: torch._scaled_mm(
            a, b, x.scale_a, x.scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    return bench_timing.host_times(calls) if calls else {}


def main(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("bench.py measures on a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    start = time.perf_counter()
    providers, missing = choose_providers(options)
    before = machine.facts(options.commit)
    results = []
    for point in points(options):
        results.append(bench_timing.measure(point, providers, options.budget))
        fastest = ", ".join(f"{name} {t:.1f}" for name, t in list(results[-1].microseconds.items())[:5])
        print(f"{point.name}: {fastest}", file=sys.stderr, flush=True)
    host_times = {} if options.no_host else host(providers)
    rows = bench_report.summary(results, providers)
    seconds = time.perf_counter() - start
    print(bench_report.table(results, providers))
    print()
    print(bench_report.summary_table(rows))
    for name, microseconds in host_times.items():
        print(f"host time of an eager call, {name}: {microseconds:.2f} us")
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}")
    for line in bench_report.error_lines(results):
        print(f"error: {line}")
    print(f"{len(results)} points in {seconds:.0f} s")
    if options.json:
        machine.write_json(
            options.json,
            {
                "machine": before,
                "gpu after": machine.gpu_state(),
                "method": {
                    "weight bytes": bench_timing.WEIGHT_BYTES,
                    "rounds": [bench_timing.MIN_ROUNDS, bench_timing.MAX_ROUNDS],
                    "budget ms": options.budget,
                    "seconds": seconds,
                },
                "providers": [provider.name for provider in providers],
                "missing": missing,
                "summary": rows,
                "host microseconds": host_times,
                "points": [asdict(result) for result in results],
            },
        )
    return 1 if "ours" in options.providers and any("ours" in r.errors for r in results) else 0


if __name__ == "__main__":
    sys.exit(main(OPTIONS))
