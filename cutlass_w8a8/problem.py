"""A problem: what a call asks for, apart from the pointers."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_w8a8.arch import Arch
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.epilogues import EpilogueSpec

# How a kernel may overlap with the one before it: not at all; by dependent launch; or so that it loads its weights
# before it waits for the other's results.
OVERLAPS = ("none", "launch", "weights")


@dataclass(frozen=True)
class Problem:
    """D[m, n] = epilogue(A[m, k] @ B[k, n]) on one architecture.

    Attributes:
        arch: the architecture.
        m, n, k: extents, in elements.
        operand: element type of A and of B.
        out: element type of D.
        epilogue: the formula.
        sm_count: multiprocessors of the device; None if it is not known.
        device: the device's name, as the driver gives it, such as ``NVIDIA H200``; None if it is not known.
        overlap: how the kernel overlaps with the one before it, of `OVERLAPS`.
        invariant: fp8 bits must not depend on M: leave out configurations that divide K among blocks.
    """

    arch: Arch
    m: int
    n: int
    k: int
    operand: DType
    out: DType
    epilogue: EpilogueSpec
    sm_count: int | None = None
    device: str | None = None
    overlap: str = "none"
    invariant: bool = False
