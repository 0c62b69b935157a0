"""CUTLASS's 2.x main loops: block tiles cut into warp tiles, operands copied by the threads that multiply."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from cutlass_w8a8.arch import SM75
from cutlass_w8a8.dispatch.rules import common
from cutlass_w8a8.dispatch.rules.common import Rule
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.spec import KernelSpec

_MAX_ACCUMULATORS = 128


def options(spec: KernelSpec) -> Iterator[str]:
    """What the family does not have."""
    config = spec.config
    if config.swap_ab:
        yield "swap is impossible: 2.x visitors store along n only"
    if config.cluster != (1, 1):
        yield f"cluster {config.cluster[0]}x{config.cluster[1]}: multistage kernels have no clusters; use 1x1"
    if config.pdl:
        yield "multistage kernels have no programmatic dependent launch; leave out pdl"
    if config.stages is None:
        yield "a multistage kernel needs a number of stages; add s3, s4 or s5 (s2 on sm75)"


def copies(spec: KernelSpec) -> Iterator[str]:
    """More than two stages need asynchronous copies."""
    if spec.arch is SM75 and spec.config.stages not in (2, None):
        yield f"stages {spec.config.stages}: sm75 has no asynchronous copies, its main loop has 2 stages"


def tile(spec: KernelSpec) -> Iterator[str]:
    """Tiles divide evenly, down to the instruction."""
    block_tile, warp = spec.config.tile, spec.config.warp
    if warp is None:
        yield "a multistage kernel needs a warp tile; add one like w64x64x64"
        return
    for axis, block, part, unit in zip("mnk", block_tile, warp, (16, 32, 64), strict=True):
        if block % part:
            yield f"tile {axis} {block} is not a multiple of the warp tile's {part}"
        if part % unit:
            yield f"warp tile {axis} {part} is not a multiple of {unit}"
    warps = prod(block // part for block, part in zip(block_tile, warp, strict=True))
    if block_tile[2] not in (64, 128):
        yield f"tile k {block_tile[2]} is not 64 or 128"
    for axis, extent in zip("mn", block_tile, strict=False):
        # Every thread copies at least 16 bytes of each operand's tile.
        if extent * block_tile[2] < 16 * 32 * warps:
            yield f"tile {axis} {extent} with k {block_tile[2]} has too little to copy for {warps} warps; use fewer"
    if warps > 16:
        yield f"tile {block_tile} in warp tiles {warp} makes {warps} warps; at most 16"
    # Accurate accumulation keeps the promoted sums beside the tensor core's.
    accumulators = warp[0] * warp[1] // 32 * (1 if spec.config.fast_accum else 2)
    if accumulators > _MAX_ACCUMULATORS:
        yield (
            f"warp tile {warp[0]}x{warp[1]} needs {accumulators} accumulator registers a thread, at most "
            f"{_MAX_ACCUMULATORS} fit; use a smaller warp tile"
        )


def slices(spec: KernelSpec) -> Iterator[str]:
    """fp8 sums are added in one order, whatever the tile: bits must not depend on the configuration, nor so on M."""
    block, warp = spec.config.tile, spec.config.warp
    if spec.operand is DType.E4M3 and warp is not None and warp[2] != block[2]:
        yield (
            f"warp tile k {warp[2]} slices tile k {block[2]}, and with it the order of fp8 sums; use a warp tile of "
            f"k {block[2]}"
        )


RULES: tuple[Rule, ...] = (options, tile, slices, common.stages, copies)


def smem_bytes(spec: KernelSpec, stages: int) -> int:
    """The main loop's tiles; the epilogue takes their place afterwards."""
    m, n, k = spec.config.tile
    return stages * (m + n) * k
