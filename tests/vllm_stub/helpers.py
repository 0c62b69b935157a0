"""Helpers that vLLM's test files import: conversions, references, checks of operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

from tests.vllm_stub.platform import current_platform

FP8_DTYPE = torch.float8_e4m3fn
_ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


class GroupShape(NamedTuple):
    """Rows and columns that share a scale, -1 for all."""

    row: int
    col: int


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def set_random_seed(seed: int) -> None:
    current_platform.seed_everything(seed)


def to_fp8(tensor: torch.Tensor) -> torch.Tensor:
    """Whole numbers of e4m3's range."""
    largest = torch.finfo(FP8_DTYPE).max
    return tensor.clamp(-largest, largest).round().to(FP8_DTYPE)


def to_int8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.round().clamp(-128, 127).to(torch.int8)


def spread(scale: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A scale for each group repeated over its group."""
    for axis, extent in enumerate(shape):
        if scale.shape[axis] not in (1, extent):
            scale = scale.repeat_interleave(extent // scale.shape[axis], axis)
    return scale


def baseline_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of the dequantised operands in float32; the bias is added in the result's type."""
    product = torch.mm(spread(scale_a, a.shape) * a.float(), spread(scale_b, b.shape) * b.float()).to(out_dtype)
    return product if bias is None else product + bias


def opcheck(op: Any, args: Any, kwargs: Any = None, *, test_utils: Any = _ALL, cond: bool = True, **_: object) -> None:
    """torch's checks of an operator; it compares operands, and torch cannot compare fp8 tensors."""
    if cond:
        with mock.patch("torch.allclose", _allclose):
            torch.library.opcheck(op, args, kwargs, test_utils=test_utils)


def _allclose(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return bool(torch.isclose(a.double(), b.double(), *args, **kwargs).all())


def ref_dynamic_per_token_quant(
    x: torch.Tensor, quant_dtype: torch.dtype, scale_ub: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row by its largest magnitude, float32 throughout."""
    limits = torch.iinfo(quant_dtype) if quant_dtype == torch.int8 else torch.finfo(quant_dtype)
    largest = x.abs().amax(-1, keepdim=True).float()
    if scale_ub is not None:
        largest = torch.minimum(largest, scale_ub)
    scales = largest / torch.full_like(largest, limits.max)
    if quant_dtype == FP8_DTYPE:
        scales = scales.clamp(min=1 / (limits.max * 512))
    scaled = x.float() * scales.reciprocal()
    if quant_dtype == torch.int8:
        scaled = scaled.round()
    return scaled.clamp(limits.min, limits.max).to(quant_dtype), scales


def ref_dynamic_per_tensor_fp8_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    limits = torch.finfo(FP8_DTYPE)
    largest = x.abs().amax().float().reshape(1)
    scale = largest / torch.full_like(largest, limits.max)
    return (x.float() * scale.reciprocal()).clamp(limits.min, limits.max).to(FP8_DTYPE), scale


def scaled_quantize(
    x: torch.Tensor, group_shape: GroupShape, quant_dtype: torch.dtype, compute_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] with a scale for each group, and the scales [groups along M, groups along K]."""
    limits = torch.finfo(quant_dtype)
    rows, columns = (all_of if part < 0 else part for part, all_of in zip(group_shape, x.shape, strict=True))
    groups = x.to(compute_dtype or x.dtype).view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    factor = limits.max / groups.abs().amax((1, 3), keepdim=True)
    values = (groups * factor).clamp(limits.min, limits.max).view(x.shape).to(quant_dtype)
    return values, factor[:, 0, :, 0].float().reciprocal()
