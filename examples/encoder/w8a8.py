"""The encoder's linear layers on cutlass_w8a8: quantised weights, and the three ways to run them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import cutlass_w8a8

from .model import EncoderConfig
from .quantize import column_sums, fp8_e4m3, int8_symmetric, int8_zero_point

# The kernels add the bias to the fp32 value before rounding it to the output type, and take the bias in that
# type. fp16 rather than bf16: after layer normalisation nothing here comes near fp16's limit of 65504, so its
# three extra bits of precision are free. fp32 would be exact, but doubles what the kernel writes.
OUT_DTYPE = torch.float16


@dataclass(frozen=True)
class Variant:
    """One way to quantise the linear layers.

    Attributes:
        name: as printed.
        operand: dtype of both operands.
        zero_point: whether activations have a zero point per token.
    """

    name: str
    operand: torch.dtype
    zero_point: bool = False


VARIANTS = (
    Variant("int8", torch.int8),
    Variant("int8-azp", torch.int8, zero_point=True),
    Variant("fp8", torch.float8_e4m3fn),
)


@dataclass(frozen=True)
class Activations:
    """Quantised input of a linear layer: the values [M, K], scales fp32 [M, 1], zero points int32 [M] or None."""

    values: Tensor
    scale: Tensor
    azp: Tensor | None = None


@dataclass(frozen=True)
class QuantizedLinear:
    """Weights of one linear layer in both types.

    Attributes:
        int8: [N, K].
        int8_scale: fp32 [N, 1].
        azp_adj: int32 [N], sums of ``int8`` over K.
        fp8: float8_e4m3fn [N, K].
        fp8_scale: fp32 [N, 1].
        bias: [N], in `OUT_DTYPE`.
    """

    int8: Tensor
    int8_scale: Tensor
    azp_adj: Tensor
    fp8: Tensor
    fp8_scale: Tensor
    bias: Tensor

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> QuantizedLinear:
        """Quantise an fp32 layer with ``weight`` [N, K] and ``bias`` [N]."""
        int8, int8_scale = int8_symmetric(weight)
        fp8, fp8_scale = fp8_e4m3(weight)
        return cls(int8, int8_scale, column_sums(int8), fp8, fp8_scale, bias.to(OUT_DTYPE))

    def to(self, device: torch.device) -> QuantizedLinear:
        """The same layer on ``device``."""
        return QuantizedLinear(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def weight(self, variant: Variant) -> tuple[Tensor, Tensor]:
        """B as the kernels want it, [K, N] with unit stride along K, and its scales [N, 1]."""
        if variant.operand is torch.int8:
            return self.int8.t(), self.int8_scale
        return self.fp8.t(), self.fp8_scale


def quantize_activations(x: Tensor, variant: Variant) -> Activations:
    """Quantise a layer's fp32 input [M, K], each token by itself."""
    if variant.zero_point:
        return Activations(*int8_zero_point(x))
    return Activations(*(int8_symmetric if variant.operand is torch.int8 else fp8_e4m3)(x))


@dataclass(frozen=True)
class QuantizedLinears:
    """All linear layers under one variant; a `model.LinearFunction`."""

    variant: Variant
    layers: dict[str, QuantizedLinear]

    def __call__(self, name: str, x: Tensor) -> Tensor:
        layer, a = self.layers[name], quantize_activations(x, self.variant)
        b, scale_b = layer.weight(self.variant)
        if a.azp is not None:
            return cutlass_w8a8.scaled_mm_azp(
                a.values, b, a.scale, scale_b, OUT_DTYPE, layer.azp_adj, a.azp, layer.bias
            )
        return cutlass_w8a8.scaled_mm(a.values, b, a.scale, scale_b, OUT_DTYPE, layer.bias)


def quantize(config: EncoderConfig, linears: dict[str, Tensor]) -> dict[str, QuantizedLinear]:
    """Quantise every linear layer of the fp32 ``linears``."""
    return {
        name: QuantizedLinear.of(linears[f"{name}.weight"], linears[f"{name}.bias"]) for name in config.linear_names
    }
