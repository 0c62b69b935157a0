"""Which candidates to compile: those a model of the device does not rule out, and of these a diverse few."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

from cutlass_w8a8.arch import Arch, Family
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch import rows_of
from cutlass_w8a8.dispatch.waves import Waves
from cutlass_w8a8.dtypes import DType

Extents = tuple[int, int, int]

# Modelled times this many times the best are ruled out: on an H200 the fastest of each measured point is within 1.42.
KEEP = 1.45


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
    """``given``, then the candidates, up to ``most`` altogether: of each those that add most, one after the other.

    At a point a candidate adds the more the nearer it is to the best, and the less its features (tile, schedule,
    cluster, stages and slices) are among those chosen for the point already: the model is right about what matters, not
    about which of two alike is faster.

    Args:
        near: candidates by point, as `near_best` returns them.
        most: how many to choose, ``given`` included.
        given: what comes first: the kernels of today's tables, which a new table must be compared with.
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
            for point, weight in weights.get(config, {}).items()
        )

    chosen: list[KernelConfig] = []

    for pool in (dict.fromkeys(given), weights):
        # A gain only ever falls, so one that was computed earlier is a bound: most need not be computed again.
        heap = [(-gain(config), config.name, config) for config in pool if config not in chosen]
        heapq.heapify(heap)
        while heap and len(chosen) < most:
            _, name, config = heapq.heappop(heap)
            now = gain(config)
            if heap and -now > heap[0][0]:
                heapq.heappush(heap, (-now, name, config))
                continue
            chosen.append(config)
            for point in weights.get(config, ()):
                seen[point].update(_features(config))
    return chosen


def _features(config: KernelConfig) -> Iterator[Hashable]:
    depth = config.stages is None, config.slices
    yield config.tile, config.swap_ab
    yield config.tile, config.swap_ab, config.schedule, depth
    yield config.tile[:2], config.swap_ab, config.cluster
    yield config.schedule, config.cluster, depth
    yield depth
