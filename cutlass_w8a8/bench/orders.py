"""How calls follow each other: the package's launch modes, and the kernels that quantise in a chain.

All that the benchmark asks of the package's calls in this respect is here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cutlass_w8a8

Quantiser = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Quantise tokens, bf16 [M, K], into q, fp8 or int8 [M, K], and their scales, float32 [M, 1]; on the current stream."""

OVERLAP = {"alone": "none", "gemm": "weights", "chain": "weights"}
"""``overlap`` of our GEMM, by order."""


def our_gemm(order: str) -> Callable[..., torch.Tensor]:
    """``scaled_mm``, launched as ``order`` wants it."""
    return lambda *operands, **options: cutlass_w8a8.scaled_mm(*operands, overlap=OVERLAP[order], **options)


def our_config(
    order: str, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> str | None:
    """The configuration that dispatch chooses for `our_gemm` of these operands; None on the CPU, which needs none."""
    if not a.is_cuda:
        return None
    return cutlass_w8a8.explain(a, b, scale_a, scale_b, overlap=OVERLAP[order]).config.name


def our_quantiser(overlap: str) -> Quantiser:
    """Our quantisation kernel, launched as ``overlap`` says (``launch`` or ``none``)."""
    return lambda tokens, q, scale: cutlass_w8a8.quantize_per_token(
        tokens, q.dtype, out=q, scale=scale, overlap=overlap
    )


def vllm_quantiser(library: Path) -> Quantiser:
    """vLLM's dynamic quantisation per token, out of its compiled extension.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: it lacks the operators.
    """
    torch.ops.load_library(str(library))
    fp8: Any = torch.ops._C.dynamic_per_token_scaled_fp8_quant.default
    int8: Any = torch.ops._C.dynamic_scaled_int8_quant.default

    def quantise(tokens: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
        (int8 if q.dtype is torch.int8 else fp8)(q, tokens, scale, None)

    return quantise


def quantisers(library: Path | None) -> tuple[dict[str, Quantiser], str]:
    """What quantises in front of our GEMM and in front of peers' GEMMs.

    Args:
        library: vLLM's library with its quantisation, if any. Peers share one kernel: vLLM's if it can be had, else
            ours without dependent launch, which their GEMMs could not use.

    Returns:
        Under ``ours`` and ``peers`` a quantiser; and what quantises for peers.
    """
    found = {"ours": our_quantiser("launch"), "peers": our_quantiser("none")}
    reason = "no --vllm-ops FILE"
    if library is not None:
        try:
            found["peers"] = vllm_quantiser(library)
            return found, "vLLM's"
        except (OSError, RuntimeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
    return found, f"ours without dependent launch (not vLLM's: {reason})"
