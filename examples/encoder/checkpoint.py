"""The quantised encoder as one file: quantise on one machine, run on another."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .model import DemoError, Encoder, EncoderConfig
from .w8a8 import QuantizedLinear

_FORMAT = "cutlass_w8a8 encoder 1"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds.

    Attributes:
        encoder: embeddings (of the words in ``sentences`` only) and normalisation parameters.
        layers: the quantised linear layers, by name.
        sentences: what ``reference`` was computed from.
        reference: fp32 [sentences, hidden], the unquantised model's embeddings.
    """

    encoder: Encoder
    layers: dict[str, QuantizedLinear]
    sentences: list[str]
    reference: Tensor


def used_words(encoder: Encoder, sentences: Sequence[str]) -> Tensor:
    """The sorted token ids that occur in ``sentences``, padding included."""
    (batch,) = encoder.batches(sentences, len(sentences))
    return batch.ids.flatten().bincount().nonzero().squeeze(1)


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write ``checkpoint`` as one safetensors file, the tokenizer and the sentences in its metadata.

    Embeddings are stored in fp16, and only rows of words that occur in the sentences: the whole table would be
    larger than all quantised layers together. An existing file is replaced in one step.

    Raises:
        DemoError: the folder cannot be written to.
    """
    encoder = checkpoint.encoder
    tensors = dict(encoder.tensors)
    if "embeddings.word_ids" not in tensors:
        words = used_words(encoder, checkpoint.sentences)
        tensors["embeddings.word"] = tensors["embeddings.word"][words]
        tensors["embeddings.word_ids"] = words.int()
    for name in ("embeddings.word", "embeddings.position"):
        tensors[name] = tensors[name].half()
    for name, layer in checkpoint.layers.items():
        tensors |= {f"{name}.{field}": tensor for field, tensor in vars(layer).items()}
    tensors["reference"] = checkpoint.reference
    metadata = {
        "format": _FORMAT,
        "config": encoder.config.to_json(),
        "sentences": json.dumps(checkpoint.sentences),
        "tokenizer": encoder.tokenizer,
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
    layers = {
        name: QuantizedLinear(**{field: tensors.pop(f"{name}.{field}") for field in QuantizedLinear.__annotations__})
        for name in config.linear_names
    }
    reference = tensors.pop("reference")
    for name in ("embeddings.word", "embeddings.position"):
        tensors[name] = tensors[name].float()
    encoder = Encoder(config, metadata["tokenizer"], tensors)
    return Checkpoint(encoder, layers, json.loads(metadata["sentences"]), reference)
