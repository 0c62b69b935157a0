"""The form of a heuristic table: rows bounded by extents, and what a kernel is expected to take."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_w8a8.config import KernelConfig

UNBOUNDED = 2**31


@dataclass(frozen=True)
class Cost:
    """How long a kernel takes, fitted to measurements on a device of ``SMS`` multiprocessors.

    A wave is one output tile on every multiprocessor. Waves take ``us_per_1000_k`` for each 1000 of k (later ones
    ``rest`` times that of the first) and ``us_per_wave`` besides; the whole takes no less than its operands do at
    ``tb_per_s``, and ``fixed_us`` more than either.
    """

    us_per_1000_k: float
    rest: float
    us_per_wave: float
    fixed_us: float
    tb_per_s: float

    SMS = 132

    def microseconds(self, config: KernelConfig, m: int, n: int, k: int) -> float:
        """The expected time of an m x n x k problem."""
        rows, columns = (n, m) if config.swap_ab else (m, n)
        (tile_m, tile_n, _), (cluster_m, cluster_n) = config.tile, config.cluster
        tiles = _round_up(-(-rows // tile_m), cluster_m) * _round_up(-(-columns // tile_n), cluster_n)
        waves = -(-tiles // self.SMS)
        compute = (1 + self.rest * (waves - 1)) * self.us_per_1000_k * k / 1000 + self.us_per_wave * waves
        memory = (n * k + m * k + 2 * m * n) / 1e6 / self.tb_per_s
        return max(compute, memory) + self.fixed_us


@dataclass(frozen=True)
class Row:
    """A configuration and the problems it is meant for (bounds inclusive).

    Of the rows that fit a problem, the one whose cost is least serves it, and the first of several alike; rows
    without a cost count as 0, so that a table of such rows reads from top to bottom.
    """

    config: KernelConfig
    min_m: int = 0
    max_m: int = UNBOUNDED
    min_n: int = 0
    max_n: int = UNBOUNDED
    min_k: int = 0
    cost: Cost | None = None

    def fits(self, m: int, n: int, k: int) -> bool:
        """Whether an m x n x k problem is within this row's bounds."""
        return self.min_m <= m <= self.max_m and self.min_n <= n <= self.max_n and k >= self.min_k

    def time(self, m: int, n: int, k: int) -> float:
        """The expected time in microseconds; 0 without a cost."""
        return self.cost.microseconds(self.config, m, n, k) if self.cost else 0.0


def row(config: str, cost: Cost | None = None, **bounds: int) -> Row:
    """A row from a configuration's name, its cost and its bounds."""
    return Row(KernelConfig.parse(config), cost=cost, **bounds)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
