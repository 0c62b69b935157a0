"""Host time of eager calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import cutlass_w8a8
from cutlass_w8a8.bench.providers import FP8, make_operands, pick
from cutlass_w8a8.bench.shapes import Point

POINT = Point("fp8", 16, 4096, 4096)


def eager_calls(names: set[str]) -> dict[str, Callable[[], object]]:
    """Calls at `POINT` of those providers among ``names`` that have an eager one, by description.

    A result is either given or allocated by the call.
    """
    x = make_operands(POINT, FP8, 1)
    a, b = pick(x, 0)
    calls: dict[str, Callable[[], object]] = {}
    bfloat16 = torch.bfloat16
    if "ours" in names:
        scaled_mm = cutlass_w8a8.scaled_mm
        calls["ours, output given"] = lambda: scaled_mm(a, b, x.scale_a, x.scale_b, bfloat16, out=x.out)
        calls["ours, output allocated"] = lambda: scaled_mm(a, b, x.scale_a, x.scale_b, bfloat16)
        prepared = cutlass_w8a8.prepare(b, x.scale_b, bfloat16)
        calls["ours prepared, output given"] = lambda: prepared(a, x.scale_a, out=x.out)
        calls["ours prepared, output allocated"] = lambda: prepared(a, x.scale_a)
    if "vllm" in names:
        operator: Any = torch.ops._C.cutlass_scaled_mm

        def allocating() -> None:
            out = torch.empty((POINT.m, POINT.n), dtype=bfloat16, device=a.device)
            operator(out, a, b, x.scale_a, x.scale_b, None)

        calls["vllm, output given"] = lambda: operator(x.out, a, b, x.scale_a, x.scale_b, None)
        calls["vllm, output allocated"] = allocating
    if "torch_row" in names:
        calls["torch_row, output allocated"] = lambda: torch._scaled_mm(
            a, b, x.scale_a, x.scale_b, out_dtype=bfloat16, use_fast_accum=True
        )
    return calls


def host_times(calls: dict[str, Callable[[], object]], rounds: int = 9, repeats: int = 400) -> dict[str, float]:
    """Median host microseconds to enqueue one call, the calls' rounds interleaved.

    Rounds are short enough that the launch queue never fills and makes the host wait for the device.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            # The first round warms caches up.
            if round_:
                times[name].append((time.perf_counter() - start) / repeats * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in times.items()}
