"""What a layer is given, checked and brought into its one form."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cutlass_w8a8.dtypes import OUTPUT_DTYPES
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.evt.evaluate import TORCH_DTYPES
from cutlass_w8a8.nn.config import W8A8Config
from cutlass_w8a8.request import refuse_gradients
from cutlass_w8a8.weight_checks import check_azps, check_scales
from cutlass_w8a8.weights import expand_scales, merge_input_ranges, merge_input_scales, requantize

Tensor = torch.Tensor

OUT_DTYPES = tuple(TORCH_DTYPES[dtype] for dtype in OUTPUT_DTYPES)


def rows_of(x: Tensor, features: int) -> Tensor:
    """x [..., features] as [M, features], contiguous along its rows.

    Raises:
        ArgumentError: x is of another extent, or asks for a gradient.
    """
    if not x.dim() or x.shape[-1] != features:
        raise ArgumentError(f"x has shape {tuple(x.shape)}; it must be [..., K] with K={features}")
    if torch.is_grad_enabled():
        refuse_gradients(x)
    rows = x.reshape(-1, features)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type itself.

    Raises:
        ArgumentError: results cannot be of it.
    """
    if dtype not in OUT_DTYPES:
        raise ArgumentError(
            f"dtype is {dtype}; a W8A8Linear computes {', '.join(map(str, OUT_DTYPES))}; convert its inputs and "
            "results instead"
        )
    return dtype


def one_granularity(
    weight: Tensor, scale: Tensor, config: W8A8Config, logical_widths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Weight and scales, one or one for each channel, as the configuration wants them.

    Raises:
        ArgumentError: they do not go together.
    """
    n = weight.shape[0]
    if not bool(scale.isfinite().all()):
        raise ArgumentError("weight_scale holds NaN or an infinity; load the values it belongs with")
    widths = tuple(logical_widths)
    if widths and sum(widths) != n:
        raise ArgumentError(f"logical_widths {widths} add up to {sum(widths)}, but weight has {n} rows")
    if config.weight == "tensor":
        if scale.numel() == 1:
            return weight, scale
        if widths and scale.numel() == len(widths):
            return requantize(weight, scale, widths)
        raise ArgumentError(
            f"weight_scale has {scale.numel()} values, but config.weight is 'tensor'; pass one, or one for each of "
            "logical_widths, or config.weight='channel'"
        )
    if scale.numel() == n:
        return weight, scale
    if scale.numel() == 1:
        return weight, scale.expand(n).contiguous()
    if widths:
        return weight, expand_scales(scale, widths)
    raise ArgumentError(
        f"weight_scale has {scale.numel()} values for N={n}; pass 1, N, or one for each shard with logical_widths"
    )


def one_input(scale: Tensor | None, azp: Tensor | None, config: W8A8Config) -> tuple[Tensor | None, Tensor | None]:
    """Static scale and zero point, float32 [1] and int32 [1], of what may be one for each shard.

    Raises:
        ArgumentError: they are missing, superfluous or not acceptable.
    """
    if (scale is not None) is config.dynamic or (azp is not None) is not config.folds:
        wanted = "none of them" if config.dynamic else "both" if config.folds else "input_scale alone"
        given = ", ".join(name for name, value in (("input_scale", scale), ("input_azp", azp)) if value is not None)
        raise ArgumentError(f"{given or 'no input_scale'} given; this configuration needs {wanted}")
    if scale is None:
        return None, None
    if azp is None:
        return merge_input_scales(scale), None
    if scale.numel() == azp.numel() == 1:
        check_scales("input_scale", scale.float())
        check_azps(azp)
        return scale.float().reshape(1), azp.reshape(1).to(torch.int32)
    return merge_input_ranges(scale, azp)
