#!/usr/bin/env python3
"""Fit the cost model of the heuristic tables to measured times, and say how good the choice then is.

    python scripts/bench.py --configs ... --json configs.json
    python scripts/fit_costs.py configs.json

Prints, for each row of the arch's tables, the five numbers of its cost fitted to the points within the row's bounds
(near-best configurations weigh most), and for the committed tables the time lost against the best measured
configuration at each point. The numbers are put into cutlass_w8a8/dispatch/ by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.installed import require_package

require_package()

from cutlass_w8a8.arch import arch_named
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch.select import TABLES, select
from cutlass_w8a8.dispatch.table import Cost, Row
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.problem import Problem
from tests.reference_tables import REFERENCE

OPERANDS = {"fp8": DType.E4M3, "int8": DType.INT8}
LOWER, UPPER = (0.01, 0.4, 0.0, 0.0, 1.0), (30.0, 1.4, 10.0, 6.0, 5.5)
STARTS = [(per_k, 0.9, per_wave, 2.0, 4.0) for per_k in (0.3, 1.0, 3.0) for per_wave in (0.5, 2.0)]

Extents = tuple[int, int, int]
Times = dict[Extents, dict[str, float]]


def read(path: Path) -> dict[DType, Times]:
    """Times in microseconds by operand type, extents and configuration name."""
    times: dict[DType, Times] = {operand: {} for operand in OPERANDS.values()}
    for entry in json.loads(path.read_text())["points"]:
        point = entry["point"]
        if point.get("order", "alone") != "alone":
            continue
        configs = {KernelConfig.parse(name).name: us for name, us in entry["microseconds"].items() if "x" in name}
        times[OPERANDS[point["dtype"]]][point["m"], point["n"], point["k"]] = configs
    return times


def fit(row: Row, times: Times) -> tuple[Cost, float] | None:
    """The cost of ``row`` that explains its times best, and the root mean square of the relative error."""
    name = row.config.name
    points = [(e, t[name], min(t.values())) for e, t in times.items() if name in t and row.fits(*e)]
    if len(points) < len(LOWER):
        return None

    def residuals(parameters: np.ndarray, weigh: bool = True) -> list[float]:
        cost = Cost(*parameters)
        return [
            math.log(cost.time(row.config, *extents) / measured) * ((best / measured) ** 2 if weigh else 1)
            for extents, measured, best in points
        ]

    solutions = [
        least_squares(residuals, start, bounds=(LOWER, UPPER), loss="soft_l1", f_scale=0.05, diff_step=1e-3)
        for start in STARTS
    ]
    best = min(solutions, key=lambda solution: solution.cost)
    error = math.sqrt(np.mean(np.square(residuals(best.x, weigh=False))))
    return Cost(*(round(float(value), 2) for value in best.x)), error


def choice(arch: str, operand: DType, extents: Extents, sm_count: int) -> KernelConfig:
    """What dispatch chooses for a problem of these extents."""
    return select(Problem(arch_named(arch), *extents, operand, DType.BF16, EpilogueSpec.of(), sm_count))


def losses(arch: str, operand: DType, times: Times, sm_count: int) -> list[tuple[float, Extents, str]]:
    """For each point: time of the chosen configuration over that of the best, the extents, and the choice."""
    found = []
    for (m, n, k), configs in times.items():
        chosen = choice(arch, operand, (m, n, k), sm_count)
        us = configs.get(chosen.name) or configs.get(KernelConfig.parse(chosen.name).compiled.name)
        if us is not None:
            found.append((us / min(configs.values()), (m, n, k), chosen.name))
    return sorted(found, reverse=True)


def gains(arch: str, operand: DType, times: Times, sm_count: int) -> list[tuple[float, Extents]]:
    """For each point: time of the configuration that vLLM would choose over that of ours."""
    reference = REFERENCE.get((arch, operand.value))
    found = []
    for (m, n, k), configs in times.items() if reference else ():
        ours = choice(arch, operand, (m, n, k), sm_count).name
        theirs = KernelConfig.parse(reference(m, n, k)).name
        if ours in configs and theirs in configs:
            found.append((configs[theirs] / configs[ours], (m, n, k)))
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=Path, help="JSON of scripts/bench.py --configs")
    parser.add_argument("--arch", default="sm90", choices=sorted(TABLES))
    parser.add_argument(
        "--sm-count", type=int, default=132, help="multiprocessors of the GPU measured on; default: 132"
    )
    options = parser.parse_args()
    for operand, times in read(options.times).items():
        print(f"\n{options.arch} {operand.value}: {len(times)} points")
        for row in TABLES[options.arch].get(operand, ()):
            fitted = fit(row, times) if isinstance(row.cost, Cost) else None
            if fitted:
                cost, error = fitted
                numbers = (cost.us_per_1000_k, cost.rest, cost.us_per_wave, cost.fixed_us, cost.tb_per_s)
                print(f"  {row.config.name:40} Cost{numbers}  rms error {error:.1%}")
        lost = losses(options.arch, operand, times, options.sm_count)
        if lost:
            mean = math.exp(np.mean([math.log(ratio) for ratio, _, _ in lost]))
            print(f"  committed table: {mean - 1:.1%} slower than the best measured configuration on average; worst:")
            for ratio, extents, name in lost[:5]:
                print(f"    {'x'.join(map(str, extents)):18} {ratio:.2f} times the best, with {name}")
        gained = gains(options.arch, operand, times, options.sm_count)
        if gained:
            mean = math.exp(np.mean([math.log(ratio) for ratio, _ in gained]))
            (low, where_low), (high, where_high) = gained[0], gained[-1]
            print(f"  vLLM's choice among these kernels over ours: {mean:.3f} on average, {low:.2f} to {high:.2f} "
                  f"({'x'.join(map(str, where_low))} to {'x'.join(map(str, where_high))})")  # fmt: skip


if __name__ == "__main__":
    main()
