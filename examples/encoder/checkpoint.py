"""The quantised encoder as one file: quantise on one machine, run on another."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cutlass_w8a8.nn import W8A8Config, W8A8Linear

from .compressed import ModuleLinears
from .model import DemoError, Encoder, EncoderConfig
from .w8a8 import OUT_DTYPE, QuantizedLinear

_FORMAT = "cutlass_w8a8 encoder 2"

Layers = dict[str, QuantizedLinear] | ModuleLinears
"""Linear layers: by name, in all types, or as a folder in the compressed-tensors format had them."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds.

    Attributes:
        encoder: embeddings (of the words in ``sentences`` only) and normalisation parameters.
        layers: the linear layers.
        sentences: what ``reference`` was computed from.
        reference: fp32 [sentences, hidden], the unquantised model's embeddings.
    """

    encoder: Encoder
    layers: Layers
    sentences: list[str]
    reference: Tensor


def used_words(encoder: Encoder, sentences: Sequence[str]) -> Tensor:
    """The sorted token ids that occur in ``sentences``, padding included."""
    (batch,) = encoder.batches(sentences, len(sentences))
    return batch.ids.flatten().bincount().nonzero().squeeze(1)


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write ``checkpoint`` as one safetensors file, the tokenizer and the sentences in its metadata.

    Embeddings are stored only of words that occur in the sentences: the whole table would be larger than all quantised
    layers together. An existing file is replaced in one step.

    Raises:
        DemoError: the folder cannot be written to.
    """
    encoder = checkpoint.encoder
    tensors = dict(encoder.tensors)
    if "embeddings.word_ids" not in tensors:
        words = used_words(encoder, checkpoint.sentences)
        tensors["embeddings.word"] = tensors["embeddings.word"][words]
        tensors["embeddings.word_ids"] = words.int()
    modules = {}
    if isinstance(checkpoint.layers, ModuleLinears):
        for name, module in checkpoint.layers.layers.items():
            tensors |= {f"{name}.{part}": tensor for part, tensor in module.state_dict().items()}
            modules[name] = _describe(module)
    else:
        for name, layer in checkpoint.layers.items():
            tensors |= {f"{name}.{field}": tensor for field, tensor in vars(layer).items()}
    tensors["reference"] = checkpoint.reference
    metadata = {
        "format": _FORMAT,
        "config": encoder.config.to_json(),
        "sentences": json.dumps(checkpoint.sentences),
        "tokenizer": encoder.tokenizer,
        "modules": json.dumps(modules),
    }
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            whole = Path(folder) / path.name
            save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, whole, metadata)
            whole.replace(path)
    except OSError as error:
        raise DemoError(f"cannot write the checkpoint {path}: {error}; choose another --output") from error


def load(path: Path) -> Checkpoint:
    """Read what `save` wrote.

    Raises:
        DemoError: the file is missing or is no checkpoint of this demo.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not iterable itself)
    except Exception as error:  # safetensors raises its own error type, OSError or ValueError
        raise DemoError(f"cannot read the checkpoint {path}: {error}; write one with `export`") from error
    if metadata.get("format") != _FORMAT:
        raise DemoError(
            f"{path} is no checkpoint of this demo (format {metadata.get('format')!r}, expected {_FORMAT!r}); "
            "write one with `export`"
        )
    config = EncoderConfig(**json.loads(metadata["config"]))
    own = {
        name: {key.removeprefix(f"{name}."): tensors.pop(key) for key in list(tensors) if key.startswith(f"{name}.")}
        for name in config.linear_names
    }
    modules = json.loads(metadata["modules"])
    layers: Layers
    if modules:
        layers = ModuleLinears({name: _module(modules[name], parts) for name, parts in own.items()})
    else:
        layers = {name: QuantizedLinear(**parts) for name, parts in own.items()}
    reference = tensors.pop("reference")
    encoder = Encoder(config, metadata["tokenizer"], tensors)
    return Checkpoint(encoder, layers, json.loads(metadata["sentences"]), reference)


def _describe(module: torch.nn.Module) -> dict[str, Any]:
    """What `_module` needs to know of a layer besides its tensors, for JSON."""
    extents = {"in_features": module.in_features, "out_features": module.out_features}
    if not isinstance(module, W8A8Linear):
        return extents
    return {**extents, "config": {**asdict(module.config), "dtype": str(module.config.dtype).removeprefix("torch.")}}


def _module(described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> torch.nn.Module:
    """The layer with these tensors."""
    k, n, config = described["in_features"], described["out_features"], described.get("config")
    layer: torch.nn.Module = torch.nn.Linear(k, n)
    if config is not None:
        config = W8A8Config(**{**config, "dtype": getattr(torch, config["dtype"])})
        layer = W8A8Linear(k, n, config=config, dtype=OUT_DTYPE)
    layer.load_state_dict(tensors)
    return layer.requires_grad_(False)
