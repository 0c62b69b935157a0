"""What the quantisation kernels compute, in torch, to the bit, on any device."""

from __future__ import annotations

import torch

from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.evaluate import TORCH_DTYPES
from cutlass_w8a8.spec import QUANT_FLOOR, QUANT_LARGEST, QUANT_RANGE, Scheme

Tensor = torch.Tensor

_E4M3_NAN = 0x7F
_INT8 = (-128, 127)
# What the conversion saturates to before a zero point is added.
_INT16 = (-32768, 32767)


def quantized(
    x: Tensor, target: DType, scheme: Scheme, given: tuple[Tensor, Tensor | None] | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a kernel of ``scheme`` makes of x.

    Args:
        x: [M, K] of a floating type no wider than float32.
        target: e4m3 or int8.
        scheme: what shares a scale, and where that comes from.
        given: for static schemes the scale, float32, and the zero point, int32, or None; one value each.

    Returns:
        q [M, K]; the scales, float32 [M, 1] by rows, else [1]; and the zero points, int32 of the same shape, or None.
    """
    wide = x.float()
    scale, azp = _found(wide, target, scheme) if given is None else given
    columns = scale.reshape(-1, 1), None if azp is None else azp.reshape(-1, 1)
    return coded(wide, target, *columns), scale, azp


def coded(wide: Tensor, target: DType, scale: Tensor, azp: Tensor | None) -> Tensor:
    """float32 quantised by scales, and zero points or none, which are spread over it as torch broadcasts."""
    # By tensors throughout: on CUDA, torch multiplies by the rounded reciprocal of a divisor that is a number.
    scaled = wide * (torch.ones_like(scale) / scale)
    return _e4m3(scaled) if target is DType.E4M3 else _int8(scaled, azp)


def largest_of(rows: Tensor) -> Tensor:
    """The largest magnitude of each row [R, K], [R, 1]; 0 where there are none."""
    return rows.abs().amax(1, keepdim=True) if rows.shape[1] else rows.new_zeros(rows.shape[0], 1)


def scale_of(largest: Tensor, target: DType, floor: float | None = None) -> Tensor:
    """The scales for these largest magnitudes, float32 of any shape, without zero points.

    Args:
        largest: the magnitudes.
        target: e4m3 or int8.
        floor: the least scale; None is that of the kernels.
    """
    scale = largest / torch.full_like(largest, QUANT_LARGEST[target])
    return _at_least(scale, QUANT_FLOOR[target] if floor is None else floor)


def range_of(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and the zero points, int32, for ranges from ``low`` <= 0 to ``high`` >= 0, float32 of any shape."""
    # Of half the range, because the whole one can exceed a float32.
    half = high * 0.5 - low * 0.5
    scale = _at_least(half / torch.full_like(half, QUANT_RANGE / 2), QUANT_FLOOR[DType.INT8])
    azp = -128 - low / scale
    return scale, torch.where(azp.isnan(), 0.0, azp).round().to(torch.int32)


def _found(wide: Tensor, target: DType, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    rows = wide.reshape(1, -1) if scheme.whole else wide
    scale, azp = _extremes(rows) if scheme.azp else (scale_of(largest_of(rows), target), None)
    if not scheme.whole:
        return scale, azp
    return scale.view(1), None if azp is None else azp.view(1)


def _extremes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the zero point of each row [R, K], both [R, 1]."""
    zero = rows.new_zeros(rows.shape[0], 1)
    high = rows.amax(1, keepdim=True).clamp(min=0) if rows.shape[1] else zero
    low = rows.amin(1, keepdim=True).clamp(max=0) if rows.shape[1] else zero
    return range_of(low, high)


def _at_least(scale: Tensor, floor: float) -> Tensor:
    scale = torch.maximum(scale, torch.full_like(scale, floor))
    # One NaN of the many, as in the kernels.
    return torch.where(scale.isnan(), torch.nan, scale)


def _int8(scaled: Tensor, azp: Tensor | None) -> Tensor:
    code = torch.where(scaled.isnan(), 0.0, scaled).round()
    if azp is not None:
        code = code.clamp(*_INT16).double() + azp.double()
    return code.clamp(*_INT8).to(torch.int8)


def _e4m3(scaled: Tensor) -> Tensor:
    # The conversion does not saturate: a quotient rounded up past the largest value would become NaN.
    largest = QUANT_LARGEST[DType.E4M3]
    bits = scaled.clamp(-largest, largest).to(TORCH_DTYPES[DType.E4M3]).view(torch.uint8)
    return torch.where(scaled.isnan(), _E4M3_NAN, bits).to(torch.uint8).view(TORCH_DTYPES[DType.E4M3])
