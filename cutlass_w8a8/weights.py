"""Weights made ready to serve: quantised, fused, and laid out as kernels take them. Work of loading, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.quant_eval import quantized
from cutlass_w8a8.spec import QUANT_LARGEST, Scheme
from cutlass_w8a8.weight_checks import (
    INT8_HIGH,
    INT8_LOW,
    check_azps,
    check_extents,
    check_scales,
    operand_of,
    padded,
)

Tensor = torch.Tensor

GRANULARITIES = ("channel", "tensor")


@dataclass(frozen=True)
class PackedWeight:
    """A weight as kernels take it, padded to the extents they accept.

    Attributes:
        weight: int8 or float8_e4m3fn [N', K'], contiguous; zeros beyond [N, K].
        scale: float32 [1], or [N'] (1 beyond N).
        azp_adj: int32 [N'], or None without zero points.
        bias: [N'] (0 beyond N), or None.
        n, k: the extents before padding.
    """

    weight: Tensor
    scale: Tensor
    azp_adj: Tensor | None
    bias: Tensor | None
    n: int
    k: int

    @property
    def b(self) -> Tensor:
        """`weight` as `scaled_mm` takes it: [K', N'], column-major."""
        return self.weight.t()


def quantize_weight(weight: Tensor, dtype: torch.dtype, granularity: str = "channel") -> tuple[Tensor, Tensor]:
    """Quantise a float weight symmetrically, by the formula of `quantize_per_token`.

    Args:
        weight: [N, K], torch.bfloat16, torch.float16 or torch.float32, on any device.
        dtype: torch.int8 or torch.float8_e4m3fn.
        granularity: ``"channel"``, a scale for each row, or ``"tensor"``, one for all.

    Returns:
        [N, K] of ``dtype``, contiguous, and float32 scales: [N], or [1].

    Raises:
        ArgumentError: an argument is of another kind, or ``weight`` holds NaN or an infinity.
    """
    if weight.dim() != 2:
        raise ArgumentError(f"weight has shape {tuple(weight.shape)}; it must be [N, K]")
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ArgumentError(f"weight has dtype {weight.dtype}; convert it with weight.float()")
    target = operand_of("dtype", dtype)
    if granularity not in GRANULARITIES:
        raise ArgumentError(f"granularity is {granularity!r}; accepted: {' or '.join(map(repr, GRANULARITIES))}")
    rows = weight.detach() if granularity == "channel" else weight.detach().reshape(1, -1)
    values, scale, _ = quantized(rows, target, Scheme.TOKEN)
    if not bool(scale.isfinite().all()):
        channels = (~weight.detach().isfinite().all(1)).nonzero().flatten().tolist()
        raise ArgumentError(
            f"weight holds NaN or an infinity in {len(channels)} of its {weight.shape[0]} channels (the first is "
            f"{channels[0]}); such a weight cannot be quantised"
        )
    return values.view(weight.shape), scale.flatten()


def column_sums(weight: Tensor) -> Tensor:
    """Sums over K, int32 [N], of an int8 weight [N, K]: its ``azp_adj`` under zero points per token."""
    return weight.sum(1, dtype=torch.int32)


def expand_scales(scales: Tensor, logical_widths: Sequence[int]) -> Tensor:
    """One scale for each output channel of a fused weight, from one scale for each of its shards.

    Args:
        scales: float32, one value for each shard, of any shape.
        logical_widths: output channels of each shard, in order.

    Returns:
        float32 [sum(logical_widths)].

    Raises:
        ArgumentError: their numbers differ.
    """
    flat = scales.flatten()
    if flat.numel() != len(logical_widths):
        raise ArgumentError(
            f"scales has {flat.numel()} values and logical_widths {len(logical_widths)}; pass one for each shard"
        )
    return flat.repeat_interleave(torch.tensor(list(logical_widths), device=flat.device))


def requantize(weight: Tensor, scales: Tensor, logical_widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Bring the shards of a fused weight to one scale, the largest of theirs.

    Rounds shards of smaller scales anew, from their float32 values (vLLM goes through float16). `expand_scales` loses
    nothing; this is for callers who want one scale for the whole weight.

    Args:
        weight: float8_e4m3fn or int8 [N, K].
        scales: positive, one value for each shard.
        logical_widths: output channels of each shard, in order; they add up to N.

    Returns:
        [N, K] of the same type, and the scale, float32 [1].

    Raises:
        ArgumentError: numbers do not match, or a scale is not positive and finite.
    """
    target = operand_of("weight", weight.dtype)
    channel = expand_scales(scales.float(), logical_widths)
    if channel.numel() != weight.shape[0]:
        raise ArgumentError(
            f"logical_widths {tuple(logical_widths)} add up to {channel.numel()}, but weight has {weight.shape[0]} rows"
        )
    check_scales("scales", channel)
    largest = channel.amax().reshape(1)
    real = weight.float() * (channel.unsqueeze(1) / largest)
    limit = QUANT_LARGEST[target]
    if target is DType.INT8:
        return real.round().clamp(INT8_LOW, limit).to(weight.dtype), largest
    return real.clamp(-limit, limit).to(weight.dtype), largest


def merge_input_scales(scales: Sequence[Tensor] | Tensor) -> Tensor:
    """The static input scale of a fused layer with symmetric activations: the largest of its shards'.

    Returns:
        float32 [1].

    Raises:
        ArgumentError: there is none, or one is not positive and finite.
    """
    flat = _flat(scales).float()
    check_scales("input scales", flat)
    return flat.amax().reshape(1)


def merge_input_ranges(scales: Sequence[Tensor] | Tensor, azps: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """The static input scale and zero point of a fused int8 layer: those of the union of its shards' ranges.

    A shard represents the real values from ``scale * (-128 - azp)`` to ``scale * (127 - azp)``. The union's scale is
    its width over 255, and ``azp = round(-128 - low / scale)``. vLLM truncates where this rounds, so that its zero
    point can be one step off.

    Args:
        scales: positive, one value for each shard.
        azps: zero points, within -128..127, one for each shard.

    Returns:
        float32 [1], and int32 [1].

    Raises:
        ArgumentError: numbers do not match, a scale is not positive and finite, or a zero point is no int8.
    """
    # In float64: a shard merged with itself must come back as it was.
    scale, azp = _flat(scales).double(), _flat(azps).double()
    if scale.numel() != azp.numel():
        raise ArgumentError(f"there are {scale.numel()} input scales but {azp.numel()} zero points; pass one each")
    check_scales("input scales", scale)
    check_azps(azp)
    high = (scale * (INT8_HIGH - azp)).amax()
    low = (scale * (INT8_LOW - azp)).amin()
    merged = (high - low) / (INT8_HIGH - INT8_LOW)
    zero = (INT8_LOW - low / merged).round().clamp(INT8_LOW, INT8_HIGH)
    return merged.float().reshape(1), zero.to(torch.int32).reshape(1)


def pack(
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    zero_points: bool = False,
    azp: Tensor | None = None,
) -> PackedWeight:
    """Lay a quantised weight out for kernels, once: padded, and with what zero points need.

    Args:
        weight: int8 or float8_e4m3fn [N, K].
        scale: float32, one value, or one for each of N channels, of any shape.
        bias: [N], or None.
        zero_points: whether activations have zero points, which int8 ones may: `PackedWeight.azp_adj` then holds the
            column sums.
        azp: with ``zero_points``, the one zero point of all activations, one integer, which is then multiplied into
            ``azp_adj``; None if each token has its own.

    Raises:
        ArgumentError: an argument does not fit the others, or K is beyond what int32 sums can hold.
    """
    operand = operand_of("weight", weight.dtype)
    if weight.dim() != 2 or 0 in weight.shape:
        raise ArgumentError(f"weight has shape {tuple(weight.shape)}; it must be [N, K] with N and K at least 1")
    n, k = weight.shape
    check_extents(n, k, weight.dtype, zero_points)
    if scale.dtype is not torch.float32 or scale.numel() not in (1, n):
        raise ArgumentError(
            f"scale has dtype {scale.dtype} and {scale.numel()} values; it must be float32, and have 1, or N={n}; "
            "expand those of shards with expand_scales"
        )
    if bias is not None and tuple(bias.shape) != (n,):
        raise ArgumentError(f"bias has shape {tuple(bias.shape)}; it must be (N,) = ({n},)")
    if zero_points and operand is not DType.INT8:
        raise ArgumentError("zero_points is True, but weight is float8_e4m3fn; only int8 has zero points")
    if azp is not None and not zero_points:
        raise ArgumentError("azp is given without zero_points=True; pass both or neither")
    wide_n, wide_k = padded(n, k)
    grow = wide_n - n
    adjustment = column_sums(weight) if zero_points else None
    if adjustment is not None and azp is not None:
        check_azps(azp.flatten())
        adjustment = adjustment * azp.flatten().to(torch.int32)
    if (wide_n, wide_k) != (n, k):
        # Padding knows no float8; its bytes are padded like any, and byte 0 is its 0.
        whole = torch.zeros((wide_n, wide_k), dtype=torch.int8, device=weight.device)
        whole[:n, :k] = weight.view(torch.int8)
        weight = whole.view(weight.dtype)
    flat = scale.detach().flatten()
    return PackedWeight(
        weight=weight.detach().contiguous(),
        scale=_grown(flat, grow if flat.numel() > 1 else 0, 1.0),
        azp_adj=None if adjustment is None else _grown(adjustment, grow, 0),
        bias=None if bias is None else _grown(bias.detach(), grow, 0.0),
        n=n,
        k=k,
    )


def _flat(values: Sequence[Tensor] | Tensor) -> Tensor:
    if isinstance(values, Tensor):
        return values.flatten()
    return torch.cat([value.flatten() for value in values]) if values else torch.empty(0)


def _grown(vector: Tensor, more: int, value: float) -> Tensor:
    return torch.cat([vector, vector.new_full((more,), value)]) if more else vector.clone()
