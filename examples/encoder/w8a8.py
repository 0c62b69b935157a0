"""The encoder's linear layers on cutlass_w8a8: quantised weights, and the three ways to run them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import cutlass_w8a8

from .model import DemoError, Encoder, EncoderConfig
from .quantize import column_sums, fp8_e4m3, int8_symmetric, int8_zero_point

# The kernels add the bias to the fp32 value before rounding it to the output type, and take the bias in that
# type. fp16 rather than bf16: after layer normalisation nothing here comes near fp16's limit of 65504, so its
# three extra bits of precision are free. fp32 would be exact, but doubles what the kernel writes.
OUT_DTYPE = torch.float16

_FORMAT = "cutlass_w8a8 encoder 1"


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
        name: QuantizedLinear.of(linears[f"{name}.weight"], linears[f"{name}.bias"])
        for name in config.linear_names
    }


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
    return torch.unique(encoder.batches(sentences, len(sentences))[0].ids)


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
            os.replace(whole, path)
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
            tensors = {name: file.get_tensor(name) for name in file.keys()}
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
