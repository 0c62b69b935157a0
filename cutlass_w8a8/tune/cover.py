"""Which kernels to keep: few, and near the best everywhere."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from math import log
from typing import TypeVar

from cutlass_w8a8.config import KernelConfig

P = TypeVar("P", bound=Hashable)
PointTimes = Mapping[P, Mapping[KernelConfig, float]]


def kernel_times(times: PointTimes[P]) -> dict[P, dict[KernelConfig, float]]:
    """Times by kernel: of the launch-time choices that were measured for it, the fastest counts."""
    found: dict[P, dict[KernelConfig, float]] = {}
    for point, configs in times.items():
        best = found.setdefault(point, {})
        for config, us in configs.items():
            kernel = config.compiled
            best[kernel] = min(us, best.get(kernel, us))
    return found


def cover(times: PointTimes[P], within: float, kept: Collection[KernelConfig] = ()) -> list[KernelConfig]:
    """A small set of kernels of which at each point one takes at most ``1 + within`` of the fastest one's time.

    Greedily the kernel that serves most of what is left, of those that serve as many the one that loses least; then
    each that the others make superfluous is given up, those that serve fewest points first.

    Args:
        times: microseconds by point and configuration.
        within: the share of time that may be lost at a point.
        kept: kernels that are in the set anyway.

    Returns:
        Configurations without launch-time choices, ``kept`` first, in an order that depends on the times alone.
    """
    kernels = kernel_times(times)
    serves: dict[KernelConfig, set[P]] = {kernel: set() for kernel in kept}
    lost: dict[KernelConfig, float] = {}
    for point, configs in kernels.items():
        best = min(configs.values(), default=0.0)
        for kernel, us in configs.items():
            if us <= best * (1 + within):
                serves.setdefault(kernel, set()).add(point)
                lost[kernel] = lost.get(kernel, 0.0) + log(us / best)
    chosen = list(dict.fromkeys(kept))
    left = {point for point, configs in kernels.items() if configs}.difference(*(serves[kernel] for kernel in chosen))
    while left:

        def rank(kernel: KernelConfig, left: set[P] = left) -> tuple[int, float, str]:
            served = serves[kernel]
            return -len(served & left), lost.get(kernel, 0.0) / max(1, len(served)), kernel.name

        chosen.append(min(serves, key=rank))
        left -= serves[chosen[-1]]
    return _pruned(chosen, serves, kept)


def _pruned(
    chosen: Sequence[KernelConfig], serves: Mapping[KernelConfig, set[P]], kept: Collection[KernelConfig]
) -> list[KernelConfig]:
    needed = list(chosen)
    for kernel in sorted(chosen, key=lambda kernel: (len(serves[kernel]), kernel.name)):
        others = set().union(*(serves[other] for other in needed if other != kernel))
        if kernel not in kept and serves[kernel] <= others:
            needed.remove(kernel)
    return needed
