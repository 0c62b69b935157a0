"""Kernels of Blackwell without tensor memory: TMA brings the operands, mma.sync multiplies them."""

from __future__ import annotations

from typing import Any

from cutlass_w8a8.config import Schedule
from cutlass_w8a8.emit import three_x
from cutlass_w8a8.spec import KernelSpec

_HEADERS = (
    (
        "gemm/collective/collective_builder.hpp",
        "epilogue/collective/collective_builder.hpp",
        "gemm/kernel/gemm_universal.hpp",
    ),
)
# CUTLASS's own choice of an epilogue tile has as many rows.
_AUTOMATIC_EPILOGUE_M = 64


def values(spec: KernelSpec) -> dict[str, Any]:
    """The names that the template uses for ``spec``."""
    m, cooperative = spec.config.tile[0], spec.config.schedule is Schedule.COOPERATIVE
    return three_x.values(
        spec,
        _HEADERS,
        kernel_schedule="KernelTmaWarpSpecialized" + ("Cooperative" if cooperative else "Pingpong"),
        epilogue_schedule="TmaWarpSpecialized" + ("Cooperative" if cooperative else ""),
        block_m=m,
        **({"epilogue_tile": f"cute::Shape<cute::_{m}, cute::_32>"} if m < _AUTOMATIC_EPILOGUE_M else {}),
    )
