"""Quantisation of a model in place."""

from __future__ import annotations

import torch

from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.nn.calibrate import Calibration, Filter, plain_linear
from cutlass_w8a8.nn.config import W8A8Config
from cutlass_w8a8.nn.linear import W8A8Linear


def quantize_(
    model: torch.nn.Module,
    config: W8A8Config,
    filter_fn: Filter | None = None,
    *,
    calibration: Calibration | None = None,
) -> None:
    """Put a `W8A8Linear` in the place of each linear layer of a model.

    Layers that occur at several places are quantised once. Nothing is replaced if any of them cannot be. A model on the
    meta device gets layers without values, for a quantised state to be loaded into.

    Args:
        model: whose modules are replaced.
        config: how to quantise.
        filter_fn: called with a module and its name; which to replace, all of them torch.nn.Linear. The default is all
            that are exactly that; subclasses may be used in other ways than called, as attention's are.
        calibration: what `calibrate` found, for static activations.

    Raises:
        ArgumentError: the model is a linear layer itself, or a layer cannot be replaced; the message names it.
    """
    wanted = plain_linear if filter_fn is None else filter_fn
    if wanted(model, ""):
        raise ArgumentError("the model is a linear layer itself, which has no place to be replaced at; call "
                            "W8A8Linear.from_linear")  # fmt: skip
    places = [
        (parent, child, module, f"{path}.{child}" if path else child)
        for path, parent in model.named_modules()
        for child, module in parent._modules.items()
        if module is not None and wanted(module, f"{path}.{child}" if path else child)
    ]
    made: dict[torch.nn.Module, W8A8Linear] = {}
    for _, _, module, name in places:
        if module not in made:
            made[module] = _quantized(module, name, config, calibration)
    for parent, child, module, _ in places:
        replace(parent, child, made[module])


def replace(parent: torch.nn.Module, child: str, layer: W8A8Linear) -> None:
    """Put a layer in the place of a float one."""
    setattr(parent, child, layer)
    if isinstance(parent, torch.nn.TransformerEncoderLayer):
        # Its fused path reads weights instead of calling layers, unless the activation is none of the two it knows.
        parent.activation_relu_or_gelu = 0


def _quantized(module: torch.nn.Module, name: str, config: W8A8Config, calibration: Calibration | None) -> W8A8Linear:
    if not isinstance(module, torch.nn.Linear):
        raise ArgumentError(f"layer {name!r} is a {type(module).__name__}; filter_fn must choose torch.nn.Linear only")
    if module._forward_hooks or module._forward_pre_hooks:
        raise ArgumentError(f"layer {name!r} has forward hooks, which would be lost; remove them first")
    scale = azp = None
    if not config.dynamic and not module.weight.is_meta:
        if calibration is None:
            raise ArgumentError(
                "config.dynamic is False, so input scales must be known; pass calibration, which `with "
                "calibrate(model) as calibration:` around some runs of the model makes"
            )
        scale, azp = calibration.parameters(name, config)
    try:
        layer = W8A8Linear.from_linear(module, config, input_scale=scale, input_azp=azp)
    except ArgumentError as error:
        raise ArgumentError(f"layer {name!r}: {error}") from error
    return layer.train(module.training)
