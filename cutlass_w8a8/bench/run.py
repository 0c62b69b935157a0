"""A whole run on the GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cutlass_w8a8.bench import ceilings, host, machine, providers, timing
from cutlass_w8a8.bench.results import PROVIDERS, Run
from cutlass_w8a8.bench.shapes import BATCHES, DTYPES, WEIGHTS, Weights, points
from cutlass_w8a8.errors import UnsupportedError


@dataclass
class Plan:
    """What to measure.

    Attributes:
        weights: N and K of each weight, and the layers that have it.
        left_out: why layers asked for have no weight.
        batches: M.
        dtypes: of `shapes.DTYPES`.
        orders: keys of `shapes.ORDERS`.
        providers: of `results.PROVIDERS`.
        configs: configurations of ours to force besides.
        vllm, vllm_ops: vLLM's library with its GEMM, and that with its quantisation.
        budget_ms: device time for each provider and point, in milliseconds.
        host: whether to measure host time too.
        commit: recorded.
    """

    weights: Weights = field(default_factory=lambda: {weight: [] for weight in WEIGHTS})
    left_out: list[str] = field(default_factory=list)
    batches: Sequence[int] = BATCHES
    dtypes: Sequence[str] = DTYPES
    orders: Sequence[str] = ("alone",)
    providers: Sequence[str] = PROVIDERS
    configs: Sequence[str] = ()
    vllm: Path | None = None
    vllm_ops: Path | None = None
    budget_ms: float = 25
    host: bool = True
    commit: str | None = None


def run(plan: Plan) -> Run:
    """Measure all points of ``plan``, telling of each on standard error.

    Raises:
        UnsupportedError: torch sees no CUDA device.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "bench measures on a CUDA device, and torch sees none; --from-json FILE shows what an earlier run found"
        )
    begin = time.perf_counter()
    by_order = {
        order: providers.choose(order, list(plan.providers), list(plan.configs), plan.vllm, plan.vllm_ops)
        for order in plan.orders
    }
    before = machine.facts(plan.commit)
    found = Run(
        columns=list(dict.fromkeys(provider.column for made, _, _ in by_order.values() for provider in made)),
        points=[],
        missing=merged({order: missing for order, (_, missing, _) in by_order.items()}),
        layers={f"{n}x{k}": layers for (n, k), layers in plan.weights.items() if layers},
        ceilings=ceilings.find(),
    )
    for point in points(plan.weights, plan.batches, plan.dtypes, plan.orders):
        found.points.append(timing.measure(point, by_order[point.order][0], plan.budget_ms))
        fastest = ", ".join(f"{name} {us:.1f}" for name, us in list(found.points[-1].microseconds.items())[:5])
        print(f"{point.name}: {fastest}", file=sys.stderr, flush=True)
    names = {column.name for column in found.columns}
    found.conditions = {
        "machine": before,
        "gpu after": machine.gpu_state(),
        "host microseconds": host.host_times(host.eager_calls(names)) if plan.host else {},
        "quantisation for peers": by_order["chain"][2] if "chain" in by_order else "",
        "left out": plan.left_out,
        "method": {
            "weight bytes": timing.WEIGHT_BYTES,
            "calls in a graph, at least": timing.LEAST_CALLS,
            "rounds": [timing.MIN_ROUNDS, timing.MAX_ROUNDS],
            "budget ms": plan.budget_ms,
            "orders": list(plan.orders),
            "seconds": time.perf_counter() - begin,
        },
    }
    return found


def merged(missing: dict[str, dict[str, str]]) -> dict[str, str]:
    """Why providers are missing: by name where it holds for every order alike, else by ``order: name``.

    Args:
        missing: by order, why each missing provider is.
    """
    found: dict[str, str] = {}
    for order, reasons in missing.items():
        for name, reason in reasons.items():
            everywhere = all(other.get(name) == reason for other in missing.values())
            found[name if everywhere else f"{order}: {name}"] = reason
    return found
