"""A problem: what a call asks for, apart from the pointers."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_w8a8.arch import Arch
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.epilogues import EpilogueSpec


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
    """

    arch: Arch
    m: int
    n: int
    k: int
    operand: DType
    out: DType
    epilogue: EpilogueSpec
    sm_count: int | None = None
