"""The problems that are measured: weight shapes of models under tensor parallelism, and batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.request import K_MULTIPLE, N_MULTIPLE

WEIGHTS = (  # N x K: Llama 3 8B (qkv, out, gate-up, down) and 70B (qkv, down, ...) with and without tensor parallelism
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (10240, 8192),
    (8192, 28672),
    (1280, 8192),
    (8192, 1024),
)
BATCHES = (1, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
DTYPES = ("fp8", "int8")
ORDERS = {
    "alone": "GEMM after GEMM, none launched before the one in front has ended",
    "gemm": "GEMM after GEMM, ours with programmatic dependent launch",
    "chain": "quantisation of bf16 activations to a scale per token, then the GEMM; ours with dependent launch",
}


@dataclass(frozen=True)
class Point:
    """One problem: per-token x per-channel scales, no bias, bf16 out. Extents in elements.

    Attributes:
        dtype: ``fp8`` or ``int8``.
        m, n, k: extents of the product.
        order: what calls follow each other in the graph, a key of `ORDERS`.
    """

    dtype: str
    m: int
    n: int
    k: int
    order: str = "alone"

    @property
    def name(self) -> str:
        """Type and extents, such as ``fp8 16x4096x4096``, and the order unless it is ``alone``."""
        return f"{self.dtype} {self.m}x{self.n}x{self.k}" + ("" if self.order == "alone" else f" {self.order}")


class Split(Enum):
    """How tensor parallelism divides a layer's weight among the ranks."""

    HEADS = "query heads are divided; so are key and value heads, which are repeated once there are fewer than ranks"
    COLUMN = "N is divided"
    ROW = "K is divided"
    NONE = "every rank holds all of it"


@dataclass(frozen=True)
class Layer:
    """A linear layer's weight, N x K on one rank, before it is divided by ``split``."""

    name: str
    n: int
    k: int
    split: Split


@dataclass(frozen=True)
class Model:
    """Extents of a decoder with grouped-query attention, as in its ``config.json``.

    Attributes:
        hidden, intermediate: widths of the residual stream and of the feed-forward layer.
        heads, kv_heads, head_dim: query heads, key and value heads, and the width of one.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    def layers(self) -> list[Layer]:
        """The four weights of a block as inference engines fuse them."""
        return [
            Layer("qkv", (self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden, Split.HEADS),
            Layer("o", self.hidden, self.heads * self.head_dim, Split.ROW),
            Layer("gate_up", 2 * self.intermediate, self.hidden, Split.COLUMN),
            Layer("down", self.hidden, self.intermediate, Split.ROW),
        ]


@dataclass(frozen=True)
class LatentModel:
    """Extents of a decoder with multi-head latent attention and a mixture of experts, as in its ``config.json``.

    Attributes:
        hidden, intermediate, shared: widths of the residual stream, of the dense feed-forward layers, of the expert
            that every token passes.
        heads: attention heads.
        q_rank, kv_rank: ranks of the query and of the key-value compression.
        nope, rope, value: a head's widths without and with rotary position, and of its value.
    """

    hidden: int
    intermediate: int
    shared: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int

    def layers(self) -> list[Layer]:
        """Attention's projections, the dense feed-forward layers and the shared expert; no routed expert, which is a
        grouped product and another kind of kernel."""
        return [
            Layer("qkv_a", self.q_rank + self.kv_rank + self.rope, self.hidden, Split.NONE),
            Layer("q_b", self.heads * (self.nope + self.rope), self.q_rank, Split.COLUMN),
            Layer("kv_b", self.heads * (self.nope + self.value), self.kv_rank, Split.COLUMN),
            Layer("o", self.hidden, self.heads * self.value, Split.ROW),
            Layer("dense_gate_up", 2 * self.intermediate, self.hidden, Split.COLUMN),
            Layer("dense_down", self.hidden, self.intermediate, Split.ROW),
            Layer("shared_gate_up", 2 * self.shared, self.hidden, Split.COLUMN),
            Layer("shared_down", self.hidden, self.shared, Split.ROW),
        ]


MODELS: dict[str, Model | LatentModel] = {
    "llama-2-7b": Model(4096, 11008, 32, 32),
    "llama-2-13b": Model(5120, 13824, 40, 40),
    "llama-2-70b": Model(8192, 28672, 64, 8),
    "llama-3-8b": Model(4096, 14336, 32, 8),
    "llama-3-70b": Model(8192, 28672, 64, 8),
    "llama-3-405b": Model(16384, 53248, 128, 8),
    "qwen2.5-7b": Model(3584, 18944, 28, 4),
    "qwen2.5-32b": Model(5120, 27648, 40, 8),
    "qwen2.5-72b": Model(8192, 29568, 64, 8),
    "mistral-7b": Model(4096, 14336, 32, 8),
    "deepseek-v3": LatentModel(7168, 18432, 2048, 128, 1536, 512, 128, 64, 128),
}

Weights = dict[tuple[int, int], list[str]]
"""N and K of a weight, and the layers that have it."""


def divided(model: Model | LatentModel, layer: Layer, ranks: int) -> tuple[int, int]:
    """N and K of ``layer`` on one of ``ranks`` tensor-parallel ranks.

    Raises:
        ArgumentError: it cannot be divided so, or kernels do not take what results.
    """
    n, k = layer.n, layer.k
    if layer.split is not Split.NONE and model.heads % ranks:
        raise ArgumentError(f"{model.heads} heads cannot be divided among {ranks} ranks")
    if isinstance(model, Model) and layer.split is Split.HEADS:
        if model.kv_heads % ranks and ranks % model.kv_heads:
            raise ArgumentError(f"{model.kv_heads} key-value heads cannot be divided among {ranks} ranks")
        n = (model.heads // ranks + 2 * max(1, model.kv_heads // ranks)) * model.head_dim
    elif layer.split is Split.COLUMN:
        n = _divide("N", n, ranks)
    elif layer.split is Split.ROW:
        k = _divide("K", k, ranks)
    refuse_extents(n, k)
    return n, k


def _divide(name: str, extent: int, ranks: int) -> int:
    if extent % ranks:
        raise ArgumentError(f"{name}={extent} cannot be divided among {ranks} ranks")
    return extent // ranks


def refuse_extents(n: int, k: int) -> None:
    """Refuse a weight that kernels do not take.

    Raises:
        ArgumentError: N or K is not a positive multiple of what kernels need.
    """
    for name, extent, multiple in (("N", n, N_MULTIPLE), ("K", k, K_MULTIPLE)):
        if extent < 1 or extent % multiple:
            raise ArgumentError(f"{name}={extent} is not a positive multiple of {multiple}")


def weights_of(models: Iterable[str], ranks: Sequence[int]) -> tuple[Weights, list[str]]:
    """The weights of ``models`` for each number of tensor-parallel ranks, and what had to be left out.

    Args:
        models: keys of `MODELS`.
        ranks: numbers of tensor-parallel ranks.

    Returns:
        Weights in the order of their first layer, equal ones once, and a line for each layer that has none.
    """
    found: Weights = {}
    refused = []
    for name in models:
        model = MODELS[name]
        for count in ranks:
            for layer in model.layers():
                label = f"{name} {layer.name} tp{count}"
                try:
                    found.setdefault(divided(model, layer, count), []).append(label)
                except ArgumentError as error:
                    refused.append(f"{label}: {error}")
    return found, refused


def points(
    weights: Iterable[tuple[int, int]], batches: Sequence[int], dtypes: Sequence[str], orders: Sequence[str]
) -> list[Point]:
    """All points, those of one weight and type together, since making weights is slow."""
    return [Point(dtype, m, n, k, order) for n, k in weights for dtype in dtypes for order in orders for m in batches]
