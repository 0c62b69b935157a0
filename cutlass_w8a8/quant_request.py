"""Requests to quantise: tensors checked and turned into extents. All that such a call can get wrong is refused here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from cutlass_w8a8.dtypes import OPERAND_DTYPES, OUTPUT_DTYPES, DType
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.evt.evaluate import TORCH_DTYPES
from cutlass_w8a8.request import ALIGNMENT, FROM_TORCH
from cutlass_w8a8.spec import Scheme

OVERLAPS = ("launch", "none")
GRANULARITIES = ("token", "tensor")
# What calls call the scale and the zero point.
Names = tuple[str, str]
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class QuantRequest:
    """A checked call.

    Attributes:
        m, k: extents in elements.
        source, target: element types of x and of the result.
        scheme: what shares a scale, and where that comes from.
        ldx, ldq: leading strides of x and of the result, in elements.
        aligned: whether the rows of x lie multiples of 16 bytes apart, and those of the result as much as such a
            vector becomes; true of one row.
    """

    m: int
    k: int
    source: DType
    target: DType
    scheme: Scheme
    ldx: int
    ldq: int
    aligned: bool

    @property
    def packed(self) -> bool:
        """Whether neither x nor the result has gaps between rows."""
        return self.m == 1 or self.ldx == self.k == self.ldq

    @property
    def scales(self) -> tuple[int, ...]:
        """The shape of the scales, and of the zero points, that are found."""
        return (1,) if self.scheme.whole else (self.m, 1)


def check_scheme(
    granularity: object,
    symmetric: object,
    dtype: object,
    scale: object,
    azp: object,
    scale_out: object,
    azp_out: object,
) -> Scheme:
    """The scheme that these arguments of a call name.

    Raises:
        ArgumentError: they contradict each other; the message says which to leave out or to change.
    """
    if granularity is not None:
        scheme_of(granularity)
    if symmetric is not None and not isinstance(symmetric, bool):
        raise ArgumentError(f"symmetric is {symmetric!r}; accepted: True, False or None")
    if scale is None:
        if azp is not None:
            raise ArgumentError("azp is given but scale is not; pass both, or symmetric=False to have both found")
        zero = symmetric is False
        if azp_out is not None and not zero:
            raise ArgumentError("azp_out is given but there is no zero point; pass symmetric=False, or leave it out")
        return scheme_of(granularity or "token", azp=zero, dtype=dtype)
    for name, value in (("scale_out", scale_out), ("azp_out", azp_out)):
        if value is not None:
            raise ArgumentError(f"{name} is for a scale that is found, but scale is given; leave one of them out")
    if granularity == "token":
        raise ArgumentError(
            "granularity is 'token' but scale is given, which is for the whole tensor; pass granularity='tensor', or "
            "leave scale out"
        )
    if symmetric is not None and symmetric is not (azp is None):
        change = "pass azp too" if azp is None else "leave azp out"
        raise ArgumentError(f"symmetric is {symmetric} and azp is {'not ' * (azp is None)}given; {change}")
    return scheme_of("static", azp=azp is not None, dtype=dtype)


def scheme_of(granularity: object, *, azp: bool = False, dtype: object = torch.int8) -> Scheme:
    """The scheme of a granularity, or ``static``, with a zero point or without.

    Raises:
        ArgumentError: there is none.
    """
    if granularity not in (*GRANULARITIES, "static"):
        raise ArgumentError(f"granularity is {granularity!r}; accepted: {' or '.join(map(repr, GRANULARITIES))}")
    if azp and dtype is not torch.int8:
        raise ArgumentError(f"dtype is {dtype}, which has no zero point; leave that out, or pass torch.int8")
    return Scheme(f"{granularity}-azp" if azp else granularity)


def check_quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    scheme: Scheme,
    out: torch.Tensor | None,
    scale: torch.Tensor | None,
    azp: torch.Tensor | None,
    overlap: str,
    names: Names,
) -> QuantRequest:
    """The request these arguments make. ``scale`` and ``azp`` are read by static schemes, and written by others.

    Raises:
        ArgumentError: an argument has a wrong type, shape, stride or device; the message names it, what was given,
            what is accepted and a remedy.
    """
    check_quantize_kinds(x, dtype, out, scale, azp, overlap, names)
    source, target = check_quantize_types(x, dtype)
    for name, tensor in (("x", x), (names[0], scale)):
        if tensor is not None and tensor.is_neg():
            raise ArgumentError(f"{name} is a lazily negated view; pass {name}.resolve_neg()")
    k = x.shape[-1]
    m = math.prod(x.shape[:-1])
    if max(m, k) > _INT32_MAX:
        raise ArgumentError(f"M={m}, K={k}: extents are limited to {_INT32_MAX}; split the call")
    for name, tensor in (("out", out), (names[0], scale), (names[1], azp)):
        if tensor is not None and tensor.device != x.device:
            raise ArgumentError(
                f"{name} is on {tensor.device} but x is on {x.device}; move it with {name}.to({str(x.device)!r})"
            )
    ldx = _rows("x", x, "x.contiguous()")
    ldq = k if out is None else _output(out, x, dtype)
    per_vector = ALIGNMENT // source.bytes
    aligned = m == 1 or not (ldx % per_vector or ldq % per_vector)
    request = QuantRequest(m, k, source, target, scheme, ldx, ldq, aligned)
    for name, tensor, wanted in ((names[0], scale, torch.float32), (names[1], azp, torch.int32)):
        if tensor is not None:
            check_one(name, tensor, wanted) if scheme.static else _found(name, tensor, wanted, request)
    return request


def check_quantize_kinds(
    x: object, dtype: object, out: object, scale: object, azp: object, overlap: object, names: Names
) -> None:
    """Refuse arguments that are no dense tensors, no dtype, or no way to overlap.

    Raises:
        ArgumentError: names the first such argument.
    """
    for name, value in (("x", x), ("out", out), (names[0], scale), (names[1], azp)):
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


def check_one(name: str, tensor: torch.Tensor, wanted: torch.dtype) -> None:
    """Refuse what is not one value of this type, for all of a tensor.

    Raises:
        ArgumentError: names it, and says what is accepted.
    """
    if tensor.dtype is not wanted:
        raise ArgumentError(
            f"{name} has dtype {tensor.dtype}; it must be {wanted}; convert it with {name}.to({wanted})"
        )
    if tensor.numel() != 1:
        raise ArgumentError(
            f"{name} has shape {tuple(tensor.shape)}; it must be one value for the whole of x, such as (1,)"
        )


def _found(name: str, tensor: torch.Tensor, wanted: torch.dtype, request: QuantRequest) -> None:
    if tensor.dtype is not wanted:
        raise ArgumentError(f"{name} has dtype {tensor.dtype}; it must be {wanted}, which the kernel writes")
    if tuple(tensor.shape) != request.scales:
        what = (
            "one value for the whole of x"
            if request.scheme.whole
            else "one value for each row of x, whose leading dimensions are flattened"
        )
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; it must be {request.scales}: {what}")
    if not tensor.is_contiguous():
        raise ArgumentError(f"{name} has strides {tensor.stride()}; it must be contiguous; pass a fresh tensor")
