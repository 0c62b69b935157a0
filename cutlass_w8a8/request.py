"""Requests: tensors checked and turned into a problem. Everything a call can get wrong is refused here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cutlass_w8a8.dtypes import OPERAND_DTYPES, OUTPUT_DTYPES, DType
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.evt.epilogues import Azp, EpilogueSpec, ScaleA, ScaleB
from cutlass_w8a8.evt.evaluate import TORCH_DTYPES

FROM_TORCH = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}

# Every row of A and B, and every pointer, sits on a 16-byte boundary: what TMA and 16-byte cp.async need.
ALIGNMENT = 16
N_MULTIPLE = 8
K_MULTIPLE = 16
_INT32_MAX = 2**31 - 1
# Largest K whose int8 sums cannot leave int32: |a * b| <= 2**14, and |a - azp| * |b| <= 255 * 128 with a zero
# point within int8's range.
MAX_K_INT8 = _INT32_MAX // 2**14
MAX_K_INT8_AZP = _INT32_MAX // (255 * 128)


@dataclass(frozen=True)
class Request:
    """A checked call.

    Attributes:
        m, n, k: extents in elements.
        operand, out: element types.
        epilogue: formula and granularities.
        lda, ldb, ldd: leading strides in elements.
        shape: shape of the result (leading dimensions of ``a``, then N).
    """

    m: int
    n: int
    k: int
    operand: DType
    out: DType
    epilogue: EpilogueSpec
    lda: int
    ldb: int
    ldd: int
    shape: tuple[int, ...]


def check(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    azp_adj: torch.Tensor | None,
    azp: torch.Tensor | None,
    out: torch.Tensor | None,
) -> Request:
    """The request these operands make.

    Raises:
        ArgumentError: an operand has a wrong type, shape, stride, alignment or device; the message names it, what
            was given, what is accepted and a remedy.
    """
    check_kinds(a, b, scale_a, scale_b, out_dtype, bias, azp_adj, azp, out)
    for name, tensor in (("scale_a", scale_a), ("scale_b", scale_b), ("bias", bias), ("out", out)):
        if tensor is not None and tensor.is_neg():
            raise ArgumentError(f"{name} is a lazily negated view; pass {name}.resolve_neg()")
    operand, out_type = _types(a, b, out_dtype)
    _devices(a, ("b", b), ("scale_a", scale_a), ("scale_b", scale_b), ("bias", bias), ("azp_adj", azp_adj),
             ("azp", azp), ("out", out))  # fmt: skip
    m, n, k = _shapes(a, b)
    azp_kind = _zero_point(azp_adj, azp, operand, m, n)
    _extents(m, n, k, operand, azp_kind)
    lda, ldb = _strides(a, b) if m and n and k else (k, k)
    epilogue = EpilogueSpec.of(
        scale_a=_scale_a(scale_a, m), scale_b=_scale_b(scale_b, n), azp=azp_kind, bias=bias is not None
    )
    if bias is not None:
        _vector("bias", bias, out_dtype, n, "N", "convert it with bias.to(out_dtype)")
    shape = (*a.shape[:-1], n)
    ldd = n if out is None else _output(out, out_dtype, shape, m, n)
    return Request(m, n, k, operand, out_type, epilogue, lda, ldb, ldd, shape)


def check_kinds(
    a: object,
    b: object,
    scale_a: object,
    scale_b: object,
    out_dtype: object,
    bias: object,
    azp_adj: object,
    azp: object,
    out: object,
) -> None:
    """Refuse operands that are no dense tensors at all, and an ``out_dtype`` that is no dtype.

    Raises:
        ArgumentError: names the first such argument.
    """
    required = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
    optional = {"bias": bias, "azp_adj": azp_adj, "azp": azp, "out": out}
    for name, value in (required | {k: v for k, v in optional.items() if v is not None}).items():
        if not isinstance(value, torch.Tensor):
            remedy = f"torch.tensor({value!r})" if isinstance(value, int | float) else "a torch.Tensor"
            raise ArgumentError(f"{name} is a {type(value).__name__}; pass {remedy}")
        if value.layout is not torch.strided:
            raise ArgumentError(f"{name} has layout {value.layout}; it must be dense; pass {name}.to_dense()")
    if not isinstance(out_dtype, torch.dtype):
        raise ArgumentError(f"out_dtype is {out_dtype!r}; pass a torch.dtype such as torch.bfloat16")


def check_matrices(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> None:
    """What can be said of a and b without their memory: types, and extents as far as they are known numbers.

    Raises:
        ArgumentError: as `check`.
    """
    operand, _ = _types(a, b, out_dtype)
    m, n, k = _shapes(a, b)
    if all(isinstance(extent, int) for extent in (n, k)):
        _extents(m if isinstance(m, int) else 1, n, k, operand, Azp.NONE)


def refuse_gradients(*tensors: torch.Tensor | None) -> None:
    """Refuse operands that ask for a gradient, which nothing here computes.

    Raises:
        ArgumentError: one of them requires a gradient.
    """
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            raise ArgumentError(
                "an operand requires a gradient, and kernels compute none; call under torch.no_grad(), or detach it"
            )


def overlapping() -> ArgumentError:
    """The error for an output whose memory reaches into that of an input."""
    return ArgumentError(
        "out shares memory with an input, which would be overwritten while it is read; pass another tensor as out"
    )


def misaligned(pointers: Iterable[tuple[str, int]]) -> ArgumentError:
    """The error for the first of these named addresses that is not a multiple of 16 bytes."""
    for name, pointer in pointers:
        if pointer % ALIGNMENT:
            return ArgumentError(
                f"{name} starts at an address that is {pointer % ALIGNMENT} bytes past a {ALIGNMENT}-byte boundary; "
                f"kernels need {ALIGNMENT}-byte aligned operands; pass {name}.clone() or slice at a multiple of "
                f"{ALIGNMENT} bytes"
            )
    raise ValueError("all pointers are aligned")


def _types(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> tuple[DType, DType]:
    accepted = " or ".join(str(TORCH_DTYPES[dtype]) for dtype in OPERAND_DTYPES)
    operand, out_type = FROM_TORCH.get(a.dtype), FROM_TORCH.get(out_dtype)
    if operand is None or operand not in OPERAND_DTYPES:
        raise ArgumentError(f"a has dtype {a.dtype}; accepted: {accepted}; quantise it first")
    if b.dtype is not a.dtype:
        raise ArgumentError(f"b has dtype {b.dtype} but a has {a.dtype}; both must be {accepted}, and alike")
    if out_type is None or out_type not in OUTPUT_DTYPES:
        outputs = ", ".join(str(TORCH_DTYPES[dtype]) for dtype in OUTPUT_DTYPES)
        raise ArgumentError(f"out_dtype is {out_dtype}; accepted: {outputs}")
    return operand, out_type


def _devices(a: torch.Tensor, *others: tuple[str, torch.Tensor | None]) -> None:
    for name, tensor in others:
        if tensor is not None and tensor.device != a.device:
            raise ArgumentError(
                f"{name} is on {tensor.device} but a is on {a.device}; move it with {name}.to({str(a.device)!r})"
            )


def _shapes(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int]:
    if a.dim() < 2:
        raise ArgumentError(f"a has shape {tuple(a.shape)}; it must be [..., M, K]; add a dimension with a[None]")
    if b.dim() != 2:
        raise ArgumentError(f"b has shape {tuple(b.shape)}; it must be [K, N], for example weight.t()")
    if a.shape[-1] != b.shape[0]:
        raise ArgumentError(
            f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}: a's last extent K={a.shape[-1]} differs from b's "
            f"first K={b.shape[0]}; pass b as [K, N]"
        )
    k, n = b.shape
    return math.prod(a.shape[:-1]), n, k


def _strides(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int]:
    try:
        a = a.view(-1, a.shape[-1])
    except RuntimeError:
        raise ArgumentError(
            f"a of shape {tuple(a.shape)} and strides {a.stride()} cannot be viewed as [M, K]; pass a.contiguous()"
        ) from None
    lda = _leading("a", a.stride(), a.shape, "row-major [M, K]", "a.contiguous()")
    ldb = _leading("b", b.stride()[::-1], b.shape[::-1], "column-major [K, N]", "b.t().contiguous().t()")
    return lda, ldb


def _leading(name: str, stride: Sequence[int], shape: Sequence[int], layout: str, remedy: str) -> int:
    """The leading stride of a one-byte matrix given as (rows, K), whose rows must be contiguous."""
    rows, k = shape
    if k > 1 and stride[1] != 1:
        raise ArgumentError(f"{name} is not contiguous along K; it must be {layout}; pass {remedy}")
    if rows == 1:
        return k
    if stride[0] < k:
        raise ArgumentError(
            f"{name} has leading stride {stride[0]}, less than its K={k}: its rows overlap (an expanded or as_strided "
            f"view); pass {remedy}"
        )
    if stride[0] % ALIGNMENT:
        raise ArgumentError(
            f"{name} has leading stride {stride[0]} bytes; it must be a multiple of {ALIGNMENT} bytes; pass {remedy} "
            "or pad its rows"
        )
    return stride[0]


def _extents(m: int, n: int, k: int, operand: DType, azp: Azp) -> None:
    if k % K_MULTIPLE:
        raise ArgumentError(
            f"K is {k}; it must be a multiple of {K_MULTIPLE}; pad a and b along K with zeros to "
            f"{-(-k // K_MULTIPLE) * K_MULTIPLE}"
        )
    if n % N_MULTIPLE:
        raise ArgumentError(
            f"N is {n}; it must be a multiple of {N_MULTIPLE}; pad b (and its scale and bias) along N to "
            f"{-(-n // N_MULTIPLE) * N_MULTIPLE} once, and slice the result"
        )
    if max(m, n, k) > _INT32_MAX:
        raise ArgumentError(f"M={m}, N={n}, K={k}: extents are limited to {_INT32_MAX}; split the call")
    limit = MAX_K_INT8 if azp is Azp.NONE else MAX_K_INT8_AZP
    if operand is DType.INT8 and k > limit:
        raise ArgumentError(
            f"K is {k}: int8 products {'with a zero point ' if azp is not Azp.NONE else ''}could overflow the int32 "
            f"accumulator beyond K={limit}; split K over several calls"
        )


def _scale_a(scale: torch.Tensor, m: int) -> ScaleA:
    _scale("scale_a", scale, m, "M", [(m,), (m, 1)])
    if scale.numel() == 1:
        # One row: a two-dimensional scale is a per-token one that happens to be short, and the kernel for it is
        # the one other M use too.
        return ScaleA.TOKEN if m == 1 and scale.dim() == 2 else ScaleA.TENSOR
    return ScaleA.TOKEN


def _scale_b(scale: torch.Tensor, n: int) -> ScaleB:
    _scale("scale_b", scale, n, "N", [(n,), (1, n), (n, 1)])
    return ScaleB.TENSOR if scale.numel() == 1 else ScaleB.CHANNEL


def _scale(name: str, scale: torch.Tensor, extent: int, letter: str, shapes: list[tuple[int, ...]]) -> None:
    if scale.dtype is not torch.float32:
        raise ArgumentError(f"{name} has dtype {scale.dtype}; it must be torch.float32; pass {name}.float()")
    accepted = [(), (1,), (1, 1), *shapes]
    if tuple(scale.shape) not in accepted:
        names = "(), (1,), (1, 1), " + ("(M,), (M, 1)" if letter == "M" else "(N,), (1, N), (N, 1)")
        raise ArgumentError(
            f"{name} has shape {tuple(scale.shape)}; with {letter}={extent} accepted shapes are {names}; "
            "pass one value, or one for each " + ("row of a" if letter == "M" else "column of b")
        )
    _contiguous(name, scale)


def _contiguous(name: str, tensor: torch.Tensor) -> None:
    if tensor.numel() > 1 and not tensor.is_contiguous():
        raise ArgumentError(
            f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; it must be contiguous; "
            f"pass {name}.contiguous()"
        )


def _vector(name: str, tensor: torch.Tensor, dtype: torch.dtype, extent: int, letter: str, remedy: str) -> None:
    if tensor.dtype is not dtype:
        raise ArgumentError(f"{name} has dtype {tensor.dtype}; it must be {dtype}; {remedy}")
    shapes = [(extent,), (1, extent)] if letter == "N" else [(extent,), (extent, 1)]
    if tuple(tensor.shape) not in shapes:
        names = "(N,) or (1, N)" if letter == "N" else "(M,) or (M, 1)"
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; with {letter}={extent} it must be {names}")
    _contiguous(name, tensor)


def _zero_point(azp_adj: torch.Tensor | None, azp: torch.Tensor | None, operand: DType, m: int, n: int) -> Azp:
    if azp_adj is None:
        if azp is not None:
            raise ArgumentError("azp is given without azp_adj; pass azp_adj = the int32 column sums of b, [N]")
        return Azp.NONE
    if operand is not DType.INT8:
        raise ArgumentError(
            f"a zero point needs int8 operands, a and b are {TORCH_DTYPES[operand]}; "
            "quantise symmetrically and call scaled_mm"
        )
    _vector("azp_adj", azp_adj, torch.int32, n, "N", "convert it with azp_adj.to(torch.int32)")
    if azp is None:
        return Azp.TENSOR
    if azp.numel() == 1 and m != 1:
        raise ArgumentError(
            f"azp has one value for M={m} rows; for a per-tensor zero point leave azp out and pass "
            "azp_adj = azp * column sums of b"
        )
    _vector("azp", azp, torch.int32, m, "M", "convert it with azp.to(torch.int32)")
    return Azp.TOKEN


def _output(out: torch.Tensor, out_dtype: torch.dtype, shape: tuple[int, ...], m: int, n: int) -> int:
    if out.dtype is not out_dtype:
        raise ArgumentError(f"out has dtype {out.dtype} but out_dtype is {out_dtype}; make them alike")
    if tuple(out.shape) != shape:
        raise ArgumentError(f"out has shape {tuple(out.shape)}; it must be {shape}")
    if not out.numel():
        return n
    try:
        flat = out.view(-1, n)
    except RuntimeError:
        raise ArgumentError(
            f"out of shape {tuple(out.shape)} and strides {out.stride()} cannot be viewed as [M, N]; pass a "
            "contiguous tensor, or one whose rows alone are padded"
        ) from None
    if flat.stride(1) != 1 or (m > 1 and flat.stride(0) < n):
        raise ArgumentError(f"out has strides {out.stride()}; it must be row-major with rows that do not overlap")
    if m > 1 and flat.stride(0) * out.element_size() % ALIGNMENT:
        raise ArgumentError(
            f"out has leading stride {flat.stride(0)} ({flat.stride(0) * out.element_size()} bytes); it must be a "
            f"multiple of {ALIGNMENT} bytes; pad its rows"
        )
    return flat.stride(0) if m > 1 else n
