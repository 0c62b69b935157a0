"""Whether time grows smoothly with M: a dense series of M, and the steps in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from cutlass_w8a8.bench.results import Measurement
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch.table import blocks

STEP = 0.15
"""Neighbours in the series are at most an eighth apart (a quarter below 64), where time may grow as much."""


@dataclass(frozen=True)
class Step:
    """Time that grows by more than `STEP` from one M to the next.

    Attributes:
        where: type, order, N and K.
        before, after: neighbouring M.
        growth: time at ``after`` over time at ``before``, less 1.
        tiles: tiles at ``before`` and at ``after``; None if the configurations were not recorded.
    """

    where: str
    before: int
    after: int
    growth: float
    tiles: tuple[int, int] | None = None

    def __str__(self) -> str:
        tiles = f", {self.tiles[0]} tiles to {self.tiles[1]}" if self.tiles else ""
        return f"{self.where}: +{self.growth:.0%} from M={self.before} to {self.after}{tiles}"


def dense_batches() -> list[int]:
    """About 60 M from 1 to 1024: around each power of two, where choices change, and evenly between them."""
    chosen = {1, 2, 3}
    for exponent in range(2, 11):
        power = 1 << exponent
        chosen |= {power - 1, power, power + 1}
        pieces = 8 if power >= 64 else 4
        chosen |= {power + power * piece // pieces for piece in range(1, pieces)}
    return sorted(m for m in chosen if m <= 1024)


def steps(results: Sequence[Measurement], provider: str = "ours") -> list[Step]:
    """Steps up in the times of ``provider``, the largest first."""
    found = []
    timed = [r for r in results if provider in r.microseconds]

    def series(r: Measurement) -> tuple[str, str, int, int]:
        return r.point.dtype, r.point.order, r.point.n, r.point.k

    for (dtype, order, n, k), group in groupby(sorted(timed, key=lambda r: (*series(r), r.point.m)), series):
        members = list(group)
        for left, right in pairwise(members):
            growth = right.microseconds[provider] / left.microseconds[provider] - 1
            if growth > STEP:
                found.append(Step(f"{dtype} {order} {n}x{k}", left.point.m, right.point.m, growth, _tiles(left, right)))
    return sorted(found, key=lambda step: -step.growth)


def _tiles(left: Measurement, right: Measurement) -> tuple[int, int] | None:
    if left.config is None or right.config is None:
        return None
    before, after = (blocks(KernelConfig.parse(str(r.config)), r.point.m, r.point.n) for r in (left, right))
    return before, after
