"""W8A8 GEMM kernels for LLM inference: emitted, compiled on first use, cached and dispatched.

``scaled_mm`` and ``scaled_mm_azp`` compute D = scale_a * scale_b * (A_q @ B_q - azp * colsum(B_q)) + bias in one
CUTLASS kernel, written for the GPU, the types and the shape at hand.
"""

from cutlass_w8a8 import torch_ops as _torch_ops  # noqa: F401  (registers the operators)
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.counters import Stats
from cutlass_w8a8.counters import snapshot as stats
from cutlass_w8a8.errors import (
    ArgumentError,
    CacheError,
    CheckpointError,
    CompileError,
    ConfigError,
    LaunchError,
    TableError,
    ToolchainError,
    UnsupportedError,
    W8A8Error,
)
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.gates import cutlass_scaled_mm_supports_block_fp8, cutlass_scaled_mm_supports_fp8
from cutlass_w8a8.ops import scaled_mm, scaled_mm_azp
from cutlass_w8a8.prepared import PreparedMM, prepare
from cutlass_w8a8.quant_ops import quantize, quantize_per_token
from cutlass_w8a8.settings import batch_invariant, use_arch
from cutlass_w8a8.spec import KernelSpec, QuantSpec
from cutlass_w8a8.support import Explanation, Support, explain, is_supported
from cutlass_w8a8.version import VERSION as __version__
from cutlass_w8a8.vllm.custom_ops import cutlass_scaled_mm, cutlass_scaled_mm_azp
from cutlass_w8a8.warm import WarmupReport, warmup

__all__ = [
    "ArgumentError",
    "CacheError",
    "CheckpointError",
    "CompileError",
    "ConfigError",
    "EpilogueSpec",
    "Explanation",
    "KernelConfig",
    "KernelSpec",
    "LaunchError",
    "PreparedMM",
    "QuantSpec",
    "Stats",
    "Support",
    "TableError",
    "ToolchainError",
    "UnsupportedError",
    "W8A8Error",
    "WarmupReport",
    "__version__",
    "batch_invariant",
    "cutlass_scaled_mm",
    "cutlass_scaled_mm_azp",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp8",
    "explain",
    "is_supported",
    "prepare",
    "quantize",
    "quantize_per_token",
    "scaled_mm",
    "scaled_mm_azp",
    "stats",
    "use_arch",
    "warmup",
]
