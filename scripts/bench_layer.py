#!/usr/bin/env python3
"""Time the linear path of a decoder layer on a GPU: quantisation and GEMMs of ours beside bf16, in CUDA graphs.

    python scripts/bench_layer.py --json layer.json

The four linear layers of a Llama-3-8B decoder layer (fused QKV, output, fused gate and up, down) run one after the
other on inputs that are there: random weights, real sizes, no attention and no activation function. ``ours`` quantises
each layer's bf16 input by token, then multiplies. Whatever the GPU was given to do is listed by name, copies and fills
of memory too.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from cutlass_w8a8.bench import machine, timing
from cutlass_w8a8.nn import W8A8Config, W8A8Linear

# N and K.
LAYERS = {"qkv": (6144, 4096), "output": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
BATCHES = (1, 16, 256, 1024, 4096)
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# A layer's weights, 218 MB in 8 bits, are more than L2 holds; several runs of them make a graph.
RUNS = 4
ROUNDS = 15


def layers() -> dict[str, list[torch.nn.Module]]:
    """The four layers in bf16, and quantised each way."""
    found: dict[str, list[torch.nn.Module]] = {"bf16": [], **{name: [] for name in DTYPES}}
    for n, k in LAYERS.values():
        linear = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        found["bf16"].append(linear)
        for name, dtype in DTYPES.items():
            config = W8A8Config(dtype=dtype)
            found[name].append(W8A8Linear.from_linear(linear, config))
    return found


def run(stack: list[torch.nn.Module], inputs: list[torch.Tensor]) -> None:
    """Run each layer on its input."""
    for layer, x in zip(stack, inputs, strict=True):
        layer(x)


def measure(stacks: dict[str, list[torch.nn.Module]], m: int) -> dict[str, Any]:
    """Microseconds of the four layers on ``m`` tokens, each way, and each way's error against bf16."""
    inputs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _, k in LAYERS.values()]
    graphs, kernels = {}, {}
    for name, stack in stacks.items():
        graph, kernels[name] = timing.graph_of(partial(run, stack, inputs), RUNS)
        graphs[name] = (graph, RUNS)
    us = timing.medians(graphs, ROUNDS)
    errors = {}
    for name in DTYPES:
        exact = [layer(x).float() for layer, x in zip(stacks["bf16"], inputs, strict=True)]
        got = [layer(x).float() for layer, x in zip(stacks[name], inputs, strict=True)]
        errors[name] = max(float((g - e).norm() / e.norm()) for g, e in zip(got, exact, strict=True))
    return {"m": m, "microseconds": us, "relative error": errors, "kernels": kernels}


def main() -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write times, conditions and kernels")
    parser.add_argument("--commit", help="recorded in the JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed, and torch sees none")
    facts = machine.facts(options.commit)
    print("|    M | bf16 us |  fp8 us | ratio | error | int8 us | ratio | error | kernels |")
    points = []
    with torch.inference_mode():
        stacks = layers()
        for m in BATCHES:
            point = measure(stacks, m)
            points.append(point)
            us, errors = point["microseconds"], point["relative error"]
            cells = " | ".join(f"{us[n]:7.1f} | {us['bf16'] / us[n]:5.2f} | {errors[n]:.3f}" for n in DTYPES)
            print(f"| {m:4} | {us['bf16']:7.1f} | {cells} | {len(point['kernels']['fp8'])} |", flush=True)
    names = sorted({name for point in points for way in DTYPES for name in point["kernels"][way]})
    print("kernels, copies and fills of ours:", ", ".join(names))
    if options.json:
        machine.write_json(options.json, {"machine": facts, "layers": LAYERS, "points": points})
    return 0


if __name__ == "__main__":
    sys.exit(main())
