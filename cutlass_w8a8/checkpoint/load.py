"""Loading a checkpoint into a model of the float architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from cutlass_w8a8.checkpoint.read import QUANTISED, Checkpoint
from cutlass_w8a8.errors import CheckpointError
from cutlass_w8a8.nn import W8A8Linear
from cutlass_w8a8.nn.convert import replace
from cutlass_w8a8.problem import CONSTANT_OVERLAP

Tensor = torch.Tensor


def load_(
    model: torch.nn.Module,
    folder: Path | str,
    *,
    fused: Mapping[str, Sequence[str]] | None = None,
    rename: Callable[[str], str] | None = None,
    overlap: str = CONSTANT_OVERLAP,
) -> None:
    """Load a quantised checkpoint into a model, its quantised layers as `W8A8Linear`.

    Strict: every tensor of the checkpoint has its place in the model, and every parameter and persistent buffer its
    tensor. The model is changed only once everything has been found and fits.

    Args:
        model: of the float architecture, with torch.nn.Linear where the checkpoint has layers; on any device. On the
            meta device its tensors are put in place, else overwritten. Each linear layer's weight says the type of its
            results.
        folder: with config.json and the safetensors files.
        fused: last parts of the names of the model's layers that are several in the checkpoint, with theirs, in order:
            ``{"qkv": ("q_proj", "k_proj", "v_proj")}``. Not for layers left in float.
        rename: what a layer's or a tensor's name in the model is in the checkpoint; None is the same.
        overlap: as in `W8A8Config`.

    Raises:
        CheckpointError: the checkpoint cannot be read, or does not fit the model; the message lists how.
        UnsupportedError: it is quantised in a way that is not served.
    """
    theirs = (lambda name: name) if rename is None else rename
    with Checkpoint(folder) as checkpoint:
        layers, used = _layers(model, checkpoint, dict(fused or {}), theirs, overlap)
        replaced = tuple(f"{name}." for name in layers)
        before = model.state_dict()
        wanted = {name: held for name, held in before.items() if not name.startswith(replaced)}
        _check(model, checkpoint, {name: theirs(name) for name in wanted}, wanted, used)
        state = {
            name: checkpoint.tensor(theirs(name)).to(held.dtype)
            for name, held in wanted.items()
            if theirs(name) in checkpoint.names
        }
    for name, layer in layers.items():
        place, _, last = name.rpartition(".")
        device = before[f"{name}.weight"].device
        replace(model.get_submodule(place), last, layer if device.type == "meta" else layer.to(device))
    for on_meta in (True, False):
        part = {name: tensor for name, tensor in state.items() if wanted[name].is_meta is on_meta}
        model.load_state_dict(part, strict=False, assign=on_meta)


def _layers(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    fused: dict[str, Sequence[str]],
    theirs: Callable[[str], str],
    overlap: str,
) -> tuple[dict[str, W8A8Linear], set[str]]:
    """The model's layers that are quantised, and the names of the tensors they are made of."""
    layers: dict[str, W8A8Linear] = {}
    used: set[str] = set()
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        stored = _stored_names(theirs(name), fused)
        if not all(f"{each}.weight" in checkpoint.names for each in stored):
            continue  # told with all else that is missing
        quantised = [checkpoint.quantised(each, module) for each in stored]
        if not any(quantised):
            continue
        if not all(quantised):
            raise CheckpointError(f"of the layers {stored}, which are one in the model, only some are quantised")
        if type(module) is not torch.nn.Linear:
            raise CheckpointError(
                f"layer {name!r} is quantised, but in the model a {type(module).__name__}, which may be used in other "
                "ways than called; give the model a torch.nn.Linear there"
            )
        layer = checkpoint.linear(stored, module=module, dtype=module.weight.dtype, overlap=overlap)
        _check_layer(name, layer, module)
        layers[name] = layer.train(module.training)
        used |= {f"{each}.{part}" for each in stored for part in ("weight", "bias", *QUANTISED)}
    return layers, used


def _stored_names(name: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    place, dot, last = name.rpartition(".")
    return [f"{place}{dot}{each}" for each in fused[last]] if last in fused else [name]


def _check_layer(name: str, layer: W8A8Linear, module: torch.nn.Linear) -> None:
    given = layer.in_features, layer.out_features, layer.bias is not None
    wanted = module.in_features, module.out_features, module.bias is not None
    if given != wanted:
        raise CheckpointError(
            f"layer {name!r} is stored with (in_features, out_features, bias) = {given}, but the model has {wanted}"
        )


def _check(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    stored: Mapping[str, str],
    wanted: Mapping[str, Tensor],
    used: set[str],
) -> None:
    """Refuse a checkpoint with tensors too few, too many, or of other shapes."""
    # Of tied parameters one is enough.
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    tied = {name: names for names in names_of.values() for name in names}
    missing = [
        name for name in wanted if not any(stored.get(other) in checkpoint.names for other in tied.get(name, [name]))
    ]
    surplus = sorted(checkpoint.names - used - set(stored.values()))
    shapes = [
        f"{name} {tuple(held.shape)} (stored {tuple(shape)})"
        for name, held in wanted.items()
        if stored[name] in checkpoint.names and (shape := checkpoint.tensor(stored[name]).shape) != held.shape
    ]
    faults = [
        f"{len(found)} {what}: {', '.join(found[:8])}{', ...' if len(found) > 8 else ''}"
        for what, found in (
            ("of the model's tensors are not stored", missing),
            ("stored tensors have no place in the model", surplus),
            ("are of another shape", shapes),
        )
        if found
    ]
    if faults:
        raise CheckpointError(f"{checkpoint.folder} does not fit the model: {'; '.join(faults)}")
