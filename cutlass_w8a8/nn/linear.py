"""A linear layer with an 8-bit weight, and activations quantised on the way in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.compiler import is_compiling

from cutlass_w8a8.calls import PLAIN
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.nn import activations
from cutlass_w8a8.nn.activations import Activations
from cutlass_w8a8.nn.config import W8A8Config
from cutlass_w8a8.nn.operands import one_granularity, one_input, out_dtype, rows_of
from cutlass_w8a8.ops import scaled_mm, scaled_mm_azp
from cutlass_w8a8.prepared import PreparedMM, prepare, settle
from cutlass_w8a8.quant_request import scheme_of
from cutlass_w8a8.wanted import LayerCall
from cutlass_w8a8.weight_checks import check_extents, padded
from cutlass_w8a8.weights import pack, quantize_weight

Tensor = torch.Tensor
Self = TypeVar("Self", bound="W8A8Linear")

# What keeps its type whatever the module is converted to.
_FIXED = ("weight", "weight_scale", "azp_adj", "input_scale", "input_azp")


@dataclass(frozen=True)
class _Kept:
    """A prepared call, and what it is valid for: the type of results, and buffers by name with their addresses."""

    mm: PreparedMM
    dtype: torch.dtype
    held: list[tuple[str, Any, int | None]]


class W8A8Linear(torch.nn.Module):
    """``y = x @ weight.T + bias`` with 8-bit operands: one kernel that quantises, one that multiplies.

    Constructed, it awaits its values: its scales are NaN, and so is all it computes, until a state is loaded.
    `from_linear` and `from_quantized` make one with values.

    All that it holds are buffers. ``weight`` is [N', K'], N' the next multiple of 8 and K' of 16, zeros beyond N and K;
    ``weight_scale`` float32 [N'] or [1]; ``bias`` [N'] in the result's type. ``azp_adj``, ``input_scale`` and
    ``input_azp`` are there as the configuration needs them. ``.to()``, ``.half()`` and the like change the device, the
    type of results and that of the bias, never that of the others.

    Attributes:
        in_features, out_features: K and N.
        config: how weight and activations are quantised.
        dtype: of results: torch.bfloat16, torch.float16 or torch.float32. Inputs may be any of these.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    azp_adj: Tensor | None
    input_scale: Tensor | None
    input_azp: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        config: W8A8Config | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer without values.

        Args:
            in_features, out_features: K and N, any positive numbers.
            bias: whether there is one.
            config: how to quantise; the default is int8, dynamic per token, symmetric.
            dtype: of results; the default is torch's.
            device: where, possibly ``"meta"``.

        Raises:
            ArgumentError: an extent or the type is not served.
        """
        super().__init__()
        config = W8A8Config() if config is None else config
        self.in_features, self.out_features, self.config = in_features, out_features, config
        self.dtype = out_dtype(torch.get_default_dtype() if dtype is None else dtype)
        check_extents(out_features, in_features, config.dtype, not config.symmetric)
        n, k = padded(out_features, in_features)
        channels = n if config.weight == "channel" and out_features > 1 else 1

        def full(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        nan = float("nan")
        self.register_buffer("weight", full((n, k), 0, torch.int8).view(config.dtype))
        self.register_buffer("weight_scale", full((channels,), nan, torch.float32))
        self.register_buffer("bias", full((n,), 0, self.dtype) if bias else None)
        self.register_buffer("azp_adj", None if config.symmetric else full((n,), 0, torch.int32))
        self.register_buffer("input_scale", None if config.dynamic else full((1,), nan, torch.float32))
        self.register_buffer("input_azp", full((1,), 0, torch.int32) if config.folds else None)
        self._prepared: _Kept | None = None

    @classmethod
    def from_linear(
        cls: type[Self],
        linear: torch.nn.Linear,
        config: W8A8Config | None = None,
        *,
        input_scale: Tensor | None = None,
        input_azp: Tensor | None = None,
    ) -> Self:
        """Quantise a float layer. On the meta device the result has no values either.

        Args:
            linear: with a bfloat16, float16 or float32 weight.
            config: how to quantise.
            input_scale, input_azp: of static activations: positive float32, and a zero point within int8, one value
                each. `calibrate` finds them.

        Raises:
            ArgumentError: the weight cannot be quantised, or these are missing or superfluous.
        """
        config = W8A8Config() if config is None else config
        weight = linear.weight
        if weight.is_meta:
            k, n, biased = linear.in_features, linear.out_features, linear.bias is not None
            return cls(k, n, biased, config=config, dtype=weight.dtype, device=weight.device)
        values, scale = quantize_weight(weight, config.dtype, config.weight)
        bias, dtype = linear.bias, weight.dtype
        return cls.from_quantized(
            values, scale, bias, config=config, input_scale=input_scale, input_azp=input_azp, dtype=dtype
        )

    @classmethod
    def from_quantized(
        cls: type[Self],
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        config: W8A8Config,
        input_scale: Tensor | None = None,
        input_azp: Tensor | None = None,
        logical_widths: Sequence[int] = (),
        dtype: torch.dtype | None = None,
    ) -> Self:
        """A layer of a quantised weight, which may be fused of several shards.

        Args:
            weight: [N, K] of ``config.dtype``.
            weight_scale: one value, one for each of N channels, or one for each shard, of any shape. Those of shards
                are expanded to channels, or, if ``config.weight`` is ``"tensor"``, the shards requantised to the
                largest.
            bias: [N], or None.
            config: how activations are quantised, and what the layer's scales shall be.
            input_scale, input_azp: of static activations, one value, or one for each shard, which are merged.
            logical_widths: output channels of each shard, if there are several.
            dtype: of results; the default is the bias's type, else torch's default.

        Raises:
            ArgumentError: an argument does not fit the others.
        """
        if weight.dtype is not config.dtype:
            raise ArgumentError(f"weight has dtype {weight.dtype} but config.dtype is {config.dtype}; make them alike")
        weight, scale = one_granularity(weight, weight_scale.float().flatten(), config, logical_widths)
        input_scale, input_azp = one_input(input_scale, input_azp, config)
        if dtype is None:
            dtype = torch.get_default_dtype() if bias is None else bias.dtype
        packed = pack(weight, scale, bias, zero_points=not config.symmetric, azp=input_azp)
        # On the meta device until the values below take their places.
        layer = cls(packed.k, packed.n, bias is not None, config=config, dtype=dtype, device="meta")
        layer.weight, layer.weight_scale, layer.azp_adj = packed.weight, packed.scale, packed.azp_adj
        layer.bias = None if packed.bias is None else packed.bias.to(dtype)
        layer.input_scale = None if input_scale is None else input_scale.to(weight.device)
        layer.input_azp = None if input_azp is None else input_azp.to(weight.device)
        layer._renew()
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``.

        Args:
            x: [..., K] of torch.bfloat16, torch.float16 or torch.float32. Copied first if it is not contiguous along K.

        Returns:
            [..., N] of `dtype`; a view whose rows are padded, where N is no multiple of 8.

        Raises:
            ArgumentError: x does not fit, or asks for a gradient.
            W8A8Error: otherwise as `scaled_mm` says.
        """
        y = self._multiply(self._quantize(rows_of(x, self.in_features)))
        if y.shape[1] != self.out_features:
            y = y[:, : self.out_features]
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        c = self.config
        kind = f"{'dynamic' if c.dynamic else 'static'} per {c.granularity}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{str(c.dtype).removeprefix('torch.')} per {c.weight}, activations {kind}, "
            f"{'symmetric' if c.symmetric else 'with zero points'}, to {str(self.dtype).removeprefix('torch.')}"
        )

    def _quantize(self, rows: Tensor) -> Activations:
        c = self.config
        return activations.quantize(
            rows,
            c.dtype,
            granularity=str(c.granularity),
            scale=self.input_scale,
            azp=self.input_azp,
            symmetric=c.symmetric,
            width=self.weight.shape[1],
            overlap="none" if c.overlap == "none" else "launch",
        )

    def _multiply(self, a: Activations) -> Tensor:
        """[M, N'] of the product."""
        if not is_compiling():
            return self._prepared_mm()(a.values, a.scale, a.azp)
        b, overlap = self.weight.t(), self.config.overlap
        if self.azp_adj is None:
            return scaled_mm(a.values, b, a.scale, self.weight_scale, self.dtype, self.bias, overlap=overlap)
        return scaled_mm_azp(
            a.values, b, a.scale, self.weight_scale, self.dtype, self.azp_adj, a.azp, self.bias, overlap=overlap
        )

    def prepared_mms(self) -> list[LayerCall]:
        """The calls that `cutlass_w8a8.warmup` gets kernels for; inputs are taken to be of `dtype`."""
        c = self.config
        scheme = scheme_of(str(c.granularity) if c.dynamic else "static", azp=not c.symmetric, dtype=c.dtype)
        return [LayerCall(self._prepared_mm(), scheme, self.dtype)]

    def _prepared_mm(self) -> PreparedMM:
        """The prepared call of the tensors held now; whoever replaces one, or its memory, gets another."""
        buffers: dict[str, Any] = self._buffers
        kept = self._prepared
        if kept is not None and kept.dtype is self.dtype:
            for name, tensor, address in kept.held:
                if buffers[name] is not tensor or (address is not None and tensor.data_ptr() != address):
                    break
            else:
                return kept.mm
        b, overlap = self.weight.t(), self.config.overlap
        mm = prepare(b, self.weight_scale, self.dtype, self.bias, azp_adj=self.azp_adj, overlap=overlap)
        held = [(name, buffers[name]) for name in ("weight", "weight_scale", "bias", "azp_adj")]
        self._prepared = _Kept(
            mm, self.dtype, [(name, each, each.data_ptr() if type(each) in PLAIN else None) for name, each in held]
        )
        return mm

    def _renew(self) -> None:
        """The weight is another one, or was written."""
        self._prepared = None
        # Traced calls prepare nothing that would wait.
        settle(self.weight, self.config.overlap)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # What a conversion would make of a result.
        dtype = out_dtype(fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype)
        fixed = {id(self._buffers[name]) for name in _FIXED}

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype is tensor.dtype or id(tensor) not in fixed else tensor.to(moved.device)

        result = super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        self.dtype = dtype
        self._renew()
        return result

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # torch would convert silently.
        wrong = [
            f"{prefix}{name} is {state_dict[prefix + name].dtype}, but this W8A8Linear holds {held.dtype}; "
            + ("quantise the model that state is of with quantize_, or load it before" if name == "weight" else "")
            for name in _FIXED
            if (held := self._buffers[name]) is not None
            and isinstance(state_dict.get(prefix + name), Tensor)
            and state_dict[prefix + name].dtype is not held.dtype
        ]
        if wrong:
            error_msgs.extend(message.removesuffix("; ") for message in wrong)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._renew()

    def __getstate__(self) -> dict[str, Any]:
        # The prepared call belongs to these tensors and not to their copies. The weight goes as bytes: pickle itself,
        # other than torch.save, loses tensors of float8.
        buffers = {**self._buffers, "weight": self.weight.view(torch.int8)}
        return {**self.__dict__, "_buffers": buffers, "_prepared": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight = self.weight.view(self.config.dtype)
