"""The form of a heuristic table: configurations, the problems they are meant for, and what each is expected to take."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log2

from cutlass_w8a8.config import KernelConfig, Schedule
from cutlass_w8a8.dtypes import DType

UNBOUNDED = 2**31
# Blocks along y, of every architecture.
MAX_GRID_Y = 65535


@dataclass(frozen=True)
class Cost:
    """How long a kernel takes in microseconds, fitted to measurements.

    A wave is one block on every multiprocessor. Waves take ``us_per_1000_k`` for each 1000 of a block's k (later ones
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
        block_k = k / config.slices
        compute = (1 + self.rest * (waves - 1)) * self.us_per_1000_k * block_k / 1000 + self.us_per_wave * waves
        memory = traffic(m, n, k) / 1e6 / self.tb_per_s
        return max(compute, memory) + self.fixed_us


@dataclass(frozen=True)
class Corrected:
    """A cost that was found to be off by known factors at the problems it was measured on.

    A problem's factor is the mean of theirs, in logarithms: those count by their distance, and ``PRIOR`` counts for no
    correction. In octaves, distances along M are short, since tiles along M are few, and along N and K long.

    Attributes:
        cost: the fitted cost.
        residuals: (m, n, k, ln of the time measured over the time that ``cost`` expects), by ascending m.
    """

    cost: Cost
    residuals: tuple[tuple[int, int, int, float], ...]

    # Chosen by leaving out one weight shape of an H200's eight after the other (benchmarks/README.md).
    PER_OCTAVE_M = 2.0
    PER_OCTAVE_NK = 0.6
    PRIOR = 0.1
    # Beyond this factor of M a residual's weight is below 1e-4.
    REACH = 4.5

    def time(self, config: KernelConfig, m: int, n: int, k: int, sm_count: int | None = None) -> float:
        """The expected time of an m x n x k problem on ``sm_count`` multiprocessors, in microseconds."""
        weighted, weights = 0.0, self.PRIOR
        first = bisect_left(self.residuals, (int(m / self.REACH),))
        last = bisect_right(self.residuals, (int(m * self.REACH) + 1,))
        for at_m, at_n, at_k, residual in self.residuals[first:last]:
            along_m = self.PER_OCTAVE_M * log2(m / at_m)
            along_n, along_k = self.PER_OCTAVE_NK * log2(n / at_n), self.PER_OCTAVE_NK * log2(k / at_k)
            weight = exp(-(along_m * along_m + along_n * along_n + along_k * along_k) / 2)
            weighted += weight * residual
            weights += weight
        return self.cost.time(config, m, n, k, sm_count) * exp(weighted / weights)


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
        block_k = k / config.slices
        multiply = rows * tile_n * block_k / self.macs
        fetch = (rows / cluster_n + tile_n / cluster_m) * block_k / self.L2_BYTES
        memory = traffic(m, n, k) / self.dram_bytes
        work = waves * (max(multiply, fetch) + self.WAVE_CLOCKS)
        return max(work, memory) + self.UNHIDDEN * min(work, memory)


def blocks(config: KernelConfig, m: int, n: int) -> int:
    """Thread blocks of an m x n problem: one for a tile, or for each slice of its k, clusters and strips filled up."""
    rows, columns = (n, m) if config.swap_ab else (m, n)
    along_m = _round_up(-(-rows // config.block_m), config.cluster[0])
    along_n = _round_up(-(-columns // config.tile[1]), config.cluster[1])
    # CUTLASS's persistent scheduler (4.2, get_log_swizzle_size) visits strips as wide as swizzle allows and the shorter
    # side warrants, and fills both sides up to whole strips of clusters.
    shorter = min(along_m, along_n)
    strip = next((w for w, least in ((8, 6), (4, 3), (2, 2)) if config.swizzle >= w and shorter >= least), 1)
    along_m = _round_up(along_m, strip * config.cluster[0])
    return along_m * _round_up(along_n, strip * config.cluster[1]) * config.slices


def in_grid(config: KernelConfig, m: int, n: int) -> bool:
    """Whether a launch grid holds the blocks of an m x n problem: without persistent blocks, one a tile."""
    columns = m if config.swap_ab else n
    needed = _round_up(-(-columns // config.tile[1]), config.cluster[1])
    return config.schedule is not Schedule.WARP_SPECIALIZED or needed <= MAX_GRID_Y


def traffic(m: int, n: int, k: int) -> int:
    """Bytes that an m x n x k problem moves at least: 8-bit operands in, 16-bit results out."""
    return n * k + m * k + 2 * m * n


@dataclass(frozen=True)
class Row:
    """A configuration and the problems it is meant for (bounds inclusive).

    Of the rows that fit a problem, the one that is expected to take least serves it, and the first of several alike.
    """

    config: KernelConfig
    cost: Cost | Corrected | Roofline
    min_m: int = 0
    max_m: int = UNBOUNDED
    min_n: int = 0
    max_n: int = UNBOUNDED
    min_k: int = 0

    def fits(self, m: int, n: int, k: int) -> bool:
        """Whether an m x n x k problem is within this row's bounds, and those of the device."""
        return (
            self.min_m <= m <= self.max_m
            and self.min_n <= n <= self.max_n
            and self.takes(k)
            and in_grid(self.config, m, n)
        )

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
