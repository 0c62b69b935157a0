"""Quantisers: float tensors to int8 or fp8 values with their scales, and zero points where asked.

Conventions, shared with the kernels: ``real = scale * (quantised - azp)``, where ``azp`` is 0 unless returned.
Weights are [N, K] with one scale per output channel (row), activations [M, K] with one per token (row).
"""

from __future__ import annotations

import torch
from torch import Tensor

_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max

# A row of zeros would divide by zero. This scale still sends every value that small to 0, and is large enough
# for its reciprocal to be finite.
_MIN_SCALE = 1e-12


def int8_symmetric(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row to [-127, 127] with no zero point.

    Args:
        x: [R, K], any floating dtype.

    Returns:
        int8 [R, K], and the scales, fp32 [R, 1]. Off by at most half a scale per element.
    """
    x = x.float()
    scale = (x.abs().amax(dim=1, keepdim=True) / 127).clamp(min=_MIN_SCALE)
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def int8_zero_point(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise each row's own range to all 256 values.

    The range is widened to contain 0, so that 0 is represented exactly and the zero point fits int8.

    Args:
        x: [R, K], any floating dtype.

    Returns:
        int8 [R, K], the scales, fp32 [R, 1], and the zero points, int32 [R]. Off by at most half a scale per
        element.
    """
    x = x.float()
    low = x.amin(dim=1, keepdim=True).clamp(max=0)
    high = x.amax(dim=1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=_MIN_SCALE)
    azp = (-128 - low / scale).round()
    # Rounding can only leave the range by one, where the quotient lies halfway; the clamp then rounds it down.
    quantized = ((x / scale).round() + azp).clamp(-128, 127)
    return quantized.to(torch.int8), scale, azp.squeeze(1).to(torch.int32)


def fp8_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each row so that its largest magnitude becomes 448, the largest e4m3 value.

    Args:
        x: [R, K], any floating dtype.

    Returns:
        float8_e4m3fn [R, K], and the scales, fp32 [R, 1]. Off by at most 1/16 of the element, or 2^-10 scales
        where the element is subnormal in e4m3.
    """
    x = x.float()
    scale = (x.abs().amax(dim=1, keepdim=True) / _E4M3_MAX).clamp(min=_MIN_SCALE)
    # The conversion does not saturate: a quotient rounded up past the largest value would become NaN.
    return (x / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), scale


def column_sums(weight: Tensor) -> Tensor:
    """The ``azp_adj`` of a quantised weight under per-token zero points: sums over K, int32 [N].

    Args:
        weight: int8 [N, K].
    """
    return weight.sum(dim=1, dtype=torch.int32)
