#!/usr/bin/env python3
"""Time the example's sentence encoder on a GPU, its linear layers in 8 bits beside bf16 ones, in CUDA graphs.

    python scripts/bench_encoder.py --json encoder.json

The whole forward pass of a batch in which every sentence has as many tokens, so that there is no padding, all but the
linear layers in bf16 on both sides; and the linear layers alone, one after the other on inputs that are there. Those in
8 bits quantise their bf16 inputs by token, which is counted in. The sizes are all-MiniLM-L6-v2's, the values random,
which times do not depend on but for the clock. Needs neither the model's weights nor a tokenizer. Every kernel of the
linear layers is listed by name; on a machine that needs no GPU these commands compile them, the second once more with
``--azp token``:

    of="--weights 1152x384,384x384,1536x384,384x1536 --m 65536 --bias --overlap weights --quantize bf16"
    cutlass-w8a8 build $of --a-dtype e4m3 --arch sm90 --sm-count 132 --device "NVIDIA H200"
    cutlass-w8a8 build $of --a-dtype int8 --arch sm90 --sm-count 132 --device "NVIDIA H200"
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from cutlass_w8a8.bench import machine, timing
from cutlass_w8a8.nn import W8A8Config, W8A8Linear
from examples.encoder.compressed import ModuleLinears
from examples.encoder.model import Encoder, EncoderConfig, Tokens

# all-MiniLM-L6-v2's: sizes, width between the last two layers, and words.
SIZES = EncoderConfig(layers=6, hidden=384, heads=12, norm_epsilon=1e-12, max_tokens=256)
WIDE, WORDS = 1536, 30522
WAYS = {
    "int8": W8A8Config(torch.int8),
    "int8-azp": W8A8Config(torch.int8, symmetric=False),
    "fp8": W8A8Config(torch.float8_e4m3fn),
}
DTYPE = torch.bfloat16
ROUNDS = 25


def shapes(config: EncoderConfig, wide: int) -> dict[str, tuple[int, int]]:
    """N and K of every linear layer, by name."""
    h = config.hidden
    kinds = {"qkv": (3 * h, h), "attention_output": (h, h), "intermediate": (wide, h), "output": (h, wide)}
    return {name: kinds[name.rpartition(".")[2]] for name in config.linear_names}


def random_encoder(config: EncoderConfig, words: int, device: torch.device) -> Encoder:
    """An encoder of these sizes in bf16, without a tokenizer."""
    rows = {"word": words, "position": config.max_tokens, "type": 2}
    tensors = {f"embeddings.{name}": torch.randn(n, config.hidden) for name, n in rows.items()}
    norms = [f"layers.{i}.{norm}" for i in range(config.layers) for norm in ("attention_norm", "output_norm")]
    for norm in ("embeddings.norm", *norms):
        tensors |= {f"{norm}.weight": torch.ones(config.hidden), f"{norm}.bias": torch.zeros(config.hidden)}
    return Encoder(config, "", tensors).to(device, DTYPE)


def random_linears(config: EncoderConfig, wide: int, device: torch.device) -> dict[str, ModuleLinears]:
    """The linear layers in bf16, and the same quantised each way."""
    floats = {name: torch.nn.Linear(k, n, device=device, dtype=DTYPE) for name, (n, k) in shapes(config, wide).items()}
    found = {"bf16": ModuleLinears(dict(floats))}
    for way, how in WAYS.items():
        found[way] = ModuleLinears({name: W8A8Linear.from_linear(linear, how) for name, linear in floats.items()})
    return found


def each(linears: ModuleLinears, inputs: dict[int, torch.Tensor], config: EncoderConfig) -> list[torch.Tensor]:
    """Results of all linear layers, in order, on inputs by K."""
    return [linears(name, inputs[linears.layers[name].in_features]) for name in config.linear_names]


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Of results, relative to ``exact``, in the Frobenius norm."""
    return float((got.float() - exact.float()).norm() / exact.float().norm())


def measure(
    config: EncoderConfig, wide: int, words: int, batch: int, length: int, device: torch.device
) -> dict[str, Any]:
    """Microseconds of the encoder and of its linear layers each way, how far from bf16's results, and kernels.

    The distance is that of the sentence's embedding, or of the layer's results, which is farthest.

    Args:
        config, wide, words: sizes.
        batch, length: sentences, and tokens of each.
        device: a CUDA device.
    """
    torch.manual_seed(0)
    encoder, ways = random_encoder(config, words, device), random_linears(config, wide, device)
    tokens = Tokens(torch.randint(words, (batch, length), device=device))
    inputs = {k: torch.randn(tokens.count, k, device=device, dtype=DTYPE) for k in (config.hidden, wide)}
    runs = {
        "encoder": {way: partial(encoder.embed, tokens, linears) for way, linears in ways.items()},
        "linear layers": {way: partial(each, linears, inputs, config) for way, linears in ways.items()},
    }
    found: dict[str, Any] = {"tokens": tokens.count, "microseconds": {}, "distance": {}, "kernels": {}}
    for what, sides in runs.items():
        exact = list(sides["bf16"]())
        found["distance"][what] = {
            way: max(distance(g, e) for g, e in zip(sides[way](), exact, strict=True)) for way in WAYS
        }
        del exact
        made = {way: timing.graph_of(run, 1) for way, run in sides.items()}
        found["microseconds"][what] = timing.medians({way: (graph, 1) for way, (graph, _) in made.items()}, ROUNDS)
        found["kernels"][what] = {way: dict(Counter(names)) for way, (_, names) in made.items()}
    return found


def main() -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512, metavar="N", help="sentences (default 512)")
    parser.add_argument("--length", type=int, default=128, metavar="N", help="tokens of each (default 128)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write times, conditions and kernels")
    parser.add_argument("--commit", help="recorded in the JSON")
    options = parser.parse_args()
    if options.batch < 1 or not 1 <= options.length <= SIZES.max_tokens:
        parser.error(
            f"--batch {options.batch} --length {options.length}: the first must be 1 or more, the second 1 to "
            f"{SIZES.max_tokens}"
        )
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed, and torch sees none")
    facts = machine.facts(options.commit)
    with torch.inference_mode():
        found = measure(SIZES, WIDE, WORDS, options.batch, options.length, torch.device("cuda"))
    show(found)
    if options.json:
        sizes = {"batch": options.batch, "length": options.length, "layers": shapes(SIZES, WIDE)}
        machine.write_json(options.json, {"machine": facts, "sizes": sizes, **found})
    return 0


def show(found: dict[str, Any]) -> None:
    """Print what was measured; ratios are bf16's time to each way's."""
    for what, us in found["microseconds"].items():
        print(f"{what}, {found['tokens']} tokens: bf16 {us['bf16']:.1f} us")
        print("|          |       us | ratio | distance |")
        for way, distance_ in found["distance"][what].items():
            print(f"| {way:8} | {us[way]:8.1f} | {us['bf16'] / us[way]:5.3f} | {distance_:8.4f} |")
    for way, kernels in found["kernels"]["linear layers"].items():
        print(f"kernels of the linear layers, {way}:")
        for name, count in kernels.items():
            print(f"  {count:3} {name}")


if __name__ == "__main__":
    sys.exit(main())
