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
    if config.stages is None:
        yield "a multistage kernel needs a number of stages; add s3, s4 or s5 (s2 on sm75)"


def copies(spec: KernelSpec) -> Iterator[str]:
    """More than two stages need asynchronous copies."""
    if spec.arch is SM75 and spec.config.stages not in (2, None):
        yield f"stages {spec.config.stages}: sm75 has no asynchronous copies, its main loop has 2 stages"


def tile(spec: KernelSpec) -> Iterator[str]:
    """Tiles divide evenly among warps, down to the instruction."""
    block, warp = spec.config.tile, spec.config.warp
    if warp is None:
        yield "a multistage kernel needs a warp tile; add one like w64x64x64"
        return
    for axis, extent, part, smallest in zip("mnk", block, warp, (16, 32, 64), strict=True):
        if extent % part:
            yield f"tile {axis} {extent} is not a multiple of the warp tile's {part}"
        # CUTLASS lays threads over the tile by divisions that round down: what is no power of two is left out silently.
        for what, value in (("tile", extent), ("warp tile", part)):
            if value < smallest or value.bit_count() != 1:
                yield f"{what} {axis} {value} is not a power of two from {smallest} on"
    if block[2] not in (64, 128):
        yield f"tile k {block[2]} is not 64 or 128"
    # Accurate accumulation keeps the promoted sums beside the tensor core's.
    accumulators = warp[0] * warp[1] // 32 * (1 if spec.config.fast_accum else 2)
    if accumulators > _MAX_ACCUMULATORS:
        yield (
            f"warp tile {warp[0]}x{warp[1]} needs {accumulators} accumulator registers a thread, at most "
            f"{_MAX_ACCUMULATORS} fit; use a smaller warp tile"
        )


def warps(spec: KernelSpec) -> Iterator[str]:
    """Every warp has something to copy, and a row of the result to store."""
    block, warp = spec.config.tile, spec.config.warp
    if warp is None or any(extent % part for extent, part in zip(block, warp, strict=True)):
        return
    count = prod(extent // part for extent, part in zip(block, warp, strict=True))
    if count > 16:
        yield f"tile {'x'.join(map(str, block))} is cut into {count} warp tiles; at most 16"
    for axis, extent in zip("mn", block, strict=False):
        # Each thread copies at least 16 bytes of each operand's tile.
        if extent * block[2] < 16 * 32 * count:
            yield f"tile {axis} {extent} with k {block[2]} has too little to copy for {count} warps; use fewer"
    if warp[2] < block[2] and warp[1] == 32 and spec.out.bytes == 2:
        yield (
            "warp tile n 32 with a sliced tile k is too narrow for the slices to share the stores of "
            f"{spec.out.value} results; use a warp tile n of 64, or of tile k {block[2]}"
        )


def slices(spec: KernelSpec) -> Iterator[str]:
    """fp8 sums are added in one order, whatever the tile: bits must not depend on the configuration, nor so on M."""
    block, warp = spec.config.tile, spec.config.warp
    if spec.operand is DType.E4M3 and warp is not None and warp[2] != block[2]:
        yield (
            f"warp tile k {warp[2]} slices tile k {block[2]}, and with it the order of fp8 sums; use a warp tile of "
            f"k {block[2]}"
        )


RULES: tuple[Rule, ...] = (options, tile, warps, slices, common.stages, common.no_slices, copies)


def smem_bytes(spec: KernelSpec, stages: int) -> int:
    """The main loop's tiles, or the epilogue's exchange of accumulators that takes their place, whichever is larger.

    For that every warp puts down 8 rows of its part at a time, or 16 where CUTLASS has no store made for the pair of
    accumulator and result, in rows of the tile's n and 8 more (CUTLASS 4.2, default_epilogue_tensor_op.h).
    """
    (m, n, k), warp = spec.config.tile, spec.config.warp
    mainloop = stages * (m + n) * k
    if warp is None:
        return mainloop
    slices = k // warp[2]
    half, fp8 = spec.out.bytes == 2, spec.operand is DType.E4M3
    fragments = 2 if slices == 1 and half != fp8 else 1
    rows = m // warp[0] * 8 * slices * fragments
    return max(mainloop, rows * (n + 8) * 4 + 16)
