"""Which candidates to compile: those a model of the device does not rule out, and of these a diverse few."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from cutlass_w8a8.arch import Arch, Family
from cutlass_w8a8.config import KernelConfig, Schedule
from cutlass_w8a8.dispatch import rows_of
from cutlass_w8a8.dispatch.table import blocks, traffic
from cutlass_w8a8.dtypes import DType

Extents = tuple[int, int, int]

# Modelled times this many times the best are ruled out: on an H200 the fastest of each measured point is within 1.42.
KEEP = 1.45


@dataclass(frozen=True)
class Waves:
    """How long a Hopper kernel takes in clocks, by what its device can do; for candidates that nobody has measured.

    A block multiplies its tile, or takes its operands in, whichever takes longer; a wave of blocks also fills its
    pipelines and stores, which pingpong hides behind the next tile. Meanwhile the operands come from memory, with a
    bandwidth that few blocks cannot draw. The rates are fitted to an H200's times (benchmarks/README.md); near the best
    they are off by 8 %.

    Attributes:
        sms: multiprocessors.
        tb_per_s: memory bandwidth as the data sheet gives it, in TB/s.
    """

    sms: int = 132
    tb_per_s: float = 4.8

    MACS = 3500
    INGEST_BYTES = 74
    WAVE_CLOCKS = 3450
    # The part of it that pingpong does not hide from the second tile on.
    PINGPONG = 0.18
    DRAM_BYTES_PER_TB_S = 465
    UNHIDDEN = 0.15
    LAUNCH_CLOCKS = 3750
    # Below this n wgmma waits for the 64 rows of its other operand.
    NARROWEST = 32

    def time(self, config: KernelConfig, m: int, n: int, k: int) -> float:
        """The clocks that an m x n x k problem takes."""
        rows, columns, block_k = config.block_m, config.tile[1], k / config.slices
        count = blocks(config, m, n)
        # A cluster needs all of its multiprocessors at once, and what is left over stays idle.
        cluster = prod(config.cluster) * config.slices
        waves = -(-count // max(cluster, self.sms // cluster * cluster))
        multiply = rows * max(columns, self.NARROWEST) * block_k / self.MACS
        ingest = (rows + columns) * block_k / self.INGEST_BYTES
        # The sums of a tile's slices travel between them as float32.
        exchange = rows * columns * 4 / self.INGEST_BYTES if config.slices > 1 else 0.0
        later = self.PINGPONG if config.schedule is Schedule.PINGPONG else 1.0
        work = waves * (max(multiply, ingest) + exchange) + (1 + (waves - 1) * later) * self.WAVE_CLOCKS
        bandwidth = self.tb_per_s * self.DRAM_BYTES_PER_TB_S
        memory = traffic(m, n, k) / min(bandwidth, count * self.INGEST_BYTES)
        return max(work, memory) + self.UNHIDDEN * min(work, memory) + self.LAUNCH_CLOCKS


Model = Callable[[KernelConfig, int, int, int], float]


def model_of(arch: Arch, operand: DType, sm_count: int | None = None, tb_per_s: float | None = None) -> Model:
    """What candidates are expected to take, comparable with each other: `Waves` on Hopper, else the table's model.

    Args:
        arch: the architecture of the kernels.
        operand: the type multiplied.
        sm_count: multiprocessors of the device; None for a typical one's.
        tb_per_s: its memory bandwidth, counted on Hopper only; None for an H200's.

    Raises:
        UnsupportedError: the arch does not multiply this type.
    """
    if arch.mainloop(operand).family is Family.HOPPER:
        return Waves(sm_count or Waves.sms, tb_per_s or Waves.tb_per_s).time
    cost = rows_of(arch, operand)[0].cost
    return lambda config, m, n, k: cost.time(config, m, n, k, sm_count)


def near_best(
    model: Model, configs: Sequence[KernelConfig], points: Sequence[Extents], keep: float = KEEP
) -> dict[Extents, dict[KernelConfig, float]]:
    """For each point the candidates whose modelled time is within ``keep`` times the best, as multiples of that.

    A candidate is held against those with as many slices of k or fewer: what slicing gains is the part of the model
    that no measurement stands behind, and must not rule out the kernels that one does.
    """
    found: dict[Extents, dict[KernelConfig, float]] = {}
    counts = sorted({config.slices for config in configs})
    for point in points:
        times = {config: model(config, *point) for config in configs}
        best: dict[int, float] = {}
        for count in counts:
            best[count] = min(time for config, time in times.items() if config.slices <= count)
        ratios = {config: time / best[config.slices] for config, time in times.items()}
        found[point] = {config: ratio for config, ratio in ratios.items() if ratio <= keep}
    return found


def choose(
    near: Mapping[Extents, Mapping[KernelConfig, float]],
    most: int,
    given: Collection[KernelConfig] = (),
    keep: float = KEEP,
) -> list[KernelConfig]:
    """``given``, and up to ``most`` altogether the candidates that add most, one after the other.

    At a point a candidate adds the more the nearer it is to the best, and the less its features (tile, schedule,
    cluster, stages and slices) are among those chosen for the point already: the model is right about what matters, not
    about which of two alike is faster.

    Args:
        near: candidates by point, as `near_best` returns them.
        most: how many to choose, ``given`` included.
        given: what is in the plan anyway: the kernels of today's tables, which a new table must be compared with.
        keep: as for `near_best`.
    """
    weights: dict[KernelConfig, dict[Extents, float]] = {}
    for point, ratios in near.items():
        for config, ratio in ratios.items():
            weights.setdefault(config, {})[point] = (1.0 - 0.9 * (ratio - 1) / (keep - 1)) ** 2
    seen: dict[Extents, Counter[Hashable]] = {point: Counter() for point in near}

    def gain(config: KernelConfig) -> float:
        features = list(_features(config))
        return sum(
            weight * sum(1 / (1 + seen[point][feature]) for feature in features)
            for point, weight in weights[config].items()
        )

    chosen: list[KernelConfig] = []

    def take(config: KernelConfig) -> None:
        chosen.append(config)
        for point in weights.get(config, ()):
            seen[point].update(_features(config))

    for config in dict.fromkeys(given):
        take(config)
    # A gain only ever falls, so one that was computed earlier is a bound: most need not be computed again.
    heap = [(-gain(config), config.name, config) for config in weights if config not in chosen]
    heapq.heapify(heap)
    while heap and len(chosen) < most:
        _, name, config = heapq.heappop(heap)
        now = gain(config)
        if heap and -now > heap[0][0]:
            heapq.heappush(heap, (-now, name, config))
        else:
            take(config)
    return chosen


def _features(config: KernelConfig) -> Iterator[Hashable]:
    depth = config.stages is None, config.slices
    yield config.tile, config.swap_ab
    yield config.tile, config.swap_ab, config.schedule, depth
    yield config.tile[:2], config.swap_ab, config.cluster
    yield config.schedule, config.cluster, depth
    yield depth
