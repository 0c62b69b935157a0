"""Rules and measures that families share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cutlass_w8a8.evt.tree import Broadcast
from cutlass_w8a8.spec import KernelSpec

Rule = Callable[[KernelSpec], Iterator[str]]


def stages(spec: KernelSpec) -> Iterator[str]:
    """A pipeline has at least two stages."""
    given = spec.config.stages
    if given is not None and not 2 <= given <= 32:
        yield f"stages {given} is outside 2 to 32"


def options_3x(spec: KernelSpec) -> Iterator[str]:
    """What the warp-specialised families do not have."""
    if spec.config.warp is not None:
        yield "a warp tile is a choice of multistage kernels only"


def no_slices(spec: KernelSpec) -> Iterator[str]:
    """What only Hopper's kernels have."""
    if spec.config.slices != 1:
        yield f"slices {spec.config.slices}: only sm90's warp-specialised kernels divide K in a cluster; leave it out"


def row_bytes(spec: KernelSpec, n: int) -> int:
    """Shared memory of the epilogue's row vectors for a tile ``n`` wide, in bytes."""
    tree = spec.epilogue.tree(spec.operand.accumulator, spec.out)
    row = Broadcast.COLUMN if spec.config.swap_ab else Broadcast.ROW
    return sum(round_up(n * load.element.bytes, 16) for load in tree.loads if load.broadcast is row)


def store_alignment(spec: KernelSpec, extent: int) -> int:
    """Alignment of the store buffers of the newer families, whose contiguous extent is ``extent`` elements.

    From the swizzle CUTLASS chooses for it: 8 rows of 128, 64, 32 or 16 bytes.
    """
    contiguous = extent * spec.out.bytes
    return next(8 * width for width in (128, 64, 32, 16) if contiguous % width == 0)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple
