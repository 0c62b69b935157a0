"""Blackwell's kernels: TMA, tcgen05, one multiprocessor or two to a tile."""

from __future__ import annotations

from typing import Any

from cutlass_w8a8.emit import three_x
from cutlass_w8a8.spec import KernelSpec

_HEADERS = (
    (
        "gemm/collective/collective_builder.hpp",
        "epilogue/collective/collective_builder.hpp",
        "gemm/kernel/gemm_universal.hpp",
    ),
)


def values(spec: KernelSpec) -> dict[str, Any]:
    """The names that the template uses for ``spec``."""
    sms = spec.config.blocks_per_tile
    return three_x.values(
        spec,
        _HEADERS,
        kernel_schedule=f"KernelTmaWarpSpecialized{sms}SmSm100",
        epilogue_schedule=f"TmaWarpSpecialized{sms}Sm",
        block_m=spec.config.block_m,
    )
