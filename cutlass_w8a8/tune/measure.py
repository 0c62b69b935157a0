"""Times of candidates on the GPU: all of them quickly, the near ones in other tile orders too, the last few well."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import cutlass_w8a8
from cutlass_w8a8.bench import accuracy, machine, timing
from cutlass_w8a8.bench.providers import Operands, Provider, pick
from cutlass_w8a8.bench.results import Measurement
from cutlass_w8a8.bench.shapes import Point
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import UnsupportedError
from cutlass_w8a8.problem import OVERLAPS
from cutlass_w8a8.runtime.device import arch_of, device
from cutlass_w8a8.tune.plan import KEEP, model_of, near_best
from cutlass_w8a8.tune.records import OPERANDS, Log, Record
from cutlass_w8a8.tune.space import launch_choices

# Slower than this many times the best of a quick round, a candidate is dropped.
DROP = 1.15
# After two quick rounds, so many at most are measured well.
FINALISTS = 12
# Device time of a candidate and point in a quick round: the fewest replays that have a median.
QUICK_MS = 1.0
# The device spins as long as it has multiplied: dozens of candidates in a row throttle it, and all tiles look alike.
REST = 1.0

Round = Callable[[Sequence[KernelConfig], float], Measurement]
"""Measure configurations beside each other, about so many milliseconds each."""


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        kernels: candidates by operand type, compiled beforehand.
        points: extents and types, those of a weight together.
        overlaps: of `OVERLAPS`.
        budget_ms: device time for each finalist at a point, in milliseconds.
        keep: candidates whose modelled time is so many times the best are not measured at a point.
        seconds: stop before the point that would begin later than this; None for no limit.
    """

    kernels: Mapping[DType, Sequence[KernelConfig]]
    points: Sequence[Point]
    overlaps: Sequence[str] = OVERLAPS[:1]
    budget_ms: float = 25
    keep: float = KEEP
    seconds: float | None = None


def facts(commit: str | None = None) -> dict[str, Any]:
    """What `Log` wants to know of the current GPU.

    Raises:
        UnsupportedError: torch sees no GPU, or no kernels run on it.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "tune measure times kernels on a CUDA device, and torch sees none; plan, compile and fit do without"
        )
    return machine.facts(commit) | {"arch": arch_of(device(torch.cuda.current_device())).name}


def provider(config: KernelConfig, overlap: str) -> Provider:
    """Our call with ``config``, launched as ``overlap`` says."""

    def call(x: Operands, i: int) -> object:
        a, b = pick(x, i)
        return cutlass_w8a8.scaled_mm(
            a, b, x.scale_a, x.scale_b, torch.bfloat16, out=x.out, config=config, overlap=overlap
        )

    return Provider(config.name, call, lambda _: True, forced=True)


def run(plan: Plan, log: Log, told: Callable[[str, int, int], None]) -> bool:
    """Measure what ``log`` does not have, and add it point by point.

    Args:
        plan: what to measure.
        log: where records go.
        told: called after each point with a line about it, the points done, and all points.

    Returns:
        Whether everything is done; not if time ran out.

    Raises:
        UnsupportedError: no kernels run on the GPU, or an overlap does not exist.
    """
    begin = time.monotonic()
    where = device(torch.cuda.current_device())
    arch = arch_of(where)
    todo = [(point, overlap) for point in plan.points for overlap in plan.overlaps]
    for done, (point, overlap) in enumerate(todo):
        key = (point.dtype, overlap, point.m, point.n, point.k)
        if key in log.finished:
            continue
        if plan.seconds is not None and time.monotonic() - begin > plan.seconds:
            return False
        operand = OPERANDS[point.dtype]
        extents = point.m, point.n, point.k
        model = model_of(arch, operand, where.sm_count)
        near_ones = list(near_best(model, plan.kernels.get(operand, ()), [extents], plan.keep)[extents])
        record = measure_point(key, near_ones, partial(_round, point, overlap), plan.budget_ms, where.sm_count)
        log.append(record)
        best = min(record.microseconds, key=record.microseconds.__getitem__, default="none")
        us = f"{record.microseconds[best]:.1f} us, {best}" if record.microseconds else "no kernel ran"
        wrong = f", {len(record.errors)} failed" if record.errors else ""
        told(f"{point.name} {overlap}: {us} (of {len(near_ones)}{wrong})", done + 1, len(todo))
    return True


def _round(point: Point, overlap: str, configs: Sequence[KernelConfig], budget_ms: float) -> Measurement:
    return timing.measure(point, [provider(config, overlap) for config in configs], budget_ms, rest=REST)


def measure_point(
    key: tuple[str, str, int, int, int],
    candidates: Sequence[KernelConfig],
    round_: Round,
    budget_ms: float,
    sm_count: int,
) -> Record:
    """The times of ``candidates`` at one point, by successive halving.

    All take a quick round. Those within `DROP` of the best take another, together with their launch-time choices, and
    the best `FINALISTS` of these the long one. Times of those that dropped out are scaled by what the finalists took in
    the long round over what they took in the quick one, so that all are of one clock.

    Args:
        key: type, overlap, m, n and k.
        candidates: kernels, without launch-time choices.
        round_: measures.
        budget_ms: device time for each finalist, in milliseconds.
        sm_count: multiprocessors of the device.
    """
    dtype, overlap, m, n, k = key
    errors: dict[str, str] = {}

    def times(configs: Sequence[KernelConfig], budget: float) -> dict[KernelConfig, float]:
        result = round_(configs, budget)
        errors.update({name: error[:300] for name, error in result.errors.items()})
        for name, found in result.accuracy.items():
            if accuracy.wrong(found):
                errors[name] = f"wrong result: {found}"
        known = result.microseconds.keys() - errors.keys()
        return {config: result.microseconds[config.name] for config in configs if config.name in known}

    first = times(candidates, QUICK_MS) if candidates else {}
    second = times([v for c in near(first) for v in launch_choices(c, m, n, sm_count)], QUICK_MS) if first else {}
    last = times(near(second)[:FINALISTS], budget_ms) if second else {}
    merged = {**scaled(first, second), **second}
    final = {config: us for config, us in {**scaled(merged, last), **last}.items() if config.name not in errors}
    return Record(
        dtype,
        overlap,
        m,
        n,
        k,
        {config.name: us for config, us in sorted(final.items(), key=lambda item: item[1])},
        [config.name for config in final if config not in last],
        errors,
    )


def near(times: Mapping[KernelConfig, float]) -> list[KernelConfig]:
    """The configurations within `DROP` of the best, the fastest first."""
    best = min(times.values(), default=0.0)
    return sorted((config for config, us in times.items() if us <= DROP * best), key=lambda config: times[config])


def scaled(quick: Mapping[KernelConfig, float], slow: Mapping[KernelConfig, float]) -> dict[KernelConfig, float]:
    """``quick`` times as if they had been taken in the round of the ``slow`` ones."""
    ratios = [us / quick[config] for config, us in slow.items() if config in quick]
    factor = statistics.median(ratios) if ratios else 1.0
    return {config: us * factor for config, us in quick.items()}
