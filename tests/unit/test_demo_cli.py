"""The demo's command line and its installer, without a download and without a compiler."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from cutlass_w8a8.checkpoint import save
from cutlass_w8a8.nn import W8A8Config, quantize_
from examples.encoder import checkpoint
from examples.encoder.__main__ import main, read_sentences
from examples.encoder.model import Encoder, fp32_linear, from_bert
from examples.encoder.w8a8 import quantize
from tests.unit.tiny_encoder import CONFIG, SENTENCES, random_bert, tiny_tokenizer

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def tiny_checkpoint(tmp_path: Path) -> Path:
    tensors, linears = from_bert(random_bert(CONFIG), CONFIG)
    encoder = Encoder(CONFIG, tiny_tokenizer(), tensors)
    with torch.no_grad():
        reference = encoder.embed(encoder.batches(SENTENCES, 10)[0], fp32_linear(linears))
    path = tmp_path / "tiny.safetensors"
    checkpoint.save(path, checkpoint.Checkpoint(encoder, quantize(CONFIG, linears), SENTENCES, reference))
    return path


def test_run_from_a_checkpoint_reports_every_variant_and_layer(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    options = ["--checkpoint", str(tiny_checkpoint), "--device", "cpu", "--no-compile", "--json", str(output)]
    assert main(options) == 0
    printed = capsys.readouterr().out
    written = json.loads(output.read_text())
    assert written["device"] == "CPU"
    assert written["sentences"] == len(SENTENCES)
    assert written["built"] == []
    assert [v["variant"] for v in written["variants"]] == ["fp32", "int8", "int8-azp", "fp8"]
    assert written["variants"][0]["cosine_min"] == pytest.approx(1)
    for variant in written["variants"][1:]:
        assert 0.98 < variant["cosine_min"] <= variant["cosine_mean"] < 1
        assert variant["seconds"] > 0
    tokens = sum(len(sentence.split()) + 2 for sentence in SENTENCES)
    shapes = {(k["variant"], k["layer"]): (k["m"], k["n"], k["k"]) for k in written["kernels"]}
    assert len(written["kernels"]) == len(shapes) == 12
    assert shapes["int8-azp", "qkv"] == (tokens, 192, 64)
    assert shapes["fp8", "output"] == (tokens, 64, 128)
    for kernel in written["kernels"]:
        operand = "e4m3" if kernel["variant"] == "fp8" else "int8"
        epilogue = "azp-token-bias" if kernel["variant"] == "int8-azp" else "scaled-bias"
        assert kernel["kernel"].startswith(f"sm90_{operand}_fp16_{epilogue}_token_channel_")
        assert re.search(rf"^ +\d+ {re.escape(kernel['kernel'])}$", printed, re.MULTILINE)
    assert "through the evaluator" in printed.splitlines()[0]
    assert re.findall(r"^  \[(\d)/3\] (\S+) \(\d+ s\)$", printed, re.MULTILINE) == [
        ("1", "int8"),
        ("2", "int8-azp"),
        ("3", "fp8"),
    ]
    assert "say nothing about a GPU" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["export"], "`export` needs --output FILE"),
        (["--output", "x"], "--output needs `export`"),
        (["--checkpoint", "x", "--sentences", "y"], "--checkpoint brings its own sentences"),
        (["--batch-size", "0"], "--batch-size 0: must be 1 or more"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_an_explained_error_is_one_line_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lonely = tmp_path / "one.txt"
    lonely.write_text("just one\n\n")
    assert main(["--device", "cpu", "--sentences", str(lonely)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "has 1 sentences; nearest neighbours need two or more" in error
    assert main(["--device", "cpu", "--sentences", str(tmp_path / "none")]) == 1
    assert "give --sentences a UTF-8 text file" in capsys.readouterr().err


def test_built_in_sentences_are_distinct_pairs() -> None:
    sentences = read_sentences(REPOSITORY / "examples" / "encoder" / "sentences.txt")
    assert len(sentences) == len(set(sentences)) == 200


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with the installer in it and nothing to install."""
    (tmp_path / "scripts").mkdir()
    for name in ("demo", "_env.sh"):
        shutil.copy(REPOSITORY / "scripts" / name, tmp_path / "scripts" / name)
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


def run_demo(clone: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / "scripts" / "demo"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PYTHON": "/bin/false"}, "PYTHON=/bin/false is not a Python from 3.10 to 3.13"),
        ({"CXX": "no-such-compiler"}, "no C++ compiler (no-such-compiler) was found; install g++"),
    ],
)
def test_installer_says_what_is_missing_and_makes_nothing(clone: Path, variables: dict[str, str], message: str) -> None:
    before = sorted(clone.rglob("*"))
    result = run_demo(clone, **variables)
    assert result.returncode == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(clone.rglob("*")) == before


def test_run_from_a_folder_in_the_compressed_tensors_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors", reason="comes with the extra `checkpoints`")
    state = random_bert(CONFIG)
    tensors, linears = from_bert(state, CONFIG)
    monkeypatch.setattr("examples.encoder.__main__.load_pretrained",
                        lambda: (Encoder(CONFIG, tiny_tokenizer(), tensors), linears))  # fmt: skip
    model = as_modules(state)
    quantize_(model, W8A8Config(), lambda m, name: type(m) is torch.nn.Linear and "intermediate" in name)
    quantize_(model, W8A8Config(symmetric=False), lambda m, name: type(m) is torch.nn.Linear and "1.output" not in name)
    save(model, tmp_path / "folder")
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("\n".join(SENTENCES))
    output = tmp_path / "out.json"
    options = ["--checkpoint", str(tmp_path / "folder"), "--sentences", str(sentences), "--device", "cpu"]
    assert main([*options, "--json", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "Left in float: layers.1.output" in printed
    fp32, ours = json.loads(output.read_text())["variants"]
    assert (
        fp32["cosine_min"] == pytest.approx(1)
        and ours["variant"] == "int8-azp dynamic per token, int8 dynamic per token"
    )
    assert 0.98 < ours["cosine_min"] <= ours["cosine_mean"] < 0.99999

    file = tmp_path / "carried.safetensors"
    exported = ["export", *options[:4], "--output", str(file)]
    assert main(exported) == 0
    with monkeypatch.context() as elsewhere:
        for missing in ("examples.encoder.__main__.load_pretrained", "cutlass_w8a8.checkpoint.schemes.library"):
            elsewhere.setattr(missing, lambda: pytest.fail("neither the model nor compressed-tensors is there"))
        assert main(["--checkpoint", str(file), "--device", "cpu", "--json", str(output)]) == 0
    assert "Left in float: layers.1.output" in capsys.readouterr().out
    carried = json.loads(output.read_text())["variants"][1]
    assert {**carried, "seconds": ours["seconds"]} == ours

    partly = as_modules(state)
    quantize_(partly, W8A8Config(), lambda m, name: type(m) is torch.nn.Linear and "query" not in name)
    save(partly, tmp_path / "partly")
    assert main(["--checkpoint", str(tmp_path / "partly"), "--device", "cpu"]) == 1
    assert "only some are quantised" in capsys.readouterr().err


def as_modules(state: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Modules whose state this is, linear layers where there are matrices of linear layers."""
    root = torch.nn.Module()
    for name in {name.rpartition(".")[0] for name in state}:
        *path, last = name.split(".")
        parent = root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, torch.nn.Module())
            parent = parent.get_submodule(part)
        weight = state[f"{name}.weight"]
        linear = weight.dim() == 2 and f"{name}.bias" in state
        child = torch.nn.Linear(*weight.shape[::-1]) if linear else torch.nn.Module()
        for part in ("weight", "bias"):
            if f"{name}.{part}" in state:
                setattr(child, part, torch.nn.Parameter(state[f"{name}.{part}"], requires_grad=False))
        parent.add_module(last, child)
    return root
