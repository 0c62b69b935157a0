"""Launches that overlap: chains of layers give the bits of kernels that wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

import cutlass_w8a8
from tests import quant_cases
from tests.harness import Check, k_multiple

SECTION = "overlap"
OVERLAPS = ("launch", "weights")
# M, then the widths of the activations between the layers.
CHAINS = (
    (1, (4096, 1280, 8192, 1024)),
    (16, (4096, 4096, 14336, 4096)),
    (48, (1024, 6144, 2048)),
    (300, (2048, 4096, 512)),
)
# One of each kind of main loop, forced where its K allows it.
CONFIGS = (
    None,
    "64x16x256_ws_swap_slices4",
    "64x32x256_ws_swap_slices2",
    "128x16x256_cooperative_swap",
    "64x64x256_pingpong_swap",
    "128x128x128_2x1_pingpong",
)
REPLAYS = 500
INPUTS = 8


@dataclass
class Layer:
    """One quantised layer and the buffers its kernels hand on, which every step of a chain uses again."""

    weight: torch.Tensor
    scale_b: torch.Tensor
    q: torch.Tensor
    scale_a: torch.Tensor
    out: torch.Tensor

    @classmethod
    def make(cls, m: int, k: int, n: int, dtype: torch.dtype) -> Layer:
        weight, scale_b = cutlass_w8a8.quantize_per_token(torch.randn(n, k, device="cuda"), dtype)
        return cls(
            weight.t(),
            scale_b,
            torch.empty(m, k, dtype=dtype, device="cuda"),
            torch.empty(m, 1, device="cuda"),
            torch.empty(m, n, dtype=torch.bfloat16, device="cuda"),
        )

    def run(self, x: torch.Tensor, overlap: str, config: str | None) -> torch.Tensor:
        quantise = "none" if overlap == "none" else "launch"
        cutlass_w8a8.quantize_per_token(x, self.q.dtype, out=self.q, scale=self.scale_a, overlap=quantise)
        return cutlass_w8a8.scaled_mm(
            self.q,
            self.weight,
            self.scale_a,
            self.scale_b,
            out=self.out,
            config=config,
            overlap=overlap,
            # Dispatch may choose another kernel for another overlap; then none that divides K.
            batch_invariant=config is None,
        )


def chain(layers: list[Layer], x: torch.Tensor, overlap: str, config: str | None) -> torch.Tensor:
    """The layers one after the other; the result is in a buffer that the next call overwrites."""
    for layer in layers:
        x = layer.run(x, overlap, config)
    return x


def serves(layers: list[Layer], config: str | None) -> bool:
    """Whether every layer's K can be divided as ``config`` asks."""
    return all(layer.q.shape[1] % k_multiple(config) == 0 for layer in layers)


def chains(device: str) -> list[Check]:
    """Graphs of a chain, of two chains at once, and eager chains on several streams, on inputs that change."""
    graphs = Check(SECTION, "a chain in a graph, replayed on changing inputs")
    pairs = Check(SECTION, "two chains of one graph at once")
    eager = Check(SECTION, "eager chains on three streams at once")
    for dtype in quant_cases.TARGETS:
        for m, widths in CHAINS:
            sides = [[Layer.make(m, k, n, dtype) for k, n in pairwise(widths)] for _ in range(3)]
            inputs = [torch.randn(m, widths[0], device=device).bfloat16() * (seed + 1) for seed in range(INPUTS)]
            for config in CONFIGS:
                if not serves(sides[0], config):
                    continue
                expected = [[chain(side, x, "none", config).clone() for x in inputs] for side in sides]
                torch.cuda.synchronize()
                for overlap in OVERLAPS:
                    title = f"{m}x{widths} {dtype} {config or 'dispatch'} {overlap}"
                    graphs.record(*_replayed(sides[:1], inputs, expected, overlap, config, title))
                    if config is None:
                        pairs.record(*_replayed(sides[:2], inputs, expected, overlap, config, title))
                        eager.record(*_eager(sides, inputs, expected, overlap, title))
    return [graphs, pairs, eager]


def _replayed(
    sides: list[list[Layer]],
    inputs: list[torch.Tensor],
    expected: list[list[torch.Tensor]],
    overlap: str,
    config: str | None,
    title: str,
) -> tuple[bool, str]:
    """Whether a graph of one chain a side gives what is expected each time, its input having changed before."""
    x = inputs[0].clone()
    # Dispatch may choose other kernels for this overlap than for none; a capture cannot load them.
    for side in sides:
        chain(side, x, overlap, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = _forked([lambda side=side: chain(side, x, overlap, config) for side in sides])
    wrong = torch.zeros((), dtype=torch.int64, device=x.device)
    for replay in range(REPLAYS):
        number = replay * 5 % INPUTS
        x.copy_(inputs[number])
        graph.replay()
        for out, wanted in zip(outs, expected, strict=False):
            wrong += (out != wanted[number]).any()
            out.zero_()
    return int(wrong) == 0, f"{title}: {int(wrong)} of {REPLAYS * len(sides)} differ"


def _forked(works: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    """The works' results, each on a stream of its own beside the current one."""
    current = torch.cuda.current_stream()
    outs = [works[0]()] if len(works) == 1 else []
    streams = [torch.cuda.Stream() for _ in works] if len(works) > 1 else []
    for stream, work in zip(streams, works, strict=False):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            outs.append(work())
    for stream in streams:
        current.wait_stream(stream)
    return outs


def _eager(
    sides: list[list[Layer]],
    inputs: list[torch.Tensor],
    expected: list[list[torch.Tensor]],
    overlap: str,
    title: str,
) -> tuple[bool, str]:
    """Whether chains on streams of their own give what is expected, each result checked on its stream."""
    streams = [torch.cuda.Stream() for _ in sides]
    wrong = [torch.zeros((), dtype=torch.int64, device=inputs[0].device) for _ in sides]
    torch.cuda.synchronize()
    for turn in range(REPLAYS // 10):
        for i, (side, stream) in enumerate(zip(sides, streams, strict=True)):
            with torch.cuda.stream(stream):
                number = turn * 3 % INPUTS
                out = chain(side, inputs[number], overlap, None)
                wrong[i] += (out != expected[i][number]).any()
    torch.cuda.synchronize()
    found = sum(map(int, wrong))
    return found == 0, f"{title}: {found} of {REPLAYS // 10 * len(sides)} differ"
