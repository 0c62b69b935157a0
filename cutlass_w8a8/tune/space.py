"""The configurations that are worth thinking of, before any model or compiler has looked at them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from cutlass_w8a8.arch import Arch, Family
from cutlass_w8a8.config import CONFIG_FIELDS, KernelConfig, Raster, Schedule
from cutlass_w8a8.dispatch import configs_of, problems, smem_bytes
from cutlass_w8a8.dispatch.table import blocks
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.spec import KernelSpec

TILES_M = (64, 128, 256)
TILES_N = (16, 32, 48, 64, 80, 96, 112, 128, 160, 176, 192, 224, 256)
CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (1, 8), (8, 1))
SLICES = (1, 2, 4, 8)
# Fewer leave the main loop waiting for memory.
LEAST_STAGES = 3
# A K tile of 256 halves the barriers of tiles that are soon multiplied; larger ones have no stages left.
WIDE_K_TILE = 64 * 128


def kernels(arch: Arch, operand: DType, out: DType, epilogue: EpilogueSpec) -> list[KernelSpec]:
    """Every candidate kernel, each possible: on Hopper a product of choices, elsewhere what dispatch may choose.

    Raises:
        UnsupportedError: the arch does not multiply this type.
    """
    if arch.mainloop(operand).family is Family.HOPPER:
        configs = list(_hopper())
    else:
        configs = list(configs_of(arch, operand))
    found: list[KernelSpec] = []
    for config in configs:
        spec = KernelSpec(arch, operand, out, epilogue, config)
        if problems(spec):
            continue
        most = _most_stages(spec)
        if config.stages is None and most < LEAST_STAGES:
            continue
        found.append(spec)
        # With half of the shared memory two blocks fit a multiprocessor: one multiplies while the other stores.
        # Pingpong does that within a block.
        if (
            arch.mainloop(operand).family is Family.HOPPER
            and config.schedule is Schedule.WARP_SPECIALIZED
            and most // 2 >= LEAST_STAGES
        ):
            found.append(KernelSpec(arch, operand, out, epilogue, replace(config, stages=most // 2)))
    return list(dict.fromkeys(found))


def _hopper() -> Iterator[KernelConfig]:
    # Persistent schedules get several tiles, and cannot divide one.
    schedules = (Schedule.WARP_SPECIALIZED, Schedule.PINGPONG, Schedule.COOPERATIVE)
    for schedule, m, n, k, cluster, swap in product(schedules, TILES_M, TILES_N, (128, 256), CLUSTERS, (False, True)):
        if k == 256 and m * n > WIDE_K_TILE:
            continue
        base = KernelConfig((m, n, k), schedule, cluster, swap_ab=swap)
        yield base
        if schedule is Schedule.WARP_SPECIALIZED and cluster == (1, 1) and "slices" in CONFIG_FIELDS:
            for slices in SLICES[1:]:
                choice: dict[str, Any] = {"slices": slices}
                yield replace(base, **choice)


def _most_stages(spec: KernelSpec) -> int:
    """The stages that fit shared memory, as the collective counts them for itself."""
    one, two = smem_bytes(spec, 1), smem_bytes(spec, 2)
    return (spec.arch.smem_bytes - (2 * one - two)) // (two - one)


def launch_choices(config: KernelConfig, m: int, n: int, sm_count: int) -> list[KernelConfig]:
    """The tile orders that may matter to ``config`` at an m x n problem, the default first.

    One wave has no order, and a strip must be narrower than the problem. Strips are tried in the order CUTLASS prefers:
    of 144 kernels near a point's best, measured on an H200 with 12 choices, 8 gained more than a percent from the rest.
    """
    if config.schedule is Schedule.MULTISTAGE or blocks(config, m, n) <= sm_count:
        return [config]
    orders = [replace(config, raster=raster) for raster in (Raster.HEURISTIC, Raster.ALONG_M, Raster.ALONG_N)]
    for swizzle in (2, 8):
        wider = replace(config, swizzle=swizzle)
        # Where filling up strips adds blocks, it costs more than an order gains.
        if blocks(wider, m, n) <= 1.1 * blocks(config, m, n):
            orders.append(wider)
    return orders
