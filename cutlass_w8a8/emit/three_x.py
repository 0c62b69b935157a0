"""What the template of CUTLASS's 3.x kernels needs to know, whichever the family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass_w8a8.config import Scheduler
from cutlass_w8a8.spec import KernelSpec

_BASE = (
    "cutlass.h",
    "device_kernel.h",
    "functional.h",
    "kernel_hardware_info.hpp",
    "numeric_conversion.h",
    "numeric_types.h",
)


def values(
    spec: KernelSpec,
    headers: Sequence[Sequence[str]],
    kernel_schedule: str,
    epilogue_schedule: str,
    *,
    block_m: int,
    epilogue_tile: str = "cutlass::epilogue::collective::EpilogueTileAuto",
) -> dict[str, Any]:
    """The names that the template uses for ``spec``.

    Args:
        spec: the kernel.
        headers: the family's own, in groups.
        kernel_schedule: type in ``cutlass::gemm`` that selects the main loop.
        epilogue_schedule: type in ``cutlass::epilogue`` that selects the epilogue.
        block_m: rows of the tile that belong to one block.
        epilogue_tile: type of the part of a tile that is stored at once.
    """
    stream_k = spec.config.scheduler is Scheduler.STREAM_K
    return {
        "headers": (_BASE, *headers),
        "kernel_schedule": kernel_schedule,
        "epilogue_schedule": epilogue_schedule,
        "block_m": block_m,
        "epilogue_tile": epilogue_tile,
        "tile_scheduler": "StreamKScheduler" if stream_k else "PersistentScheduler",
        "smem": "GemmKernel::SharedStorageSize",
        "threads": "GemmKernel::MaxThreadsPerBlock",
    }
