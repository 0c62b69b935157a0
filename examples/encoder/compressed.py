"""The encoder from a folder in the compressed-tensors format, as llm-compressor writes it of a BERT."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cutlass_w8a8.checkpoint import Checkpoint
from cutlass_w8a8.nn import W8A8Config, W8A8Linear

from .model import LINEAR_SHARDS, DemoError, Encoder, encoder_tensors
from .w8a8 import OUT_DTYPE


@dataclass(frozen=True)
class ModuleLinears:
    """Linear layers that are modules, quantised in the one way that a checkpoint says; a `model.LinearFunction`.

    Attributes:
        layers: `W8A8Linear` or, where the checkpoint left them alone, float ones; by name.
    """

    layers: dict[str, torch.nn.Module]

    def __call__(self, name: str, x: Tensor) -> Tensor:
        result: Tensor = self.layers[name](x)
        return result

    def to(self, device: torch.device) -> ModuleLinears:
        """The same layers, moved to ``device``."""
        return ModuleLinears({name: layer.to(device) for name, layer in self.layers.items()})

    @property
    def name(self) -> str:
        """How the layers are quantised; in several ways, perhaps."""
        configs = [layer.config for layer in self.layers.values() if isinstance(layer, W8A8Linear)]
        return ", ".join(dict.fromkeys(map(_name, configs)))

    @property
    def floats(self) -> list[str]:
        """Names of the layers that are not quantised."""
        return [name for name, layer in self.layers.items() if not isinstance(layer, W8A8Linear)]


def _name(config: W8A8Config) -> str:
    dtype = "int8" if config.dtype is torch.int8 else "fp8"
    azp = "" if config.symmetric else "-azp"
    return f"{dtype}{azp} {'dynamic' if config.dynamic else 'static'} per {config.granularity}"


def load(folder: Path, published: Encoder) -> tuple[Encoder, ModuleLinears]:
    """Read the encoder of ``published``'s sizes from a folder: its own embeddings and normalisation, and its layers.

    Raises:
        DemoError: no layer is quantised, or a fused one in part.
        CheckpointError, UnsupportedError: as `cutlass_w8a8.checkpoint` says.
    """
    config = published.config
    layers: dict[str, torch.nn.Module] = {}
    with Checkpoint(folder) as stored:
        for i in range(config.layers):
            for kind, shards in LINEAR_SHARDS.items():
                layers[f"layers.{i}.{kind}"] = _linear(stored, [f"encoder.layer.{i}.{shard}" for shard in shards])
        kept = {name: stored.tensor(name) for name in stored.names if "LayerNorm" in name or "embeddings" in name}
    if not any(isinstance(layer, W8A8Linear) for layer in layers.values()):
        raise DemoError(f"{folder} quantises no layer of the encoder; leave --checkpoint out")
    tensors = {name: tensor.float() for name, tensor in encoder_tensors(kept, config).items()}
    return Encoder(config, published.tokenizer, tensors), ModuleLinears(layers)


def _linear(stored: Checkpoint, shards: list[str]) -> torch.nn.Module:
    quantised = {stored.quantised(name) for name in shards}
    if len(quantised) > 1:
        raise DemoError(
            f"of {', '.join(shards)}, which are one layer here, only some are quantised; ignore all or none"
        )
    if quantised.pop():
        return stored.linear(shards, dtype=OUT_DTYPE)
    weight, bias = (
        torch.cat([stored.tensor(f"{name}.{part}").float() for name in shards]) for part in ("weight", "bias")
    )
    layer = torch.nn.Linear(*weight.shape[::-1], device="meta")
    layer.weight, layer.bias = torch.nn.Parameter(weight, False), torch.nn.Parameter(bias, False)
    return layer
