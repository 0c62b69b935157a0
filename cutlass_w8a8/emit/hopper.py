"""Hopper's kernels: TMA, wgmma, and a warp group or two that multiply."""

from __future__ import annotations

from typing import Any

from cutlass_w8a8.config import Schedule, Scheduler
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.emit import three_x
from cutlass_w8a8.spec import KernelSpec

_KERNEL_HEADERS = {
    # This kernel's own header leans on the umbrella header that includes it.
    Schedule.WARP_SPECIALIZED: "gemm_universal.hpp",
    Schedule.PINGPONG: "sm90_gemm_tma_warpspecialized_pingpong.hpp",
    Schedule.COOPERATIVE: "sm90_gemm_tma_warpspecialized_cooperative.hpp",
}
_KERNEL_SCHEDULES = {
    Schedule.WARP_SPECIALIZED: "KernelTmaWarpSpecialized",
    Schedule.PINGPONG: "KernelTmaWarpSpecializedPingpong",
    Schedule.COOPERATIVE: "KernelTmaWarpSpecializedCooperative",
}
_EPILOGUE_SCHEDULES = {
    Schedule.WARP_SPECIALIZED: "TmaWarpSpecialized",
    Schedule.PINGPONG: "TmaWarpSpecialized",
    Schedule.COOPERATIVE: "TmaWarpSpecializedCooperative",
}

_MAINLOOP = ("gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp",)
# This main loop's header does not include the pipelines it uses.
_ACCURATE_MAINLOOP = ("pipeline/pipeline.hpp", "gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized_fp8.hpp")


def values(spec: KernelSpec) -> dict[str, Any]:
    """The names that the template uses for ``spec``."""
    schedule, fp8 = spec.config.schedule, spec.operand is DType.E4M3
    fast = fp8 and spec.config.fast_accum
    headers = (
        (
            "gemm/dispatch_policy.hpp",
            "gemm/gemm.h",
            "gemm/collective/collective_mma_decl.hpp",
            *(_ACCURATE_MAINLOOP if fp8 and not fast else _MAINLOOP),
            "gemm/collective/collective_builder_decl.hpp",
            "gemm/collective/builders/sm90_gmma_builder.inl",
        ),
        ("epilogue/collective/collective_builder.hpp", "epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"),
        (
            "gemm/kernel/gemm_universal_decl.h",
            "gemm/kernel/tile_scheduler.hpp",
            f"gemm/kernel/{_KERNEL_HEADERS[schedule]}",
        ),
    )
    # The workspace of stream-K is cleared by a launch of its own, which such a kernel must not overtake.
    own: dict[str, Any] = {"overlaps": spec.config.scheduler is not Scheduler.STREAM_K}
    if spec.config.slices > 1:
        own["smem"] = "GemmKernel::SharedStorageSize + Exchange::kBytes"
    return (
        three_x.values(
            spec,
            headers,
            kernel_schedule=_KERNEL_SCHEDULES[schedule] + ("FP8FastAccum" if fast else ""),
            epilogue_schedule=_EPILOGUE_SCHEDULES[schedule],
            block_m=spec.config.tile[0],
        )
        | own
    )
