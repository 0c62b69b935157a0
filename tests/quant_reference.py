"""Quantisation in closed form, in float64 and a table of all e4m3 values. Imports nothing of the package."""

from __future__ import annotations

import torch

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
_LARGEST = {E4M3: 448.0, INT8: 127.0}
_FLOOR = {E4M3: 1 / (448 * 512), INT8: 2.0**-126}


def e4m3_values() -> torch.Tensor:
    """The finite magnitudes of e4m3 in ascending order, that of code i at i; float64 [127]."""
    code = torch.arange(127, dtype=torch.float64)
    exponent, mantissa = (code / 8).floor(), code % 8
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return torch.where(exponent == 0, mantissa * 2.0**-9, normal)


def e4m3_code(value: torch.Tensor) -> torch.Tensor:
    """The e4m3 code nearest to each float64, ties to the even code, beyond the largest the largest; uint8."""
    table = e4m3_values().to(value.device)
    middle = (table[1:] + table[:-1]) / 2
    magnitude = value.abs()
    below = torch.bucketize(magnitude, middle)
    tie = magnitude == torch.cat([middle, middle.new_full((1,), torch.inf)])[below]
    code = torch.where(tie & (below % 2 == 1), below + 1, below)
    code = torch.where(torch.signbit(value), code + 128, code)
    return torch.where(value.isnan(), 0x7F, code).to(torch.uint8)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    scheme: str = "token",
    scale: torch.Tensor | None = None,
    azp: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Bits of q (uint8 [M, K]) and of the scales (int32), and the zero points, that x [M, K] must give.

    Args:
        scheme: ``token`` or ``tensor``, with ``-azp`` if there are zero points; ``static`` if ``scale`` and ``azp``,
            one value each, are given.

    float64 holds the product of two float32 exactly, and its quotient, sum and difference of two float32 round to
    float32 as the exact ones do, so that every step below is rounded once.
    """
    x = x.double()
    if scale is None:
        rows = x.reshape(1, -1) if scheme.startswith("tensor") else x
        scale, azp = _extremes(rows) if scheme.endswith("-azp") else (_largest(rows, dtype), None)
        if scheme.startswith("tensor"):
            scale, azp = scale.view(1), None if azp is None else azp.view(1)
    factor = scale.double().reshape(-1, 1)
    # By tensors throughout: on CUDA, torch multiplies by the reciprocal of a divisor that is a number.
    inverse = (torch.ones_like(factor) / factor).float()
    scaled = (x * inverse.double()).float().double()
    if dtype is E4M3:
        code = e4m3_code(scaled)
    else:
        shift = 0 if azp is None else azp.double().reshape(-1, 1)
        # An infinity plus a zero point is an infinity, and no more than the largest code.
        code = torch.where(scaled.isnan(), 0, scaled).round() + shift
        code = code.clamp(-128, 127).to(torch.int8).view(torch.uint8)
    return code, scale.view(torch.int32), azp


def _largest(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    count, k = rows.shape
    largest = rows.abs().amax(1, keepdim=True) if k else rows.new_zeros(count, 1)
    return _scale(largest, _LARGEST[dtype], dtype)


def _extremes(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    zero = rows.new_zeros(rows.shape[0], 1)
    high, low = torch.cat([rows, zero], 1).amax(1, keepdim=True), torch.cat([rows, zero], 1).amin(1, keepdim=True)
    half = ((high / 2).float().double() - (low / 2).float().double()).float().double()
    scale = _scale(half, 127.5, INT8)
    azp = (-128 - (low / scale.double()).float().double()).float()
    return scale, torch.where(azp.isnan(), 0, azp).round().to(torch.int32)


def _scale(largest: torch.Tensor, steps: float, dtype: torch.dtype) -> torch.Tensor:
    scale = (largest / torch.full_like(largest, steps)).float()
    floor = torch.full_like(scale, _FLOOR[dtype])
    scale = torch.where(scale < floor, floor, scale)
    return torch.where(largest.isnan(), torch.full_like(scale, torch.nan), scale)
