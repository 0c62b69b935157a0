"""vLLM's gates, for code written against them: what its kernels support, by capability and CUDA toolkit.

They are rules of thumb by capability alone. Whether *this* package serves something, `is_supported` says, by the
architecture that would serve it.
"""

from __future__ import annotations

from cutlass_w8a8.errors import ArgumentError

Toolkit = tuple[int, int]

# (lowest capability, oldest toolkit), highest first; the first that applies decides.
_FP8 = ((90, (12, 0)), (89, (12, 4)))
_BLOCK_FP8 = ((100, (12, 8)), (90, (12, 0)))


def cutlass_scaled_mm_supports_fp8(capability: int, toolkit: Toolkit | None = None) -> bool:
    """Whether vLLM's ``cutlass_scaled_mm`` takes fp8: from 9.0 with CUDA 12.0, on 8.9 with CUDA 12.4.

    Args:
        capability: compute capability as one number, 90 for 9.0.
        toolkit: version (major, minor) of the CUDA toolkit that compiles; None if it is recent enough.

    Raises:
        ArgumentError: one of them is of another form.
    """
    return _passes(_FP8, capability, toolkit)


def cutlass_scaled_mm_supports_block_fp8(capability: int, toolkit: Toolkit | None = None) -> bool:
    """Whether vLLM's ``cutlass_scaled_mm`` takes block-scaled fp8: from 10.0 with CUDA 12.8, from 9.0 with CUDA 12.0.

    This package has no block-scaled kernels; the gate is here for code that asks it before it chooses a path.

    Args:
        capability: compute capability as one number, 90 for 9.0.
        toolkit: version (major, minor) of the CUDA toolkit that compiles; None if it is recent enough.

    Raises:
        ArgumentError: one of them is of another form.
    """
    return _passes(_BLOCK_FP8, capability, toolkit)


def _passes(gates: tuple[tuple[int, Toolkit], ...], capability: int, toolkit: Toolkit | None) -> bool:
    if not isinstance(capability, int) or capability < 30:
        raise ArgumentError(f"capability is {capability!r}; pass it as one number, such as 90 for 9.0")
    if toolkit is not None and not (isinstance(toolkit, tuple) and len(toolkit) == 2):
        raise ArgumentError(f"toolkit is {toolkit!r}; pass (major, minor), such as (13, 0), or None")
    for lowest, oldest in gates:
        if capability >= lowest:
            return toolkit is None or toolkit >= oldest
    return False
