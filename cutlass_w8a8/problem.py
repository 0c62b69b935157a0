"""A problem: what a call asks for, apart from the pointers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cutlass_w8a8.arch import Arch
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.epilogues import EpilogueSpec


class Overlap(str, Enum):
    """How a kernel may overlap with the one before it on its stream.

    Attributes:
        NONE: it starts when that kernel has ended.
        LAUNCH: it starts when that kernel lets its dependents start, and waits for its end before it touches memory
            (programmatic dependent launch).
        WEIGHTS: it also loads weights before it waits, so they must not be written by work that may still run.
    """

    NONE = "none"
    LAUNCH = "launch"
    WEIGHTS = "weights"


OVERLAPS = tuple(overlap.value for overlap in Overlap)
# Of calls that name none: asks nothing of the caller. And its name, as callers know it.
CALL_OVERLAP = Overlap.LAUNCH
DEFAULT_OVERLAP = CALL_OVERLAP.value
# For weights that stay: a layer's, a prepared call's.
CONSTANT_OVERLAP = Overlap.WEIGHTS.value


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
        overlap: how the kernel may overlap with the one before it.
        batch_invariant: whether the bits of a row must not depend on ``m``.
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
    overlap: Overlap = CALL_OVERLAP
    batch_invariant: bool = False

    @property
    def needs_whole_k(self) -> bool:
        """Whether kernels that divide K are out: they change the bits of fp8 sums, and int8's are exact."""
        return self.batch_invariant and self.operand is not DType.INT8
