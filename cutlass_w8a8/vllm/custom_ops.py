"""Functions of ``vllm._custom_ops`` that this package has kernels for: names, arguments and results as in vLLM 0.20.2.

    from cutlass_w8a8.vllm import custom_ops as ops
    y = ops.cutlass_scaled_mm(a, b, scale_a, scale_b, torch.bfloat16, bias)

What vLLM takes is taken, the forms included that `cutlass_w8a8.scaled_mm` refuses: a of one dimension, vectors in any
shape that holds as many values, and extents that kernels do not take. Errors are this package's (`ArgumentError` is a
ValueError) where vLLM's are assertions and RuntimeErrors. What differs:

- Extents. vLLM's ``cutlass_scaled_mm`` hands K or N that are no multiples of 16 to a Triton kernel, and its ``..._azp``
  refuses them. Here N in multiples of 8 is served as it is; otherwise operands are padded with zeros at each call,
  which reads and writes the weight again: pad it once where it is loaded.
- K beyond 131071 for int8 (65793 with zero points) is refused, where int32 sums could overflow.
- Block scales are refused, and `cutlass_scaled_mm_supports_block_fp8` is False.
- ``out_dtype`` may be float32 too, and tensors on the CPU are served.
- fp8 sums are added in the order of the kernel that serves; int8 results are exact, as vLLM's are.
- Quantisation: see `scaled_int8_quant` and `scaled_fp8_quant`.
"""

from __future__ import annotations

import torch

from cutlass_w8a8 import ops
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.request import check_kinds
from cutlass_w8a8.support import is_supported
from cutlass_w8a8.vllm import quantization
from cutlass_w8a8.vllm.operands import BLOCK, flat, missing, pad_columns, pad_rows, pad_weight, scale

__all__ = [
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm",
    "cutlass_scaled_mm_azp",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp8",
    "scaled_fp8_quant",
    "scaled_int8_quant",
]

Tensor = torch.Tensor

FP8 = torch.float8_e4m3fn


def cutlass_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """D = scale_a * scale_b * (a @ b) + bias.

    Args:
        a: [..., M, K] or [K], torch.float8_e4m3fn or torch.int8.
        b: [K, N] of a's dtype, column-major.
        scale_a: float32, one value or M of them, in any shape.
        scale_b: float32, one value or N of them, in any shape.
        out_dtype: torch.bfloat16, torch.float16, or torch.float32.
        bias: N values of out_dtype, in any shape, or None.

    Returns:
        [..., M, N] or [N] of out_dtype.

    Raises:
        UnsupportedError: scales are those of blocks, or no kernel serves this device or these types.
        W8A8Error: as for `cutlass_w8a8.scaled_mm`.
    """
    return multiply(a, b, scale_a, scale_b, out_dtype, bias=bias)


def cutlass_scaled_mm_azp(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    azp_adj: Tensor,
    azp: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """D = scale_a * scale_b * (a @ b - azp * azp_adj) + bias for int8 operands.

    Args:
        a, b, scale_a, scale_b, out_dtype, bias: as of `cutlass_scaled_mm`; a and b are torch.int8.
        azp_adj: N values of int32, in any shape: the column sums of b, already multiplied by the zero point where that
            is one of the whole tensor (and ``azp`` is None).
        azp: M values of int32, in any shape: the zero point of each row of a; or None.

    Returns:
        [..., M, N] or [N] of out_dtype.

    Raises:
        W8A8Error: as for `cutlass_w8a8.scaled_mm_azp`.
    """
    if azp_adj is None:
        raise ArgumentError("azp_adj is None; pass the int32 column sums of b, or call cutlass_scaled_mm")
    return multiply(a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias)


def multiply(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    azp_adj: Tensor | None = None,
    azp: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    batch_invariant: bool | None = None,
) -> Tensor:
    """Either of the two, with the options that vLLM's have not."""
    try:
        if not a.dim() or b.dim() != 2 or a.shape[-1] != b.shape[0] or not a.shape[-1]:
            # Nothing to make of these shapes: the call says what is wrong, or serves K = 0.
            return _call(a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias, batch_invariant)
        vector, (k, n) = a.dim() == 1, b.shape
        if vector:
            a = a[None]
        m = a.numel() // k
        along_k = -(-k // BLOCK)
        scale_a = scale("scale_a", scale_a, m, (m, along_k))
        scale_b = scale("scale_b", scale_b, n, (along_k, -(-n // BLOCK)))
        azp_adj, azp, bias = flat(azp_adj, n), flat(azp, m), flat(bias, n)
    except (AttributeError, TypeError, RuntimeError):
        check_kinds(a, b, scale_a, scale_b, out_dtype, bias, azp_adj, azp, None)
        raise
    more_k, more_n = missing(k, n)
    if more_k or more_n:
        a, b = pad_rows(a, more_k), pad_weight(b, more_k, more_n)
        scale_b = pad_columns(scale_b, n, more_n)
        azp_adj, bias = (None if each is None else pad_columns(each, n, more_n) for each in (azp_adj, bias))
    result = _call(a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias, batch_invariant)
    if more_n:
        result = result[..., :n].contiguous()
    return result[0] if vector else result


def _call(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    azp_adj: Tensor | None,
    azp: Tensor | None,
    bias: Tensor | None,
    batch_invariant: bool | None,
) -> Tensor:
    if azp_adj is None:
        return ops.scaled_mm(a, b, scale_a, scale_b, out_dtype, bias, batch_invariant=batch_invariant)
    return ops.scaled_mm_azp(a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias, batch_invariant=batch_invariant)


def cutlass_scaled_mm_supports_fp8(cuda_device_capability: int) -> bool:
    """Whether `cutlass_scaled_mm` takes fp8 on a device of this capability, 90 for 9.0; False for what is none.

    Raises:
        ArgumentError: ``cuda_device_capability`` is no number.
    """
    if not isinstance(cuda_device_capability, int):
        raise ArgumentError(
            f"cuda_device_capability is {cuda_device_capability!r}; pass it as one number, such as 90 for 9.0"
        )
    return cuda_device_capability > 0 and bool(is_supported(divmod(cuda_device_capability, 10), FP8))


def cutlass_scaled_mm_supports_block_fp8(cuda_device_capability: int) -> bool:  # noqa: ARG001
    """Whether `cutlass_scaled_mm` takes scales of blocks: it does not, on any device."""
    return False


def cutlass_group_gemm_supported(cuda_device_capability: int) -> bool:  # noqa: ARG001
    """Whether there are grouped kernels (``cutlass_moe_mm``): there are none, for any device."""
    return False


def scaled_int8_quant(
    input: Tensor,  # noqa: A002  (vLLM's name)
    scale: Tensor | None = None,
    azp: Tensor | None = None,
    symmetric: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise to int8: by the scale that is given, or each row by one of its own.

    Rounding to nearest even, saturating. Values may differ by one from vLLM's, which divides by the scale where this
    multiplies by its reciprocal, or the other way round; rows of zeros get the scale 2**-126 where vLLM's is 0. With
    zero points that are computed, the range of each row includes zero, so that they fit int8; vLLM's does not, and for
    rows of values far from zero and close together its products overflow. A NaN makes its row's scale NaN.

    Args:
        input: [..., K], torch.bfloat16, torch.float16 or torch.float32.
        scale: float32, one value; None to have one computed for each row.
        azp: int32, one value, if ``scale`` is given and the quantisation asymmetric.
        symmetric: whether there is no zero point.

    Returns:
        The values, of input's shape; the scale: the one given, or float32 [M, 1]; the zero point: the one given, or
        int32 [M, 1], or None if symmetric.

    Raises:
        ArgumentError: an argument is not acceptable, or ``azp`` and ``symmetric`` contradict each other.
    """
    quantization.check_tensors(input=input, scale=scale, azp=azp)
    if scale is not None and symmetric != (azp is None):
        raise ArgumentError(
            f"symmetric is {symmetric} but azp is {'None' if azp is None else 'given'}; with a scale, pass azp exactly "
            "where symmetric=False"
        )
    if scale is None and azp is not None:
        raise ArgumentError("azp is given without a scale; pass both, or neither to have them computed")
    if scale is not None:
        q, _, _ = quantization.quantize(input, torch.int8, granularity="tensor", scale=scale, azp=azp)
        return q, scale, azp
    return quantization.quantize(input, torch.int8, granularity="token", symmetric=symmetric)


def scaled_fp8_quant(
    input: Tensor,  # noqa: A002  (vLLM's name)
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise to e4m3: by the scales that are given, by one that is computed, or by one computed for each row.

    Values may differ by one step from those of vLLM's per-token kernel, which divides by the scale where this one
    multiplies by its reciprocal. A NaN stays NaN, which vLLM's saturation turns into a number. A tensor of zeros gets
    the scale 2**-126 where vLLM's is 0.

    Args:
        input: [M, K], torch.bfloat16, torch.float16 or torch.float32.
        scale: float32: one value; or 1-D with ``group_shape``; or 2-D, one for each group that its shape divides input
            into.
        num_token_padding: the result gets at least so many rows; those added are zeros, their scales too.
        scale_ub: float32, one value: magnitudes of rows count up to it (only per token).
        use_per_token_if_dynamic: without ``scale``: one for each row, rather than one of all.
        output: [M, K] of torch.float8_e4m3fn to write to; not with ``num_token_padding``.
        group_shape: rows and columns of a group of input that share a scale, -1 for all.

    Returns:
        The values, and the scale: the one given; or float32 [1]; or, per token, float32 [rows of the values, 1].

    Raises:
        ArgumentError: an argument is not acceptable.
    """
    rows = quantization.check_fp8(input, scale, num_token_padding, scale_ub, output)
    if rows > input.shape[0]:
        output = torch.zeros((rows, input.shape[1]), dtype=FP8, device=input.device)
    out = None if output is None else output[: input.shape[0]]
    if scale is not None:
        q = quantization.quantize_groups(input, scale, group_shape, out)
        return q if output is None else output, scale
    if not use_per_token_if_dynamic:
        q, found, _ = quantization.quantize(input, FP8, granularity="tensor", out=out)
        return q if output is None else output, found
    if scale_ub is not None:
        q, found = quantization.quantize_bounded(input, scale_ub, out)
    else:
        q, found, _ = quantization.quantize(input, FP8, granularity="token", out=out)
    if rows > input.shape[0]:
        found = torch.cat([found, found.new_zeros(rows - input.shape[0], 1)])
    return q if output is None else output, found
