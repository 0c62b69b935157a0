"""The values a template fills in: everything is decided here, so that templates only lay text out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from cutlass_w8a8.arch import Family
from cutlass_w8a8.config import Schedule, Scheduler
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt import draw
from cutlass_w8a8.evt.arguments import arguments
from cutlass_w8a8.evt.cppgen import Visitor, emit_visitor
from cutlass_w8a8.evt.tree import Broadcast
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


def context(spec: KernelSpec) -> dict[str, Any]:
    """All names the family's template uses, from ``spec`` alone."""
    tree = spec.epilogue.tree(spec.operand.accumulator, spec.out)
    config = spec.config
    values: dict[str, Any] = {
        "spec": spec,
        "formula": draw.formula(tree),
        "tree": draw.text(tree).splitlines()[2:],
        "rows": _rows(spec),
        "command": spec.command("show"),
        "operand": spec.operand.cpp,
        "accumulator": spec.operand.accumulator.cpp,
        "out": spec.out.cpp,
        "arch_tag": spec.arch.cutlass_tag,
        "loads": tree.loads,
        "scalars": [load.name for load in tree.loads if load.broadcast is Broadcast.SCALAR],
        "tile": config.tile,
        "cluster": config.cluster,
        "stages": config.stages,
        "swap_ab": config.swap_ab,
        "stream_k": config.scheduler is Scheduler.STREAM_K,
        "pdl": config.pdl,
        "visitor": _tidy(emit_visitor(tree, spec.arch.cppgen_cc, config.swap_ab), spec),
        "epilogue_arguments": arguments(tree, indent=3, end="," if spec.arch.family is Family.MULTISTAGE_2X else ";"),
    }
    family = {Family.MULTISTAGE_2X: _values_2x, Family.TMA_WARP_SPECIALIZED_3X: _values_3x}[spec.arch.family]
    return values | family(spec)


def _rows(spec: KernelSpec) -> list[tuple[str, str]]:
    config = spec.config
    return [
        ("arch", f"{spec.arch.name} ({spec.arch.gencode})"),
        ("operands", f"A and B {spec.operand.value}, accumulated in {spec.operand.accumulator.value}"),
        ("output", spec.out.value),
        ("epilogue", spec.epilogue.name),
        ("tile", "x".join(map(str, config.tile)) + (" of the transposed problem" if config.swap_ab else "")),
        ("config", config.name),
    ]


def _tidy(visitor: Visitor, spec: KernelSpec) -> Visitor:
    """cppgen's text, less the aliases the templates define themselves and less its blank first line."""
    text = visitor.declarations
    if spec.arch.family is Family.TMA_WARP_SPECIALIZED_3X:
        text = re.sub(r"using (StrideD|ElementC|StrideC) = [^;]*;\n", "", text)
    return replace(visitor, declarations=text.strip())


def _values_3x(spec: KernelSpec) -> dict[str, Any]:
    config = spec.config
    fast_fp8 = spec.operand is DType.E4M3 and config.fast_accum
    accurate_fp8 = spec.operand is DType.E4M3 and not config.fast_accum
    return {
        "mainloop_headers": _ACCURATE_MAINLOOP if accurate_fp8 else _MAINLOOP,
        "kernel_header": _KERNEL_HEADERS[config.schedule],
        "kernel_schedule": _KERNEL_SCHEDULES[config.schedule] + ("FP8FastAccum" if fast_fp8 else ""),
        "epilogue_schedule": _EPILOGUE_SCHEDULES[config.schedule],
        "tile_scheduler": "StreamKScheduler" if config.scheduler is Scheduler.STREAM_K else "PersistentScheduler",
        "smem": "GemmKernel::SharedStorageSize",
        "threads": "GemmKernel::MaxThreadsPerBlock",
    }


def _values_2x(spec: KernelSpec) -> dict[str, Any]:
    config = spec.config
    # With an int32 accumulator CUTLASS plans 16-bit stores only at full 16-byte accesses; other outputs are
    # planned as float, four at a time.
    half = spec.out in (DType.BF16, DType.FP16)
    return {
        "warp": config.warp,
        "instruction": (16, 8, 32),
        "plan_element": spec.out.cpp if half else "float",
        "plan_alignment": 8 if half else 4,
        "swizzle_functor": (
            "ThreadblockSwizzleStreamK"
            if config.scheduler is Scheduler.STREAM_K
            else "GemmIdentityThreadblockSwizzle<8>"
        ),
        "math_operator": "OpMultiplyAddSaturate",
        "smem": "sizeof(SharedStorage)",
        "threads": "GemmKernel::kThreadCount",
    }
