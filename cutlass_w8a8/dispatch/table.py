"""The form of a heuristic table: rows tried in order, the first that fits serves."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_w8a8.config import KernelConfig

UNBOUNDED = 2**31


@dataclass(frozen=True)
class Row:
    """One row: problems within all its bounds (inclusive) take its configuration."""

    config: KernelConfig
    max_m: int = UNBOUNDED
    max_n: int = UNBOUNDED
    min_n: int = 0
    min_k: int = 0

    def fits(self, m: int, n: int, k: int) -> bool:
        """Whether this row serves an m x n x k problem."""
        return m <= self.max_m and self.min_n <= n <= self.max_n and k >= self.min_k


def row(config: str, **bounds: int) -> Row:
    """A row from a configuration's name and its bounds."""
    return Row(KernelConfig.parse(config), **bounds)
