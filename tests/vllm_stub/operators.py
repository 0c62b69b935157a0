"""vLLM's operators ``torch.ops._C.*``, by our kernels: they write to tensors they are given."""

from __future__ import annotations

import torch

import cutlass_w8a8
from cutlass_w8a8.vllm import custom_ops

Tensor = torch.Tensor

_SCHEMAS = (
    "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()",
    "cutlass_scaled_mm_azp(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor azp_adj, "
    "Tensor? azp, Tensor? bias) -> ()",
    "static_scaled_int8_quant(Tensor! result, Tensor input, Tensor scale, Tensor? azp) -> ()",
    "dynamic_scaled_int8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor!? azp) -> ()",
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, (int, int)? group_shape=None) -> ()",
    "dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
)
_libraries: list[torch.library.Library] = []


def _mm(out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None) -> None:
    cutlass_w8a8.scaled_mm(a, b, a_scales, b_scales, out.dtype, bias, out=out)


def _mm_azp(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    azp_adj: Tensor,
    azp: Tensor | None,
    bias: Tensor | None,
) -> None:
    cutlass_w8a8.scaled_mm_azp(a, b, a_scales, b_scales, out.dtype, azp_adj, azp, bias, out=out)


def _static_int8(result: Tensor, input: Tensor, scale: Tensor, azp: Tensor | None) -> None:  # noqa: A002
    result.copy_(custom_ops.scaled_int8_quant(input, scale, azp, symmetric=azp is None)[0])


def _dynamic_int8(result: Tensor, input: Tensor, scale: Tensor, azp: Tensor | None) -> None:  # noqa: A002
    values, scales, zero_points = custom_ops.scaled_int8_quant(input, symmetric=azp is None)
    result.copy_(values)
    scale.copy_(scales)
    if azp is not None and zero_points is not None:
        azp.copy_(zero_points)


def _static_fp8(result: Tensor, input: Tensor, scale: Tensor, group_shape: list[int] | None = None) -> None:  # noqa: A002
    shape = None if group_shape is None else (group_shape[0], group_shape[1])
    result.copy_(custom_ops.scaled_fp8_quant(input, scale, group_shape=shape)[0])


def _dynamic_fp8(result: Tensor, input: Tensor, scale: Tensor) -> None:  # noqa: A002
    values, found = custom_ops.scaled_fp8_quant(input)
    result.copy_(values)
    # The tests check the operator with a scale of [M, 1], of which the kernel writes the first.
    scale.view(-1)[:1].copy_(found)


def _token_fp8(result: Tensor, input: Tensor, scale: Tensor, scale_ub: Tensor | None) -> None:  # noqa: A002
    values, found = custom_ops.scaled_fp8_quant(input, scale_ub=scale_ub, use_per_token_if_dynamic=True)
    result.copy_(values)
    scale.copy_(found)


def _nothing(*_: object) -> None:
    """What tracing needs to know of an operator that returns nothing."""


def register() -> None:
    """Define the operators, for CPU and CUDA tensors."""
    library = torch.library.Library("_C", "DEF")
    functions = (_mm, _mm_azp, _static_int8, _dynamic_int8, _static_fp8, _dynamic_fp8, _token_fp8)
    for schema, function in zip(_SCHEMAS, functions, strict=True):
        name = schema.split("(")[0]
        library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
        for key in ("CPU", "CUDA"):
            library.impl(name, function, key)
        torch.library.register_fake(f"_C::{name}", _nothing, lib=library)
    library.define("cutlass_scaled_mm_supports_fp8(int cuda_device_capability) -> bool")
    library.impl(
        "cutlass_scaled_mm_supports_fp8", custom_ops.cutlass_scaled_mm_supports_fp8, "CompositeExplicitAutograd"
    )
    # A library that is collected takes its operators along.
    _libraries.append(library)
