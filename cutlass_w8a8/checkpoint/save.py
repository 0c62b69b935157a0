"""Saving a quantised model in the compressed-tensors format."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cutlass_w8a8.checkpoint.read import CONFIG, ONE_FILE
from cutlass_w8a8.checkpoint.schemes import METHOD, describe, library
from cutlass_w8a8.errors import CheckpointError
from cutlass_w8a8.nn import W8A8Linear

Tensor = torch.Tensor


def save(model: torch.nn.Module, folder: Path | str, *, config: Mapping[str, Any] | None = None) -> None:
    """Write a model with `W8A8Linear` layers as config.json and one safetensors file.

    The folder appears whole or not at all.

    Args:
        model: at least one of its layers a W8A8Linear, none of its tensors on the meta device.
        folder: to be made; it must not exist, or be empty.
        config: contents for config.json, such as the float model's; quantization_config is added.

    Raises:
        CheckpointError: there is nothing to save, or the folder cannot be written.
    """
    folder = Path(folder)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, W8A8Linear)}
    if not layers:
        raise CheckpointError("the model has no W8A8Linear; quantise it with cutlass_w8a8.nn.quantize_ first")
    state = model.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        raise CheckpointError("the model has tensors on the meta device, which have no values; load them first")
    floats = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    quantization = {
        **describe({name: layer.config for name, layer in layers.items()}, floats),
        "quant_method": METHOD,
        "version": library().__version__,
    }
    own = tuple(f"{name}." for name in layers)
    tensors = {name: tensor for name, tensor in state.items() if not name.startswith(own)}
    for name, layer in layers.items():
        tensors |= {f"{name}.{part}": tensor for part, tensor in _stored(layer).items()}
    whole = json.dumps({**(config or {}), "quantization_config": quantization}, indent=2, sort_keys=True) + "\n"
    _write(folder, tensors, whole)


def _stored(layer: W8A8Linear) -> dict[str, Tensor]:
    """A layer's tensors under the format's names, without padding."""
    n, k = layer.out_features, layer.in_features
    scale = layer.weight_scale[:n].reshape(-1, 1) if layer.config.weight == "channel" else layer.weight_scale
    stored = {"weight": layer.weight.view(torch.int8)[:n, :k].view(layer.weight.dtype), "weight_scale": scale}
    if layer.bias is not None:
        stored["bias"] = layer.bias[:n]
    if layer.input_scale is not None:
        stored["input_scale"] = layer.input_scale
    if layer.input_azp is not None:
        stored["input_zero_point"] = layer.input_azp.to(torch.int8)
    return stored


def _write(folder: Path, tensors: dict[str, Tensor], config: str) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise CheckpointError(f"{error}; pip install 'cutlass-w8a8[checkpoints]'") from error
    # Tied tensors are written once each: the format knows no shared memory.
    owned = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
            made = Path(scratch) / folder.name
            made.mkdir()
            (made / CONFIG).write_text(config, encoding="utf-8")
            save_file(owned, made / ONE_FILE, {"format": "pt"})
            for name in (CONFIG, ONE_FILE):
                with (made / name).open("rb") as file:
                    os.fsync(file.fileno())
            # Fails if there is a folder with anything in it.
            made.rename(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error}; choose a folder that does not exist yet") from error
