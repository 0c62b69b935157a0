"""What vLLM's linear kernels for W8A8 do, by our kernels. The classes here lack vLLM's base classes: see `plugin`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cutlass_w8a8.support import is_supported
from cutlass_w8a8.vllm.custom_ops import FP8, multiply
from cutlass_w8a8.vllm.operands import missing, pad_columns, pad_rows, pad_weight

Tensor = torch.Tensor
Answer = tuple[bool, "str | None"]


class _Kernel:
    """What both have in common; mixed into a subclass of vLLM's.

    Attributes:
        operand_dtype: of activations and weights.
        batch_invariant: whether vLLM was asked for rows that do not depend on their batch.
        logical_output_size: N of the layer where its weight was padded.
        capability_of_device: of the current one, (major, minor), or None if unknown.
    """

    operand_dtype: torch.dtype
    batch_invariant = False
    logical_output_size: int | None = None
    capability_of_device: Callable[[], tuple[int, int] | None] = staticmethod(lambda: None)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Whether there are kernels for a device (that at hand if None), and if not, why."""
        theirs: Answer = super().is_supported(compute_capability)  # type: ignore[misc]
        if not theirs[0]:
            return theirs
        capability = cls.capability_of_device() if compute_capability is None else divmod(compute_capability, 10)
        if capability is None:
            return False, "needs a CUDA device whose compute capability is known"
        ours = is_supported((capability[0], capability[1]), cls.operand_dtype)
        return ours.supported, ours.reason or None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """What vLLM's class does, then padding: once here instead of at each call."""
        super().process_weights_after_loading(layer)  # type: ignore[misc]
        self._pad(layer)

    def _pad(self, layer: torch.nn.Module) -> None:
        names: dict[str, Any] = dict(zip(("weight", "scale"), self.layer_param_names, strict=False))  # type: ignore[attr-defined]
        weight = getattr(layer, names["weight"])
        k, n = weight.shape
        more_k, more_n = missing(k, n)
        # vLLM's batch-invariant path multiplies by fp8 weights itself, as they are.
        if not (more_k or more_n) or self.batch_invariant:
            return
        self.logical_output_size = n
        _replace(layer, names["weight"], pad_weight(weight, more_k, more_n))
        scale = getattr(layer, names["scale"])
        if scale.numel() > 1:
            _replace(layer, names["scale"], pad_columns(scale.reshape(-1), n, more_n).view(-1, 1))

    def _multiply(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        out_dtype: torch.dtype,
        azp_adj: Tensor | None = None,
        azp: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The product, [..., N] of the layer's own N."""
        k, n = b.shape
        logical = self.logical_output_size or n
        if bias is not None:
            bias = pad_columns(bias.reshape(-1), logical, n - logical)
        result = multiply(
            pad_rows(a, k - a.shape[-1]),
            b,
            scale_a,
            scale_b,
            out_dtype,
            azp_adj,
            azp,
            bias,
            batch_invariant=self.batch_invariant or None,
        )
        return result if n == logical else result[..., :logical].contiguous()


class Fp8Kernel(_Kernel):
    """fp8 weights and activations; vLLM quantises these."""

    operand_dtype = FP8

    def apply_scaled_mm(
        self,
        *,
        A: Tensor,  # noqa: N803  (vLLM's names)
        B: Tensor,  # noqa: N803
        out_dtype: torch.dtype,
        As: Tensor,  # noqa: N803
        Bs: Tensor,  # noqa: N803
        bias: Tensor | None,
        output_shape: list[int],
    ) -> Tensor:
        """A [M, K] times B [K, N], scaled; B may be padded to more than A has."""
        result = self._multiply(A, B, As, Bs, out_dtype, bias=bias)
        return result.view(*output_shape[:-1], result.shape[-1])


class Int8Kernel(_Kernel):
    """int8 weights and activations, with or without zero points.

    Attributes:
        quantize: vLLM's ``scaled_int8_quant``.
    """

    operand_dtype = torch.int8
    quantize: Callable[..., tuple[Tensor, Tensor, Tensor | None]]

    def _pad(self, layer: torch.nn.Module) -> None:
        super()._pad(layer)
        name = self.layer_param_names[4]  # type: ignore[attr-defined]
        azp_adj, n = getattr(layer, name, None), self.logical_output_size
        if azp_adj is not None and n is not None:
            more = getattr(layer, self.layer_param_names[0]).shape[1] - n  # type: ignore[attr-defined]
            _replace(layer, name, pad_columns(azp_adj.reshape(-1), n, more))

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] of a floating type, quantised, times the layer's weight."""
        weight, weight_scale, scale, zero_point, azp_adj = self._get_layer_params(layer)  # type: ignore[attr-defined]
        values, scales, zero_points = self.quantize(x.contiguous(), scale, zero_point, symmetric=azp_adj is None)
        # A static zero point is one of the whole tensor, and in azp_adj already.
        azp = zero_points if zero_point is None else None
        return self._multiply(values, weight, scales, weight_scale, x.dtype, azp_adj, azp, bias)


def _replace(layer: torch.nn.Module, name: str, value: Tensor) -> None:
    setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
