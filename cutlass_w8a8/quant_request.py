"""Requests to quantise: tensors checked and turned into extents. All that such a call can get wrong is refused here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from cutlass_w8a8.dtypes import OPERAND_DTYPES, OUTPUT_DTYPES, DType
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.evt.evaluate import TORCH_DTYPES
from cutlass_w8a8.request import ALIGNMENT, FROM_TORCH

OVERLAPS = ("launch", "none")
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class QuantRequest:
    """A checked call.

    Attributes:
        m, k: extents in elements.
        source, target: element types of x and of the result.
        ldx, ldq: leading strides of x and of the result, in elements.
        aligned: whether the rows of x lie multiples of 16 bytes apart, and those of the result as much as such a
            vector becomes; true of one row.
    """

    m: int
    k: int
    source: DType
    target: DType
    ldx: int
    ldq: int
    aligned: bool


def check_quantize(
    x: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None, scale: torch.Tensor | None, overlap: str
) -> QuantRequest:
    """The request these arguments make.

    Raises:
        ArgumentError: an argument has a wrong type, shape, stride or device; the message names it, what was given,
            what is accepted and a remedy.
    """
    check_quantize_kinds(x, dtype, out, scale, overlap)
    source, target = check_quantize_types(x, dtype)
    if x.is_neg():
        raise ArgumentError("x is a lazily negated view; pass x.resolve_neg()")
    k = x.shape[-1]
    m = math.prod(x.shape[:-1])
    if max(m, k) > _INT32_MAX:
        raise ArgumentError(f"M={m}, K={k}: extents are limited to {_INT32_MAX}; split the call")
    for name, tensor in (("out", out), ("scale", scale)):
        if tensor is not None and tensor.device != x.device:
            raise ArgumentError(
                f"{name} is on {tensor.device} but x is on {x.device}; move it with {name}.to({str(x.device)!r})"
            )
    ldx = _rows("x", x, "x.contiguous()")
    ldq = k if out is None else _output(out, x, dtype)
    if scale is not None:
        _scale(scale, m)
    per_vector = ALIGNMENT // source.bytes
    return QuantRequest(m, k, source, target, ldx, ldq, m == 1 or not (ldx % per_vector or ldq % per_vector))


def check_quantize_kinds(x: object, dtype: object, out: object, scale: object, overlap: object) -> None:
    """Refuse arguments that are no dense tensors, no dtype, or no way to overlap.

    Raises:
        ArgumentError: names the first such argument.
    """
    for name, value in (("x", x), ("out", out), ("scale", scale)):
        if value is None and name != "x":
            continue
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(value).__name__}; pass a torch.Tensor")
        if value.layout is not torch.strided:
            raise ArgumentError(f"{name} has layout {value.layout}; it must be dense; pass {name}.to_dense()")
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype is {dtype!r}; pass torch.float8_e4m3fn or torch.int8")
    if overlap not in OVERLAPS:
        raise ArgumentError(f"overlap is {overlap!r}; accepted: {' or '.join(map(repr, OVERLAPS))}")


def check_quantize_types(x: torch.Tensor, dtype: torch.dtype) -> tuple[DType, DType]:
    """The element types of x and of the result, of what may be a tensor without memory.

    Raises:
        ArgumentError: as `check_quantize`.
    """
    source, target = FROM_TORCH.get(x.dtype), FROM_TORCH.get(dtype)
    if source is None or source not in OUTPUT_DTYPES:
        accepted = ", ".join(str(TORCH_DTYPES[each]) for each in OUTPUT_DTYPES)
        raise ArgumentError(f"x has dtype {x.dtype}; accepted: {accepted}; convert it with x.float()")
    if target is None or target not in OPERAND_DTYPES:
        accepted = " or ".join(str(TORCH_DTYPES[each]) for each in OPERAND_DTYPES)
        raise ArgumentError(f"dtype is {dtype}; accepted: {accepted}")
    if not x.dim():
        raise ArgumentError("x has shape (); it must be [..., K]; add a dimension with x[None]")
    return source, target


def _rows(name: str, tensor: torch.Tensor, remedy: str) -> int:
    """The leading stride in elements of [..., K] seen as [M, K], whose rows must be contiguous."""
    k = tensor.shape[-1]
    if not tensor.numel():
        return k
    try:
        flat = tensor.view(-1, k)
    except RuntimeError:
        raise ArgumentError(
            f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be viewed as [M, K]; "
            f"pass {remedy}, or a tensor whose rows alone are padded"
        ) from None
    if k > 1 and flat.stride(1) != 1:
        raise ArgumentError(
            f"{name} has strides {tensor.stride()}; it must be contiguous along its last dimension; pass {remedy}"
        )
    return flat.stride(0) if flat.shape[0] > 1 else k


def _output(out: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> int:
    if out.dtype is not dtype:
        raise ArgumentError(f"out has dtype {out.dtype} but dtype is {dtype}; make them alike")
    if out.shape != x.shape:
        raise ArgumentError(f"out has shape {tuple(out.shape)}; it must be x's, {tuple(x.shape)}")
    ldq = _rows("out", out, "a contiguous tensor")
    if ldq < x.shape[-1]:
        raise ArgumentError(
            f"out has leading stride {ldq}, less than its K={x.shape[-1]}: its rows overlap; pass a contiguous tensor"
        )
    return ldq


def _scale(scale: torch.Tensor, m: int) -> None:
    if scale.dtype is not torch.float32:
        raise ArgumentError(f"scale has dtype {scale.dtype}; it must be torch.float32, which the kernel writes")
    if tuple(scale.shape) != (m, 1):
        raise ArgumentError(
            f"scale has shape {tuple(scale.shape)}; it must be ({m}, 1): one value for each row of x, whose leading "
            "dimensions are flattened"
        )
    if not scale.is_contiguous():
        raise ArgumentError(f"scale has strides {scale.stride()}; it must be contiguous; pass a fresh tensor")
