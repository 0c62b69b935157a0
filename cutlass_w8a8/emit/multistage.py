"""What the template of CUTLASS's 2.x kernels needs to know."""

from __future__ import annotations

from typing import Any

from cutlass_w8a8.config import Scheduler
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.spec import KernelSpec


def values(spec: KernelSpec) -> dict[str, Any]:
    """The names that the template uses for ``spec``."""
    config = spec.config
    # With an int32 accumulator CUTLASS plans 16-bit stores only at full 16-byte accesses; other outputs are
    # planned as float, four at a time.
    half = spec.out in (DType.BF16, DType.FP16)
    fp8_operator = "OpMultiplyAddFastAccum" if config.fast_accum else "OpMultiplyAdd"
    return {
        "warp": config.warp,
        "instruction": spec.mainloop.instruction,
        "plan_element": spec.out.cpp if half else "float",
        "plan_alignment": 8 if half else 4,
        "swizzle_functor": (
            "ThreadblockSwizzleStreamK"
            if config.scheduler is Scheduler.STREAM_K
            else "GemmIdentityThreadblockSwizzle<8>"
        ),
        "math_operator": fp8_operator if spec.operand is DType.E4M3 else "OpMultiplyAddSaturate",
        "smem": "sizeof(SharedStorage)",
        "threads": "GemmKernel::kThreadCount",
    }
