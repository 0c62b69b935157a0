"""Quantisation of activations as layers ask for it.

`quantize` is by the kernels. For tensor parallel layers there is the same in torch, in three steps, so that limits can
be brought together in between: `limits` measures, `parameters` turns that into scales and zero points, `apply`
quantises.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cutlass_w8a8 import quant_eval, quant_ops
from cutlass_w8a8.problem import DEFAULT_OVERLAP
from cutlass_w8a8.weight_checks import operand_of

Tensor = torch.Tensor


@dataclass(frozen=True)
class Activations:
    """Quantised rows.

    Attributes:
        values: int8 or float8_e4m3fn [M, K'].
        scale: float32 [M, 1], or [1].
        azp: int32 [M], or None where there is no zero point or it is folded into the weight's ``azp_adj``.
    """

    values: Tensor
    scale: Tensor
    azp: Tensor | None = None


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    *,
    granularity: str = "token",
    scale: Tensor | None = None,
    azp: Tensor | None = None,
    symmetric: bool = True,
    width: int | None = None,
    overlap: str = DEFAULT_OVERLAP,
) -> Activations:
    """Quantise rows, as `cutlass_w8a8.quantize` does, into the columns a layer wants.

    Args:
        x: [M, K], torch.bfloat16, torch.float16 or torch.float32, contiguous along K.
        dtype: torch.int8 or torch.float8_e4m3fn.
        granularity: ``"token"`` or ``"tensor"``.
        scale: float32 [1], a static scale; None measures x.
        azp: int32 [1], with ``scale``: a static zero point.
        symmetric: whether to do without a zero point.
        width: columns of the result, at least K. Those beyond K hold what the zeros of a padded weight cancel: zeros
            for float8_e4m3fn, anything for int8. None is K.
        overlap: ``"none"`` or ``"launch"``, of the kernel.
    """
    rows, k = x.shape
    width = k if width is None else width
    values = None
    if width != k:
        fresh = torch.empty if dtype is torch.int8 else torch.zeros
        values = fresh((rows, width), dtype=dtype, device=x.device)
    found = quant_ops.quantize(
        x,
        dtype,
        scale,
        azp,
        granularity=granularity,
        symmetric=symmetric and azp is None,
        out=None if values is None else values[:, :k],
        overlap=overlap,
    )
    values = found[0] if values is None else values
    if scale is not None or symmetric:
        # A layer's given zero point is folded into its weight.
        return Activations(values, found[1])
    azps = found[2] if granularity == "token" else found[2].expand(rows)
    return Activations(values, found[1], azps.reshape(rows).contiguous())


def by_limits(x: Tensor, dtype: torch.dtype, reach: Tensor, granularity: str, symmetric: bool) -> Activations:
    """Quantise x [M, K] by the parameters for ``reach``, which `limits` found, of x or of more than x."""
    scales, azps = parameters(reach, dtype, symmetric)
    values = apply(x, dtype, scales, azps)
    if granularity == "tensor":
        scales = scales.flatten()
    return Activations(values, scales, None if azps is None else azps.expand(x.shape[0], 1).contiguous().view(-1))


def limits(x: Tensor, granularity: str, symmetric: bool) -> Tensor:
    """How far values reach; the elementwise maximum of two of these is the limits of both tensors together.

    Returns:
        float32 [1, R], largest magnitudes, or, if not ``symmetric``, [2, R]: how far below 0 and how far above. R is M
        per token, 1 per tensor.
    """
    rows = x.shape[0] if granularity == "token" else 1
    if not x.numel():
        return torch.zeros((1 if symmetric else 2, rows), dtype=torch.float32, device=x.device)
    x = x if granularity == "token" else x.reshape(1, -1)
    if symmetric:
        return x.abs().amax(1).float().unsqueeze(0)
    low, high = x.amin(1).float(), x.amax(1).float()
    return torch.stack((-low.clamp(max=0), high.clamp(min=0)))


def parameters(reach: Tensor, dtype: torch.dtype, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points for these `limits`.

    Returns:
        float32 [R, 1], and int32 of the same shape, or None if ``symmetric``.
    """
    if symmetric:
        return quant_eval.scale_of(reach[0].unsqueeze(1), operand_of("dtype", dtype)), None
    below, above = reach.unsqueeze(2)
    return quant_eval.range_of(-below, above)


def apply(x: Tensor, dtype: torch.dtype, scale: Tensor, azp: Tensor | None) -> Tensor:
    """Quantise x [M, K] by scales and zero points, [M, 1] or [1, 1]."""
    return quant_eval.coded(x.float(), operand_of("dtype", dtype), scale, azp)


def widened(values: Tensor, width: int) -> Tensor:
    """Quantised values [M, K] with zeros behind them, [M, width]."""
    more = width - values.shape[1]
    if not more:
        return values
    # Padding knows no float8; byte 0 is its 0.
    return F.pad(values.view(torch.int8), (0, more)).view(values.dtype)
