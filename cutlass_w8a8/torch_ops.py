"""The calls as torch custom operators ``torch.ops.cutlass_w8a8.*``, for torch.compile, export and fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cutlass_w8a8 import quant_ops
from cutlass_w8a8.ops import _run
from cutlass_w8a8.problem import DEFAULT_OVERLAP
from cutlass_w8a8.quant_calls import run as _run_quantize
from cutlass_w8a8.quant_request import scheme_of
from cutlass_w8a8.request import check_matrices

Tensor = torch.Tensor

_OPERANDS = "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b"
# Defaults are those of the functions below: the dispatcher leaves out arguments that equal the schema's.
_OVERLAP = f"str overlap='{DEFAULT_OVERLAP}'"
_OPTIONS = f"str? config=None, {_OVERLAP}, bool? batch_invariant=None"
SCHEMAS = (
    f"scaled_mm({_OPERANDS}, ScalarType out_dtype, Tensor? bias=None, {_OPTIONS}) -> Tensor",
    f"scaled_mm_azp({_OPERANDS}, ScalarType out_dtype, Tensor azp_adj, Tensor? azp=None, Tensor? bias=None, {_OPTIONS})"
    + " -> Tensor",
    f"scaled_mm_out(Tensor(a!) out, {_OPERANDS}, Tensor? azp_adj=None, Tensor? azp=None, Tensor? bias=None, {_OPTIONS})"
    + " -> ()",
    f"quantize_per_token(Tensor x, ScalarType dtype, {_OVERLAP}) -> (Tensor, Tensor)",
    f"quantize_per_token_out(Tensor(a!) out, Tensor(b!) scale, Tensor x, {_OVERLAP}) -> ()",
    f"quantize(Tensor x, ScalarType dtype, str granularity='token', {_OVERLAP}) -> (Tensor, Tensor)",
    f"quantize_azp(Tensor x, ScalarType dtype, str granularity='token', {_OVERLAP}) -> (Tensor, Tensor, Tensor)",
    "quantize_out(Tensor(a!) out, Tensor(b!) scale, Tensor(c!)? azp, Tensor x, str granularity='token', "
    + f"{_OVERLAP}) -> ()",
    f"quantize_static(Tensor x, ScalarType dtype, Tensor scale, Tensor? azp=None, {_OVERLAP}) -> Tensor",
    f"quantize_static_out(Tensor(a!) out, Tensor x, Tensor scale, Tensor? azp=None, {_OVERLAP}) -> ()",
)

_library = torch.library.Library("cutlass_w8a8", "DEF")  # type: ignore[no-untyped-call]
# Inductor may otherwise hand over a row-major copy of b.
_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    config: str | None = None,
    overlap: str = DEFAULT_OVERLAP,
    batch_invariant: bool | None = None,
) -> Tensor:
    return _run(a, b, scale_a, scale_b, out_dtype, None, None, bias, None, config, overlap, batch_invariant)


def _scaled_mm_azp(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    azp_adj: Tensor,
    azp: Tensor | None = None,
    bias: Tensor | None = None,
    config: str | None = None,
    overlap: str = DEFAULT_OVERLAP,
    batch_invariant: bool | None = None,
) -> Tensor:
    return _run(a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias, None, config, overlap, batch_invariant)


def _scaled_mm_out(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    azp_adj: Tensor | None = None,
    azp: Tensor | None = None,
    bias: Tensor | None = None,
    config: str | None = None,
    overlap: str = DEFAULT_OVERLAP,
    batch_invariant: bool | None = None,
) -> None:
    _run(a, b, scale_a, scale_b, out.dtype, azp_adj, azp, bias, out, config, overlap, batch_invariant)


def _per_token(x: Tensor, dtype: torch.dtype, overlap: str = DEFAULT_OVERLAP) -> tuple[Tensor, Tensor]:
    return _run_quantize(x, dtype, "token", None, None, None, overlap, quant_ops.GIVEN)[:2]


def _per_token_out(out: Tensor, scale: Tensor, x: Tensor, overlap: str = DEFAULT_OVERLAP) -> None:
    _run_quantize(x, out.dtype, "token", out, scale, None, overlap, quant_ops.GIVEN)


def _quantize(
    x: Tensor, dtype: torch.dtype, granularity: str = "token", overlap: str = DEFAULT_OVERLAP
) -> tuple[Tensor, Tensor]:
    scheme = scheme_of(granularity, azp=False, dtype=dtype).value
    return _run_quantize(x, dtype, scheme, None, None, None, overlap, quant_ops.GIVEN)[:2]


def _quantize_azp(
    x: Tensor, dtype: torch.dtype, granularity: str = "token", overlap: str = DEFAULT_OVERLAP
) -> tuple[Tensor, Tensor, Tensor | None]:
    scheme = scheme_of(granularity, azp=True, dtype=dtype).value
    return _run_quantize(x, dtype, scheme, None, None, None, overlap, quant_ops.GIVEN)


def _quantize_out(
    out: Tensor,
    scale: Tensor,
    azp: Tensor | None,
    x: Tensor,
    granularity: str = "token",
    overlap: str = DEFAULT_OVERLAP,
) -> None:
    scheme = scheme_of(granularity, azp=azp is not None, dtype=out.dtype).value
    _run_quantize(x, out.dtype, scheme, out, scale, azp, overlap, quant_ops.GIVEN)


def _static(
    x: Tensor, dtype: torch.dtype, scale: Tensor, azp: Tensor | None = None, overlap: str = DEFAULT_OVERLAP
) -> Tensor:
    scheme = scheme_of("static", azp=azp is not None, dtype=dtype).value
    return _run_quantize(x, dtype, scheme, None, scale, azp, overlap, quant_ops.GIVEN)[0]


def _static_out(
    out: Tensor, x: Tensor, scale: Tensor, azp: Tensor | None = None, overlap: str = DEFAULT_OVERLAP
) -> None:
    scheme = scheme_of("static", azp=azp is not None, dtype=out.dtype).value
    _run_quantize(x, out.dtype, scheme, out, scale, azp, overlap, quant_ops.GIVEN)


def _fake(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, *_: object) -> Tensor:
    check_matrices(a, b, out_dtype)
    return a.new_empty((*a.shape[:-1], b.shape[1]), dtype=out_dtype)


def _fake_per_token(x: Tensor, dtype: torch.dtype, overlap: str = DEFAULT_OVERLAP) -> tuple[Tensor, Tensor]:
    return quant_ops.quantize_fake(x, dtype, "token", overlap)


def _fake_quantize_azp(
    x: Tensor, dtype: torch.dtype, granularity: str = "token", overlap: str = DEFAULT_OVERLAP
) -> tuple[Tensor, Tensor, Tensor]:
    scheme_of(granularity, azp=True, dtype=dtype)
    q, scale = quant_ops.quantize_fake(x, dtype, granularity, overlap)
    return q, scale, torch.empty(scale.shape, dtype=torch.int32, device=x.device)


def _fake_static(x: Tensor, dtype: torch.dtype, *_: object) -> Tensor:
    return quant_ops.quantize_fake(x, dtype)[0]


def _fake_out(*_: object) -> None:
    return None


def _register() -> None:
    implementations: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "scaled_mm": (_scaled_mm, _fake),
        "scaled_mm_azp": (_scaled_mm_azp, _fake),
        "scaled_mm_out": (_scaled_mm_out, _fake_out),
        "quantize_per_token": (_per_token, _fake_per_token),
        "quantize_per_token_out": (_per_token_out, _fake_out),
        "quantize": (_quantize, quant_ops.quantize_fake),
        "quantize_azp": (_quantize_azp, _fake_quantize_azp),
        "quantize_out": (_quantize_out, _fake_out),
        "quantize_static": (_static, _fake_static),
        "quantize_static_out": (_static_out, _fake_out),
    }
    for schema in SCHEMAS:
        name = schema.split("(")[0]
        function, fake = implementations[name]
        _library.define(schema, tags=_TAGS)  # type: ignore[no-untyped-call]
        for key in ("CPU", "CUDA"):
            _library.impl(name, function, key)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"cutlass_w8a8::{name}", fake, lib=_library)


_register()
