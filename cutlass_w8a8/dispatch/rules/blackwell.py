"""Blackwell's main loops: tcgen05 of one multiprocessor or two, accumulators in tensor memory.

With ``2sm`` a tile belongs to two neighbouring blocks of the cluster's m: each holds half of its rows, and loads half
of its columns' operand.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from cutlass_w8a8.config import Scheduler
from cutlass_w8a8.dispatch.rules import common
from cutlass_w8a8.dispatch.rules.common import Rule, round_up
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.spec import KernelSpec

# Bytes of one stage's barriers, and of all other synchronisation: the tile scheduler's, tensor memory's, the order of
# loads (CUTLASS 4.2, sm100_gemm_tma_warpspecialized.hpp, SharedStorage).
_STAGE_BARRIERS = 16
_SYNCHRONISATION = 132
_MAX_ACCUMULATORS_IN_FLIGHT = 4


def options(spec: KernelSpec) -> Iterator[str]:
    """What is not offered on this family."""
    config = spec.config
    if config.scheduler is Scheduler.STREAM_K:
        yield "the stream-K scheduler is not offered on this family: it spills registers"
    if not config.fast_accum:
        yield "accurate: tensor memory accumulates in one way; leave it out"


def tile(spec: KernelSpec) -> Iterator[str]:
    """Extents of tcgen05, and of the epilogue's parts."""
    (m, n, k), sms = spec.config.tile, spec.config.blocks_per_tile
    if m not in (64 * sms, 128 * sms):
        yield f"tile m {m} is not {64 * sms} or {128 * sms}, as {spec.config.schedule.value} needs"
        return
    unit = 32 if spec.operand is DType.INT8 and sms == 2 else 16
    if n % unit or not unit <= n <= 256:
        yield f"tile n {n} is not a multiple of {unit} from {unit} to 256"
    # The epilogue stores parts of 4096 elements or fewer, which must divide the tile.
    part = min(n, 4096 // spec.config.block_m)
    if n % part:
        yield f"tile n {n} is not made of parts {part} wide; use a multiple of {part}, or less than it"
    if k not in (64, 128, 256):
        yield f"tile k {k} is not 64, 128 or 256"


def cluster(spec: KernelSpec) -> Iterator[str]:
    """Clusters are portable, hold whole tiles, and can share what they multicast."""
    config, sms = spec.config, spec.config.blocks_per_tile
    along_m, along_n = config.cluster
    if any(extent not in (1, 2, 4, 8) for extent in config.cluster) or prod(config.cluster) > 8:
        yield f"cluster {along_m}x{along_n} is not a product of 1, 2, 4, 8 of at most 8 blocks"
        return
    if along_m % sms:
        yield f"cluster {along_m}x{along_n}: 2sm tiles take two blocks along m; use an even m, such as 2x1"
        return
    for name, rows, blocks in (
        ("m", spec.config.block_m, along_n),
        ("n", config.tile[1] // sms, along_m // sms),
    ):
        if rows % (8 * blocks):
            yield f"tile {name}: {rows} rows cannot be shared by {blocks} blocks in slices of 8 rows"


RULES: tuple[Rule, ...] = (
    common.options_3x,
    options,
    tile,
    cluster,
    common.stages,
    common.no_slices,
)


def smem_bytes(spec: KernelSpec, stages: int) -> int:
    """The main loop's tiles, the epilogue's store buffers and row vectors, barriers."""
    _, n, k = spec.config.tile
    block_m, sms = spec.config.block_m, spec.config.blocks_per_tile
    part_m = block_m
    part_n = min(n, 4096 // part_m)
    parts = n // part_n
    # A block of 64 rows of a 2sm tile keeps two column halves beside each other.
    contiguous = part_m if spec.config.swap_ab else (min(part_n, 32) if sms == 2 and block_m == 64 else part_n)
    alignment = common.store_alignment(spec, contiguous)
    if spec.config.swap_ab and spec.out is DType.FP32:
        # These are swizzled by twice as many bytes, half as many rows at a time.
        alignment = min(alignment, 512)
    store = part_m * part_n * spec.out.bytes * min(parts, 2) + max(common.row_bytes(spec, n), 1)
    accumulators = min(_MAX_ACCUMULATORS_IN_FLIGHT, 512 * 128 // (block_m * n))
    barriers = _STAGE_BARRIERS * (stages + min(parts, 4) + accumulators) + _SYNCHRONISATION
    outer = max(128, alignment)
    tensors = round_up(round_up(store, alignment), 128) + round_up(stages * (block_m + n // sms) * k, 128)
    return round_up(round_up(barriers, outer) + tensors, outer)
