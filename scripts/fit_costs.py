#!/usr/bin/env python3
"""Fit the cost model of an arch's heuristic table to measured times, and say how good the table's choice is.

    python scripts/bench.py --configs ... --json configs.json
    python scripts/fit_costs.py configs.json

Prints, for each row of the arch's tables, the five numbers of its cost fitted to the points within the row's bounds
(near-best configurations weigh most), and for the committed tables the time lost against the best measured
configuration at each point. The numbers are put into cutlass_w8a8/dispatch/ by hand. Tables of a device, which need no
hand, are made by cutlass-w8a8 tune fit.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.installed import require_package

require_package()

from cutlass_w8a8.arch import arch_named
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch.select import TABLES, select
from cutlass_w8a8.dispatch.table import Cost
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.problem import Problem
from cutlass_w8a8.tune.costs import fit_cost, numbers
from cutlass_w8a8.tune.records import Extents, Times, read
from tests.reference_tables import REFERENCE


def choice(arch: str, operand: DType, extents: Extents, sm_count: int) -> KernelConfig:
    """What the arch's table chooses for a problem of these extents."""
    return select(Problem(arch_named(arch), *extents, operand, DType.BF16, EpilogueSpec.of(), sm_count))


def losses(arch: str, operand: DType, times: Times, sm_count: int) -> list[tuple[float, Extents, str]]:
    """For each point: time of the chosen configuration over that of the best, the extents, and the choice."""
    found = []
    for extents, configs in times.items():
        chosen = choice(arch, operand, extents, sm_count)
        us = configs.get(chosen, configs.get(chosen.compiled))
        if us is not None:
            found.append((us / min(configs.values()), extents, chosen.name))
    return sorted(found, reverse=True)


def gains(arch: str, operand: DType, times: Times, sm_count: int) -> list[tuple[float, Extents]]:
    """For each point: time of the configuration that vLLM would choose over that of ours."""
    reference = REFERENCE.get((arch, operand.value))
    found = []
    for extents, configs in times.items() if reference else ():
        ours, theirs = choice(arch, operand, extents, sm_count), KernelConfig.parse(reference(*extents))
        if ours in configs and theirs in configs:
            found.append((configs[theirs] / configs[ours], extents))
    return sorted(found)


def mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "times", type=Path, nargs="+", help="JSON of scripts/bench.py --configs, or lines of tune measure"
    )
    parser.add_argument("--arch", default="sm90", choices=sorted(TABLES))
    parser.add_argument("--sm-count", type=int, help="multiprocessors to choose for; default: those measured on")
    options = parser.parse_args(arguments)
    measured = read(options.times)
    sm_count = options.sm_count or measured.machine.sm_count
    for (operand, overlap), times in measured.times.items():
        print(f"\n{options.arch} {operand.value}, overlap {overlap}: {len(times)} points")
        best = {extents: min(configs.values()) for extents, configs in times.items()}
        for row in TABLES[options.arch].get(operand, ()):
            own = {x: configs[row.config] for x, configs in times.items() if row.config in configs and row.fits(*x)}
            fitted = fit_cost(row.config, own, best, sm_count) if isinstance(row.cost, Cost) else None
            if fitted:
                cost, error = fitted
                print(f"  {row.config.name:40} Cost{numbers(cost)}  rms error {error:.1%}")
        lost = losses(options.arch, operand, times, sm_count)
        if lost:
            print(f"  committed table: {mean([ratio for ratio, _, _ in lost]) - 1:.1%} slower than the best measured "
                  "configuration on average; worst:")  # fmt: skip
            for ratio, extents, name in lost[:5]:
                print(f"    {'x'.join(map(str, extents)):18} {ratio:.2f} times the best, with {name}")
        gained = gains(options.arch, operand, times, sm_count)
        if gained:
            (low, where_low), (high, where_high) = gained[0], gained[-1]
            print(f"  vLLM's choice among these kernels over ours: {mean([ratio for ratio, _ in gained]):.3f} on "
                  f"average, {low:.2f} to {high:.2f} "
                  f"({'x'.join(map(str, where_low))} to {'x'.join(map(str, where_high))})")  # fmt: skip


if __name__ == "__main__":
    main()
