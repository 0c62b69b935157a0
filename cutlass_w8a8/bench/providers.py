"""What is measured: ours and its peers, each as a function of prepared operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

import cutlass_w8a8
from cutlass_w8a8.bench.shapes import Point

FP8, INT8 = torch.float8_e4m3fn, torch.int8
DTYPES = {"fp8": FP8, "int8": INT8}


@dataclass
class Operands:
    """Weights to rotate over (column-major [K, N]), two activations [M, K], scales, and an output."""

    weights: list[torch.Tensor]
    activations: list[torch.Tensor]
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    out: torch.Tensor


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


def random_matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal fp8 or bf16 values, uniform int8 ones: power, hence the clock, depends on the data."""
    if dtype is INT8:
        return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device="cuda")
    out = torch.empty((rows, columns), dtype=dtype, device="cuda")
    # In blocks: a float32 copy of the largest weight would take 4 times its memory.
    for block in out.split(2048):
        block.copy_(torch.randn(block.shape, device="cuda"))
    return out


@lru_cache(maxsize=2)
def _weights(n: int, k: int, dtype: torch.dtype, total_bytes: int) -> list[torch.Tensor]:
    # Kept from one M to the next: making them takes longer than measuring with them.
    count = max(2, -(-total_bytes // (n * k * dtype.itemsize)))
    return [random_matrix(n, k, dtype).t() for _ in range(count)]


def make_operands(point: Point, dtype: torch.dtype, weight_bytes: int) -> Operands:
    """At least ``weight_bytes`` of weights, so that the L2 cache does not hold them; two of them at least."""
    return Operands(
        weights=_weights(point.n, point.k, dtype, weight_bytes),
        activations=[random_matrix(point.m, point.k, dtype) for _ in range(2)],
        scale_a=torch.rand(point.m, 1, device="cuda") * 0.01,
        scale_b=torch.rand(1, point.n, device="cuda") * 0.01,
        out=torch.empty(point.m, point.n, dtype=torch.bfloat16, device="cuda"),
    )


def pick(operands: Operands, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands a and b of call ``i``."""
    return operands.activations[i % 2], operands.weights[i % len(operands.weights)]


def ours(config: str | None = None) -> Provider:
    """Ours: what dispatch picks, or a forced configuration."""

    def call(x: Operands, i: int) -> object:
        a, b = pick(x, i)
        return cutlass_w8a8.scaled_mm(a, b, x.scale_a, x.scale_b, torch.bfloat16, out=x.out, config=config)

    return Provider(config or "ours", call, lambda _: True, forced=config is not None)


def vllm(library: Path) -> Provider:
    """vLLM's cutlass_scaled_mm out of its compiled extension.

    Raises:
        OSError: the library cannot be loaded.
    """
    torch.ops.load_library(str(library))
    operator = torch.ops._C.cutlass_scaled_mm.default

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


def torch_int_mm() -> Provider:
    """torch._int_mm: int32 out, no scales; torch wants M > 16."""

    def call(x: Operands, i: int) -> object:
        return torch._int_mm(*pick(x, i))

    return Provider("int_mm", call, lambda point: point.dtype == "int8" and point.m > 16, comparable=False)


def bf16() -> Provider:
    """torch.mm of bf16 operands of the same shape."""

    def call(x: Operands, i: int) -> object:
        return torch.mm(*pick(x, i), out=x.out)

    return Provider("bf16", call, lambda _: True, comparable=False, bf16=True)
