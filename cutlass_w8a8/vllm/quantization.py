"""What `cutlass_w8a8.vllm.custom_ops` quantises by: kernels where there are some, else vLLM's formulas in torch.

`quantize` is the one place that knows which is which.
"""

from __future__ import annotations

import math

import torch

from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.quantize import quantize_per_token

Tensor = torch.Tensor

FP8 = torch.float8_e4m3fn
_E4M3_LARGEST = 448.0
_E4M3_FLOOR = 1 / (448 * 512)
# The least scale whose reciprocal is finite.
_FLOOR = 2.0**-126
_INT32 = torch.iinfo(torch.int32)


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    *,
    granularity: str,
    scale: Tensor | None = None,
    azp: Tensor | None = None,
    symmetric: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise x [..., K] to int8 or e4m3.

    Args:
        x: bfloat16, float16 or float32.
        dtype: torch.int8 or torch.float8_e4m3fn.
        granularity: ``"token"`` (a scale for each row) or ``"tensor"``.
        scale: float32, one value, with ``"tensor"``; computed if None.
        azp: int32, one value, with ``scale``; makes it asymmetric.
        symmetric: whether there is no zero point, where scales are computed.
        out: where values go; allocated if None.

    Returns:
        The values, the scale ([M, 1], or [1], or the one given), the zero point (int32 [M, 1], or the one given) or
        None.

    Raises:
        ArgumentError: an argument is not acceptable.
    """
    _check_input(x)
    if granularity == "token" and symmetric:
        q, scales = quantize_per_token(x, dtype, out=out)
        return q, scales, None
    if granularity == "token":
        q, scales, zero_points = _asymmetric_rows(x)
        return _into(q, out), scales, zero_points
    if scale is None:
        wide = x.float()
        scale = _at_least(_quotient(_largest(wide), _E4M3_LARGEST), _FLOOR)
        return _into(_e4m3(wide * scale.reciprocal()), out), scale, None
    _one_value("scale", scale, torch.float32, x)
    if azp is not None:
        _one_value("azp", azp, torch.int32, x)
    scaled = x.float() * scale.reshape(()).reciprocal()
    if dtype is FP8:
        return _into(_e4m3(scaled), out), scale, azp
    return _into(_int8(scaled, None if azp is None else azp.reshape(())), out), scale, azp


def quantize_groups(x: Tensor, scale: Tensor, group_shape: tuple[int, int] | None, out: Tensor | None) -> Tensor:
    """x [M, K] as e4m3, by scales for groups of it.

    Raises:
        ArgumentError: the groups do not follow from ``scale`` and ``group_shape``, or do not divide x.
    """
    if scale.numel() == 1:
        return quantize(x, FP8, granularity="tensor", scale=scale, out=out)[0]
    if scale.dtype is not torch.float32:
        raise ArgumentError(f"scale has dtype {scale.dtype}; it must be torch.float32; pass scale.float()")
    if scale.device != x.device:
        raise ArgumentError(f"scale is on {scale.device} but input is on {x.device}; move it there")
    grid = _grid(x, scale, group_shape)
    rows, columns = x.shape[0] // grid[0], x.shape[1] // grid[1]
    wide = x.float().view(grid[0], rows, grid[1], columns)
    values = _e4m3(wide * scale.reshape(grid[0], 1, grid[1], 1).reciprocal())
    return _into(values.view(x.shape), out)


def quantize_bounded(x: Tensor, bound: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [M, K] as e4m3 by a scale for each row, whose magnitude counts up to ``bound``; and the scales [M, 1]."""
    _one_value("scale_ub", bound, torch.float32, x)
    wide = x.float()
    largest = _rows_or_zero(wide.abs(), "amax")
    scale = _at_least(_quotient(torch.minimum(largest, bound.reshape(())), _E4M3_LARGEST), _E4M3_FLOOR)
    return _into(_e4m3(wide * scale.reciprocal()), out), scale


def check_tensors(**given: object) -> None:
    """Refuse arguments that are no tensors; all but ``input`` may be None.

    Raises:
        ArgumentError: names the first such argument.
    """
    for name, value in given.items():
        if not (isinstance(value, Tensor) or (value is None and name != "input")):
            raise ArgumentError(f"{name} is a {type(value).__name__}; pass a torch.Tensor")


def check_fp8(x: Tensor, scale: Tensor | None, padding: int | None, bound: Tensor | None, output: Tensor | None) -> int:
    """Rows of the result of a call of ``scaled_fp8_quant``.

    Raises:
        ArgumentError: its arguments do not go together.
    """
    check_tensors(input=x, scale=scale, scale_ub=bound, output=output)
    if x.dim() != 2:
        raise ArgumentError(f"input has shape {tuple(x.shape)}; it must be [M, K]; pass input.view(-1, K)")
    _check_input(x)
    if output is not None:
        if padding is not None:
            raise ArgumentError("num_token_padding is given with output; pass an output that is as long as wanted")
        if output.dtype is not FP8 or output.shape != x.shape or output.device != x.device:
            raise ArgumentError(
                f"output is {output.dtype} {tuple(output.shape)} on {output.device}; it must be {FP8} "
                f"{tuple(x.shape)} on {x.device}"
            )
    return max(padding or 0, x.shape[0])


def _grid(x: Tensor, scale: Tensor, group_shape: tuple[int, int] | None) -> tuple[int, int]:
    """How many groups x is divided into, along M and along K."""
    if group_shape is None:
        if scale.dim() != 2:
            raise ArgumentError(
                f"scale has shape {tuple(scale.shape)} and group_shape is None; pass group_shape=(1, -1) for a scale "
                "for each row, (-1, 1) for one for each column"
            )
        grid = (scale.shape[0], scale.shape[1])
    else:
        size = tuple(all_of if part == -1 else part for part, all_of in zip(group_shape, x.shape, strict=True))
        if any(part < 1 or all_of % part for part, all_of in zip(size, x.shape, strict=True)):
            raise ArgumentError(
                f"group_shape is {tuple(group_shape)}; it must divide input's shape {tuple(x.shape)}, or be -1"
            )
        grid = (x.shape[0] // size[0], x.shape[1] // size[1])
    fits = scale.numel() == grid[0] * grid[1] and (scale.dim() == 1 or tuple(scale.shape) == grid)
    if (
        not fits
        or (scale.dim() == 1 and 1 not in grid)
        or any(not parts or extent % parts for extent, parts in zip(x.shape, grid, strict=True))
    ):
        raise ArgumentError(
            f"scale has shape {tuple(scale.shape)} and group_shape is {group_shape}; for input {tuple(x.shape)} they "
            "must give a scale for each of equal groups"
        )
    return grid


def _asymmetric_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 values, scales and zero points [M, 1] of rows whose range becomes -128 to 127."""
    if not x.dim():
        raise ArgumentError("input has shape (); it must be [..., K]; add a dimension with input[None]")
    wide = x.float().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    low, high = _rows_or_zero(wide, "amin"), _rows_or_zero(wide, "amax")
    scale, zero_point = _range(low, high)
    # |a| <= 128 and |b| <= 128, so this is the largest zero point whose products with K column sums fit int32.
    limit = _INT32.max // (128 * max(x.shape[-1], 1)) - 128
    widened = _range(torch.minimum(low, torch.zeros_like(low)), torch.maximum(high, torch.zeros_like(high)))
    fits = zero_point.abs() <= limit
    scale = torch.where(fits, scale, widened[0])
    zero_point = torch.where(fits, zero_point, widened[1])
    return _int8(wide * scale.reciprocal(), zero_point).view(x.shape), scale, zero_point.to(torch.int32)


def _range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of a range, and its zero point as float64 (0 where it is none)."""
    span = high - low
    scale = _at_least(_quotient(span, 255.0), _FLOOR)
    return scale, (torch.full_like(low, -128.0) - low / scale).double().round().nan_to_num(0.0, torch.inf, -torch.inf)


def _largest(wide: Tensor) -> Tensor:
    """The largest magnitude of all, [1]; 0 if there are none."""
    return wide.abs().amax().reshape(1) if wide.numel() else wide.new_zeros(1)


def _rows_or_zero(wide: Tensor, reduction: str) -> Tensor:
    found: Tensor = getattr(wide, reduction)(1, keepdim=True) if wide.shape[1] else wide.new_zeros(wide.shape[0], 1)
    return found


def _quotient(value: Tensor, divisor: float) -> Tensor:
    # By a tensor: on CUDA a division by a number is a product with its rounded reciprocal.
    return value / torch.full_like(value, divisor)


def _at_least(value: Tensor, floor: float) -> Tensor:
    return torch.maximum(value, torch.full_like(value, floor))


def _e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp(-_E4M3_LARGEST, _E4M3_LARGEST).to(FP8)


def _int8(scaled: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """Rounded and saturated to int32, the zero point added, saturated to int8; NaN counts as 0."""
    if zero_point is None:
        return scaled.nan_to_num(0.0).round().clamp(-128, 127).to(torch.int8)
    # float64 holds every int32 and their sums.
    whole = scaled.double().round().nan_to_num(0.0).clamp(_INT32.min, _INT32.max)
    return (whole + zero_point.double()).clamp(-128, 127).to(torch.int8)


def _into(values: Tensor, out: Tensor | None) -> Tensor:
    return values if out is None else out.copy_(values)


def _check_input(x: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ArgumentError(
            f"input has dtype {x.dtype}; accepted: torch.bfloat16, torch.float16, torch.float32; convert it with "
            "input.float()"
        )


def _one_value(name: str, tensor: Tensor, dtype: torch.dtype, x: Tensor) -> None:
    if tensor.dtype is not dtype:
        raise ArgumentError(f"{name} has dtype {tensor.dtype}; it must be {dtype}; pass {name}.to({dtype})")
    if tensor.numel() != 1:
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; it must hold one value")
    if tensor.device != x.device:
        raise ArgumentError(f"{name} is on {tensor.device} but input is on {x.device}; move it there")
