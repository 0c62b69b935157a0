"""What is measured: ours and its peers, each as a function of prepared operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from cutlass_w8a8.bench import orders
from cutlass_w8a8.bench.results import PROVIDERS, Column
from cutlass_w8a8.bench.shapes import Point

FP8, INT8 = torch.float8_e4m3fn, torch.int8
DTYPES = {"fp8": FP8, "int8": INT8}


@dataclass
class Operands:
    """What one point's calls read and write.

    Attributes:
        weights: to rotate over, each [K, N], column-major.
        activations: two, each [M, K], of the weights' type; in a chain what quantisation writes.
        scale_a, scale_b: float32 [M, 1] and [1, N]; in a chain quantisation writes the former.
        out: bf16 [M, N].
        scale: float32 [1], for providers with one scale per tensor.
        tokens: in a chain the two bf16 activations [M, K] to quantise, else empty.
    """

    weights: list[torch.Tensor]
    activations: list[torch.Tensor]
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    out: torch.Tensor
    scale: torch.Tensor
    tokens: list[torch.Tensor] = field(default_factory=list)

    def poison(self) -> None:
        """Overwrite all that calls write, so that what they fail to write shows."""
        self.out.fill_(torch.nan)
        if self.tokens:
            self.scale_a.fill_(torch.nan)
            for activation in self.activations:
                activation.zero_()


Call = Callable[[Operands, int], object]
"""Enqueue call number i on the current stream."""


@dataclass(frozen=True)
class Provider:
    """A way to compute a point.

    Attributes:
        name: column heading.
        call: enqueues one call.
        serves: whether it can do this point at all.
        comparable: whether it computes what ours computes; others are shown, not compared with.
        bf16: works on bf16 operands.
        forced: ours with a configuration that dispatch did not choose.
    """

    name: str
    call: Call
    serves: Callable[[Point], bool]
    comparable: bool = True
    bf16: bool = False
    forced: bool = False

    @property
    def column(self) -> Column:
        """Its heading in a table."""
        return Column(self.name, self.comparable, self.forced)


def random_matrix(rows: int, columns: int, dtype: torch.dtype, device: str = "cuda") -> torch.Tensor:
    """Normal fp8 or bf16 values, uniform int8 ones: power, hence the clock, depends on the data."""
    if dtype is INT8:
        return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device)
    out = torch.empty((rows, columns), dtype=dtype, device=device)
    # In blocks: a float32 copy of the largest weight would take 4 times its memory.
    for block in out.split(2048):
        block.copy_(torch.randn(block.shape, device=device))
    return out


@lru_cache(maxsize=2)
def _weights(n: int, k: int, dtype: torch.dtype, total_bytes: int, device: str) -> list[torch.Tensor]:
    # Kept from one M to the next: making them takes longer than measuring with them.
    count = max(2, -(-total_bytes // (n * k * dtype.itemsize)))
    return [random_matrix(n, k, dtype, device).t() for _ in range(count)]


def make_operands(point: Point, dtype: torch.dtype, weight_bytes: int, device: str = "cuda") -> Operands:
    """At least ``weight_bytes`` of weights, so that the L2 cache does not hold them; two of them at least."""
    chain = point.order == "chain" and dtype is not torch.bfloat16
    return Operands(
        weights=_weights(point.n, point.k, dtype, weight_bytes, device),
        activations=[random_matrix(point.m, point.k, dtype, device) for _ in range(2)],
        scale_a=torch.rand(point.m, 1, device=device) * 0.01,
        scale_b=torch.rand(1, point.n, device=device) * 0.01,
        out=torch.empty(point.m, point.n, dtype=torch.bfloat16, device=device),
        scale=torch.full((1,), 0.01, device=device),
        tokens=[random_matrix(point.m, point.k, torch.bfloat16, device) for _ in range(2)] if chain else [],
    )


def pick(operands: Operands, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands a and b of call ``i``."""
    return operands.activations[i % 2], operands.weights[i % len(operands.weights)]


def chained(provider: Provider, quantise: orders.Quantiser) -> Provider:
    """``provider`` after ``quantise`` has made its operand a."""

    def call(x: Operands, i: int) -> object:
        quantise(x.tokens[i % 2], x.activations[i % 2], x.scale_a)
        return provider.call(x, i)

    return Provider(provider.name, call, provider.serves, provider.comparable, provider.bf16, provider.forced)


def ours(order: str = "alone", config: str | None = None) -> Provider:
    """Ours: what dispatch picks, or a forced configuration.

    Raises:
        UnsupportedError: this version cannot launch as ``order`` wants it.
    """
    gemm = orders.our_gemm(order)

    def call(x: Operands, i: int) -> object:
        a, b = pick(x, i)
        return gemm(a, b, x.scale_a, x.scale_b, torch.bfloat16, out=x.out, config=config)

    return Provider(config or "ours", call, lambda _: True, forced=config is not None)


def vllm(library: Path) -> Provider:
    """vLLM's cutlass_scaled_mm out of its compiled extension.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: it lacks the operator.
    """
    torch.ops.load_library(str(library))
    operator: Any = torch.ops._C.cutlass_scaled_mm.default

    def call(x: Operands, i: int) -> object:
        a, b = pick(x, i)
        return operator(x.out, a, b, x.scale_a, x.scale_b, None)

    return Provider("vllm", call, lambda _: True)


def torch_row_wise() -> Provider:
    """torch._scaled_mm with row-wise scales, fp8 only."""

    def call(x: Operands, i: int) -> object:
        a, b = pick(x, i)
        return torch._scaled_mm(a, b, x.scale_a, x.scale_b, out_dtype=torch.bfloat16, use_fast_accum=True, out=x.out)

    return Provider("torch_row", call, lambda point: point.dtype == "fp8")


def torch_tensor_wise() -> Provider:
    """torch._scaled_mm with one scale per tensor, fp8 only: less work than ours, and another result."""

    def call(x: Operands, i: int) -> object:
        a, b = pick(x, i)
        return torch._scaled_mm(a, b, x.scale, x.scale, out_dtype=torch.bfloat16, use_fast_accum=True, out=x.out)

    return Provider("torch_tensor", call, _unscaled("fp8"), comparable=False)


def torch_int_mm() -> Provider:
    """torch._int_mm: int32 out, no scales; torch wants M > 16."""

    def call(x: Operands, i: int) -> object:
        return torch._int_mm(*pick(x, i))

    unscaled = _unscaled("int8")
    return Provider("int_mm", call, lambda point: unscaled(point) and point.m > 16, comparable=False)


def torch_int_mm_dequantised() -> Provider:
    """torch._int_mm and the two multiplications by scales in torch: what there is without a fused kernel."""

    def call(x: Operands, i: int) -> object:
        scaled = torch.mul(torch._int_mm(*pick(x, i)), x.scale_b)
        return torch.mul(scaled, x.scale_a, out=x.out)

    return Provider("int_mm_dequant", call, lambda point: point.dtype == "int8" and point.m > 16)


def triton() -> Provider:
    """A Triton kernel with the same epilogue, tiles chosen by M alone.

    Raises:
        ImportError: Triton is not installed.
    """
    from cutlass_w8a8.bench.triton_mm import scaled_mm

    def call(x: Operands, i: int) -> object:
        a, b = pick(x, i)
        return scaled_mm(a, b, x.scale_a, x.scale_b, x.out)

    return Provider("triton", call, lambda _: True)


def bf16() -> Provider:
    """torch.mm of bf16 operands of the same shape; in a chain, what quantisation and GEMM take the place of."""

    def call(x: Operands, i: int) -> object:
        return torch.mm(*pick(x, i), out=x.out)

    return Provider("bf16", call, lambda _: True, comparable=False, bf16=True)


def _unscaled(dtype: str) -> Callable[[Point], bool]:
    # Scales per token, which a chain's quantisation makes, would be of no use to these.
    return lambda point: point.dtype == dtype and point.order != "chain"


MAKERS: dict[str, Callable[[], Provider]] = {
    "torch_row": torch_row_wise,
    "torch_tensor": torch_tensor_wise,
    "int_mm": torch_int_mm,
    "int_mm_dequant": torch_int_mm_dequantised,
    "triton": triton,
    "bf16": bf16,
}


def choose(
    order: str,
    wanted: list[str],
    configs: list[str],
    library: Path | None,
    quantisation: Path | None,
) -> tuple[list[Provider], dict[str, str], str]:
    """The providers of one order.

    Args:
        order: key of `shapes.ORDERS`.
        wanted: of `results.PROVIDERS`.
        configs: configurations of ours to force, besides.
        library: vLLM's library with its GEMM, if any.
        quantisation: vLLM's library with its quantisation, if any.

    Returns:
        Providers, why each other one is missing, and what quantises for peers (empty unless in a chain).
    """
    made: list[Provider] = []
    missing = {name: "not asked for" for name in PROVIDERS if name not in wanted}
    makers = dict(MAKERS) | {config: lambda config=config: ours(order, config) for config in configs}
    makers["ours"] = lambda: ours(order)
    if library is not None:
        makers["vllm"] = lambda: vllm(library)
    elif "vllm" in wanted:
        missing["vllm"] = "no library; give --vllm FILE, or get it with --fetch-vllm"
    for name in [name for name in PROVIDERS if name in wanted and name not in missing] + configs:
        try:
            made.append(makers[name]())
        except Exception as error:  # whatever keeps a peer from being measured is named in the table
            missing[name] = f"{type(error).__name__}: {error}"
    if order != "chain":
        return made, missing, ""
    quantisers, label = orders.quantisers(quantisation)
    chain = []
    for provider in made:
        quantise = quantisers["ours" if provider.name == "ours" or provider.forced else "peers"]
        if provider.bf16:
            chain.append(provider)
        elif isinstance(quantise, str):
            missing[provider.name] = quantise
        else:
            chain.append(chained(provider, quantise))
    return chain, missing, label
