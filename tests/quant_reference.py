"""Quantisation by rows in closed form, in float64 and a table of all e4m3 values. Imports nothing of the package."""

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


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of q (uint8 [M, K]) and of the scales (int32 [M, 1]) that x [M, K] must give.

    float64 holds the product of two float32 exactly, and its quotient of two float32 rounds to float32 as the exact
    one does, so that every step below is rounded once.
    """
    x = x.double()
    rows, k = x.shape
    largest = x.abs().amax(1, keepdim=True) if k else x.new_zeros(rows, 1)
    # By tensors throughout: on CUDA, torch multiplies by the reciprocal of a divisor that is a number.
    scale = (largest / torch.full_like(largest, _LARGEST[dtype])).float()
    floor = torch.full_like(scale, _FLOOR[dtype])
    scale = torch.where(scale < floor, floor, scale)
    scale = torch.where(largest.isnan(), torch.full_like(scale, torch.nan), scale)
    inverse = (torch.ones_like(largest) / scale.double()).float()
    scaled = (x * inverse.double()).float().double()
    if dtype is E4M3:
        code = e4m3_code(scaled)
    else:
        code = torch.where(scaled.isnan(), 0, scaled).round().to(torch.int8).view(torch.uint8)
    return code, scale.view(torch.int32)
