"""What `cutlass_w8a8.vllm.custom_ops` quantises by: kernels where there are some, else vLLM's formulas in torch.

`quantize` is the one place that knows which is which.
"""

from __future__ import annotations

import torch

from cutlass_w8a8 import quant_eval, quant_ops
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ArgumentError

Tensor = torch.Tensor

FP8 = torch.float8_e4m3fn
# Scales of tensors: vLLM has no least one, the kernels that of rows. This is the least whose reciprocal is finite.
_FLOOR = 2.0**-126


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
        x: bfloat16, float16 or float32. Copied first if it is not contiguous along K.
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
    if scale is None and granularity == "tensor":
        wide = x.float()
        scale = quant_eval.scale_of(quant_eval.largest_of(wide.reshape(1, -1)), DType.E4M3, _FLOOR).view(1)
        return _into(quant_eval.coded(wide, DType.E4M3, scale, None), out), scale, None
    if x.dim() and x.stride(-1) != 1:
        x = x.contiguous()
    asymmetric = azp is not None or not symmetric
    found = quant_ops.quantize(x, dtype, scale, azp, granularity=granularity, symmetric=not asymmetric, out=out)
    return found[0], found[1], found[2] if asymmetric else None


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
    values = quant_eval.coded(wide, DType.E4M3, scale.reshape(grid[0], 1, grid[1], 1), None)
    return _into(values.view(x.shape), out)


def quantize_bounded(x: Tensor, bound: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [M, K] as e4m3 by a scale for each row, whose magnitude counts up to ``bound``; and the scales [M, 1]."""
    _one_value("scale_ub", bound, torch.float32, x)
    wide = x.float()
    scale = quant_eval.scale_of(torch.minimum(quant_eval.largest_of(wide), bound.reshape(())), DType.E4M3)
    return _into(quant_eval.coded(wide, DType.E4M3, scale, None), out), scale


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
