"""Checkpoints as others write them: by the lifecycle and the compressor of compressed-tensors itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def write(
    model: Any,
    folder: Path,
    *,
    dtype: torch.dtype,
    weight: str = "channel",
    dynamic: bool = True,
    granularity: str = "token",
    symmetric: bool = True,
    ignore: Sequence[str] = (),
    run: Callable[[Any], object] = lambda model: None,
    observe: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    max_shard_size: str = "5GB",
    **arguments: Any,
) -> Any:
    """Quantise a transformers model and save it; it is left fake-quantised, as it was before it was compressed.

    Args:
        model: of transformers, changed.
        folder: to be made.
        dtype, weight, dynamic, granularity, symmetric: as in `W8A8Config`.
        ignore: layers left in float.
        run: runs the model on calibration data.
        observe: the least and largest values of a weight to cover, [N, 1] each; the default is all of them.
        max_shard_size: of a file.
        arguments: further ones of the weights' QuantizationArgs.

    Returns:
        A copy of the model before it was compressed, whose forward fakes the quantisation.
    """
    import copy

    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
        disable_quantization,
        enable_quantization,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    kind = {"num_bits": 8, "type": "int" if dtype is torch.int8 else "float"}
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**{**kind, "strategy": weight, "symmetric": True, **arguments}),
        input_activations=QuantizationArgs(**kind, strategy=granularity, dynamic=dynamic, symmetric=symmetric),
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=list(ignore)))
    layers = [module for module in model.modules() if hasattr(module, "quantization_scheme")]
    reach: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def watch(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        low, high = inputs[0].amin(), inputs[0].amax()
        before = reach.get(module, (low, high))
        reach[module] = torch.minimum(low, before[0]), torch.maximum(high, before[1])

    handles = [module.register_forward_pre_hook(watch) for module in layers]
    model.apply(disable_quantization)
    with torch.no_grad():
        run(model)
    model.apply(enable_quantization)
    for handle in handles:
        handle.remove()

    def put(module: Any, base: str, low: torch.Tensor, high: torch.Tensor, args: Any) -> None:
        scale, zero = calculate_qparams(low, high, args)
        getattr(module, f"{base}_scale").data.copy_(scale.view_as(getattr(module, f"{base}_scale")))
        held = getattr(module, f"{base}_zero_point", None)
        if held is not None:
            held.data.copy_(zero.view_as(held))

    for module in layers:
        rows = module.weight.detach() if weight == "channel" else module.weight.detach().view(1, -1)
        low, high = (rows.amin(1, True), rows.amax(1, True)) if observe is None else observe(rows)
        put(module, "weight", low, high, scheme.weights)
        if not dynamic:
            put(module, "input", *(value.view(1) for value in reach[module]), scheme.input_activations)
        module.quantization_status = QuantizationStatus.FROZEN
    faked = copy.deepcopy(model)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    compressor.update_config(str(folder))
    return faked
