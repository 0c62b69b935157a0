"""How calls follow each other: the package's launch modes, and the kernels that quantise in a chain.

All that the benchmark asks of the package's calls in this respect is here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cutlass_w8a8
from cutlass_w8a8.errors import UnsupportedError

Quantiser = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Quantise tokens, bf16 [M, K], into q, fp8 or int8 [M, K], and their scales, float32 [M, 1]; on the current stream."""

OVERLAP = {"alone": "none", "gemm": "weights", "chain": "weights"}
"""``overlap`` of our GEMM, by order."""

_package: Any = cutlass_w8a8


def our_gemm(order: str) -> Callable[..., torch.Tensor]:
    """``scaled_mm``, launched as ``order`` wants it.

    Raises:
        UnsupportedError: this version launches in one way only, which is not that.
    """
    call: Callable[..., torch.Tensor] = _package.scaled_mm
    if "overlap" in inspect.signature(call).parameters:
        return lambda *operands, **options: call(*operands, overlap=OVERLAP[order], **options)
    if OVERLAP[order] == "none":
        return call
    raise UnsupportedError("scaled_mm of this version has no dependent launch; measure --orders alone")


def our_quantiser(overlap: str) -> Quantiser:
    """Our quantisation kernel, launched as ``overlap`` says (``launch`` or ``none``).

    Raises:
        UnsupportedError: this version has none.
    """
    call = getattr(_package, "quantize_per_token", None)
    if call is None:
        raise UnsupportedError("this version has no quantize_per_token; measure --orders alone")
    return lambda tokens, q, scale: call(tokens, q.dtype, out=q, scale=scale, overlap=overlap)


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


def quantisers(library: Path | None) -> tuple[dict[str, Quantiser | str], str]:
    """What quantises in front of our GEMM and in front of peers' GEMMs.

    Args:
        library: vLLM's library with its quantisation, if any. Peers share one kernel: vLLM's if it can be had, else
            ours without dependent launch, which their GEMMs could not use.

    Returns:
        Under ``ours`` and ``peers`` a quantiser or the reason why there is none; and what quantises for peers.
    """
    found: dict[str, Quantiser | str] = {}
    label = "ours without dependent launch"
    reason = "no --vllm-ops FILE"
    try:
        found["ours"] = our_quantiser("launch")
        found["peers"] = our_quantiser("none")
    except UnsupportedError as error:
        found = {"ours": f"{type(error).__name__}: {error}", "peers": str(error)}
        label = "nothing"
    if library is not None:
        try:
            found["peers"] = vllm_quantiser(library)
            return found, "vLLM's"
        except (OSError, RuntimeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
    return found, f"{label} (not vLLM's: {reason})"
