"""The form of a heuristic table: configurations, the problems they are meant for, and what each is expected to take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dtypes import DType

UNBOUNDED = 2**31


@dataclass(frozen=True)
class Cost:
    """How long a kernel takes in microseconds, fitted to measurements.

    A wave is one output tile on every multiprocessor. Waves take ``us_per_1000_k`` for each 1000 of k (later ones
    ``rest`` times that of the first) and ``us_per_wave`` besides; the whole takes no less than its operands do at
    ``tb_per_s``, and ``fixed_us`` more than either.
    """

    us_per_1000_k: float
    rest: float
    us_per_wave: float
    fixed_us: float
    tb_per_s: float

    # Of the device it was measured on, and assumed where the device at hand is not known.
    SMS = 132

    def time(self, config: KernelConfig, m: int, n: int, k: int, sm_count: int | None = None) -> float:
        """The expected time of an m x n x k problem on ``sm_count`` multiprocessors, in microseconds."""
        waves = -(-blocks(config, m, n) // (sm_count or self.SMS))
        compute = (
            1 + self.rest * (waves - 1)
        ) * self.us_per_1000_k * k / config.slices / 1000 + self.us_per_wave * waves
        memory = (n * k + m * k + 2 * m * n) / 1e6 / self.tb_per_s
        return max(compute, memory) + self.fixed_us


@dataclass(frozen=True)
class Roofline:
    """How many clocks a kernel takes at best, by what its device can do; for devices that no cost was fitted on.

    A block multiplies its tile at the tensor core's rate and fetches its operands at ``L2_BYTES``, whichever takes
    longer, and ``WAVE_CLOCKS`` besides; a wave is one block on every multiprocessor. Meanwhile the operands come from
    memory at ``dram_bytes``; of the shorter of the two, ``UNHIDDEN`` is not hidden behind the longer. All rates are per
    clock of the multiprocessors.

    Attributes:
        sms: multiprocessors of a typical device, assumed where the device at hand is not known.
        macs: multiplications of one multiprocessor.
        dram_bytes: bytes from memory.
    """

    sms: int
    macs: int
    dram_bytes: int

    # Assumed alike everywhere: what a multiprocessor gets from L2 per clock, and what a tile costs beside its main
    # loop, filling the pipeline and storing; and that work and memory do not overlap to the last.
    L2_BYTES = 32
    WAVE_CLOCKS = 1000
    UNHIDDEN = 0.1

    def time(self, config: KernelConfig, m: int, n: int, k: int, sm_count: int | None = None) -> float:
        """The expected time of an m x n x k problem on ``sm_count`` multiprocessors, in clocks."""
        waves = -(-blocks(config, m, n) // (sm_count or self.sms))
        (_, tile_n, _), (cluster_m, cluster_n) = config.tile, config.cluster
        rows = config.block_m
        multiply = rows * tile_n * k / self.macs
        fetch = (rows / cluster_n + tile_n / cluster_m) * k / self.L2_BYTES
        memory = (n * k + m * k + 2 * m * n) / self.dram_bytes
        work = waves * (max(multiply, fetch) + self.WAVE_CLOCKS)
        return max(work, memory) + self.UNHIDDEN * min(work, memory)


def blocks(config: KernelConfig, m: int, n: int) -> int:
    """Thread blocks of an m x n problem: one for a tile or a slice of its k, clusters filled up."""
    rows, columns = (n, m) if config.swap_ab else (m, n)
    along_m = _round_up(-(-rows // config.block_m), config.cluster[0])
    return along_m * _round_up(-(-columns // config.tile[1]), config.cluster[1]) * config.slices


@dataclass(frozen=True)
class Row:
    """A configuration and the problems it is meant for (bounds inclusive).

    Of the rows that fit a problem, the one that is expected to take least serves it, and the first of several alike.
    """

    config: KernelConfig
    cost: Cost | Roofline
    min_m: int = 0
    max_m: int = UNBOUNDED
    min_n: int = 0
    max_n: int = UNBOUNDED
    min_k: int = 0

    def fits(self, m: int, n: int, k: int) -> bool:
        """Whether an m x n x k problem is within this row's bounds."""
        return self.min_m <= m <= self.max_m and self.min_n <= n <= self.max_n and self.takes(k)

    def takes(self, k: int) -> bool:
        """Whether ``k`` is long enough, and can be divided as the configuration asks."""
        return k >= self.min_k and k % self.config.k_multiple == 0

    def time(self, m: int, n: int, k: int, sm_count: int | None = None) -> float:
        """The expected time, comparable with that of other rows of the same table."""
        return self.cost.time(self.config, m, n, k, sm_count)


# Rows by arch and operand type.
Tables = dict[str, dict[DType, tuple[Row, ...]]]


def row(config: str, cost: Cost | Roofline, **bounds: int) -> Row:
    """A row from a configuration's name, its cost and its bounds."""
    return Row(KernelConfig.parse(config), cost, **bounds)


def rows(configs: Iterable[str], roofline: Roofline) -> tuple[Row, ...]:
    """A row without bounds for each configuration's name."""
    return tuple(row(config, roofline) for config in configs)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
