"""A random two-layer encoder with fourteen words, for the demo's tests."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from examples.encoder.model import EncoderConfig

HIDDEN, WIDE = 64, 128
WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran", "over", "green", "hills", "at", "night"]
SENTENCES = [
    "the cat sat on a mat",
    "dogs ran over green hills at night",
    "a cat ran",
    "the green mat sat on the hills while dogs ran",
]


def tiny_tokenizer() -> str:
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer.to_str()


def random_bert(config: EncoderConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    state = {
        "embeddings.word_embeddings.weight": random(len(WORDS) + 4, HIDDEN),
        "embeddings.position_embeddings.weight": random(40, HIDDEN),
        "embeddings.token_type_embeddings.weight": random(2, HIDDEN),
    }
    shapes = {"attention.output.dense": (HIDDEN, HIDDEN), "intermediate.dense": (WIDE, HIDDEN)}
    shapes |= {"output.dense": (HIDDEN, WIDE)} | {
        f"attention.self.{x}": (HIDDEN, HIDDEN) for x in ("query", "key", "value")
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(config.layers):
        for name, shape in shapes.items():
            state[f"encoder.layer.{i}.{name}.weight"] = random(*shape)
            state[f"encoder.layer.{i}.{name}.bias"] = random(shape[0])
        norms += [f"encoder.layer.{i}.attention.output.LayerNorm", f"encoder.layer.{i}.output.LayerNorm"]
    for name in norms:
        state[f"{name}.weight"] = 1 + random(HIDDEN)
        state[f"{name}.bias"] = random(HIDDEN)
    return state


CONFIG = EncoderConfig(layers=2, hidden=HIDDEN, heads=4, norm_epsilon=1e-12, max_tokens=32)
