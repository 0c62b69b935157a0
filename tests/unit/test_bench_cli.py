"""``cutlass-w8a8 bench``: what its options mean, which are refused, its exit status, and vLLM's libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import platformdirs
import pytest
import torch

from cutlass_w8a8.bench import fetch, results, run, timing
from cutlass_w8a8.bench.results import Column, Measurement, Run
from cutlass_w8a8.bench.shapes import BATCHES, WEIGHTS, Point
from cutlass_w8a8.bench.smooth import dense_batches
from cutlass_w8a8.cli import main
from cutlass_w8a8.errors import ToolchainError
from tests.unit.bench_fakes import fake_device  # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[run.Plan]:
    """The plans that the command would have run; no library of vLLM is found."""
    seen: list[run.Plan] = []

    def note(plan: run.Plan) -> Run:
        seen.append(plan)
        return Run([Column("ours")], [])

    monkeypatch.setattr(run, "run", note)
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    return seen


# What is measured ----------------------------------------------------------------------------------------------------


def test_without_options(plans: list[run.Plan]) -> None:
    assert main(["bench"]) == 0
    (plan,) = plans
    assert tuple(plan.weights) == WEIGHTS and plan.batches == BATCHES and plan.dtypes == ["fp8", "int8"]
    assert plan.orders == ["alone"] and plan.providers == results.PROVIDERS and plan.host and plan.vllm is None


def test_options(plans: list[run.Plan]) -> None:
    words = "--weights 64x32,8x16 --m 1,3 --dtypes int8 --orders gemm,chain --providers ours,vllm --budget 5 --no-host"
    assert main(["bench", *words.split(), "--configs", "128x128x128_ws", "--commit", "abc"]) == 0
    (plan,) = plans
    assert plan.weights == {(64, 32): [], (8, 16): []} and plan.batches == [1, 3] and plan.dtypes == ["int8"]
    assert plan.orders == ["gemm", "chain"] and plan.providers == ["ours", "vllm"] and not plan.host
    assert (plan.configs, plan.budget_ms, plan.commit) == (["128x128x128_ws"], 5.0, "abc")


def test_models(plans: list[run.Plan], capsys: Capture) -> None:
    assert main(["bench", "--model", "qwen2.5-7b", "--tp", "4,8"]) == 0
    (plan,) = plans
    assert plan.weights[9472, 3584] == ["qwen2.5-7b gate_up tp4"]
    assert "left out: qwen2.5-7b qkv tp8: 28 heads cannot be divided among 8 ranks" in capsys.readouterr().err
    assert len(plan.left_out) == 4


def test_smooth(plans: list[run.Plan]) -> None:
    assert main(["bench", "--smooth"]) == 0
    (plan,) = plans
    assert plan.providers == ["ours"] and plan.batches == dense_batches() and not plan.host


def test_cache_and_compilation(plans: list[run.Plan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("CUTLASS_W8A8_JIT", "on")
    assert main(["bench", "--cache", str(tmp_path), "--no-compile"]) == 0
    assert os.environ["CUTLASS_W8A8_CACHE_DIR"] == str(tmp_path) and os.environ["CUTLASS_W8A8_JIT"] == "off"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model llama-4", "llama-4 not among llama-2-7b"),
        ("--orders alone,together", "together not among alone, gemm, chain"),
        ("--providers cublas", "cublas not among ours, vllm"),
        ("--dtypes bf16", "bf16 not among fp8, int8"),
        ("--m 1,0", "'1,0' is not positive numbers joined by commas"),
        ("--tp two", "'two' is not positive numbers joined by commas"),
        ("--weights 4096", "'4096' is not a weight's N x K, such as 6144x4096"),
        ("--weights 4097x4096", "4097x4096: N=4097 is not a positive multiple of 8"),
        ("--weights 8x24", "8x24: K=24 is not a positive multiple of 16"),
        ("--configs nonsense", "nonsense"),
        ("--model llama-3-8b --weights 8x16", "not allowed with argument --model"),
    ],
)
def test_wrong_usage(words: str, message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", *words.split()])
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tp 2", "--tp divides the weights of --model NAME, which is not given"),
        ("--smooth --providers vllm", "--smooth measures ours alone; leave out --providers"),
        ("--vllm /nowhere/_C.so", "--vllm /nowhere/_C.so is not a file; give vLLM's _C_stable_libtorch.abi3.so"),
        ("--vllm-ops /nowhere/_C.so", "give vLLM's _C.abi3.so, which --fetch-vllm downloads"),
        ("--from-json /nowhere.json", "/nowhere.json is not the JSON of a benchmark"),
    ],
)
def test_refused(words: str, message: str, capsys: Capture) -> None:
    assert main(["bench", *words.split()]) == 1
    assert message in capsys.readouterr().err


def test_no_gpu(capsys: Capture) -> None:
    if not torch.cuda.is_available():
        assert main(["bench"]) == 1
        assert "torch sees none; --from-json FILE" in capsys.readouterr().err


def test_script_is_the_same_command() -> None:
    script = [sys.executable, "scripts/bench.py", "--help"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: cutlass-w8a8 bench")


# What becomes of it --------------------------------------------------------------------------------------------------


def test_json_and_exit_status(device: None, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out" / "run.json"
    words = ["bench", "--weights", "16x32", "--m", "4", "--providers", "ours,bf16", "--no-host", "--json", str(path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "| alone | int8 | 16 x 32 | 4 | 4.0 | 4.0 |" in printed
    content = json.loads(path.read_text())
    assert content["schema"] == 2 and content["conditions"]["gpu after"] and content["summary"]
    assert all(point["accuracy"]["ours"]["error / allowed"] <= 1 for point in content["points"])
    assert main(["bench", "--from-json", str(path)]) == 0
    assert capsys.readouterr().out == printed
    monkeypatch.setattr(timing.accuracy, "check", lambda *_: {"error / allowed": 7.0})
    assert main(words) == 1
    captured = capsys.readouterr()
    assert "wrong: ours: at 2 points; 7 times the allowed error" in captured.out
    assert "cutlass-w8a8: ours: at 2 points" in captured.err
    assert main(["bench", "--from-json", str(path)]) == 1


def test_failure_of_ours_is_exit_status_1(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run.json"
    failed = Run([Column("ours")], [Measurement(Point("fp8", 1, 8, 16), errors={"ours": "LaunchError: refused"})])
    path.write_text(json.dumps(failed.as_json()))
    assert main(["bench", "--from-json", str(path)]) == 1
    assert "ours at fp8 1x8x16: LaunchError: refused" in capsys.readouterr().err


# vLLM's libraries ----------------------------------------------------------------------------------------------------


def wheel(folder: Path, *names: str) -> Path:
    path = folder / "vllm-0.20.2-cp38-abi3-manylinux_2_35_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(f"vllm/{name}", f"content of {name}")
    return path


def test_fetch(plans: list[run.Plan], monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(fetch, "download", lambda folder: wheel(folder, fetch.GEMM, fetch.OPS, "_moe_C.abi3.so"))
    assert main(["bench", "--fetch-vllm"]) == 0
    captured = capsys.readouterr()
    gemm, ops = map(Path, captured.out.split())
    assert gemm.read_text() == f"content of {fetch.GEMM}" and ops.read_text() == f"content of {fetch.OPS}"
    assert sorted(path.name for path in gemm.parent.iterdir()) == sorted([fetch.GEMM, fetch.OPS])
    assert "they need torch 2.11" in captured.err and plans == []
    # What was fetched is used from now on.
    assert main(["bench"]) == 0
    assert (plans[0].vllm, plans[0].vllm_ops) == (gemm, ops)


def test_fetch_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(fetch, "download", lambda folder: wheel(folder, fetch.GEMM, fetch.OPS))
    assert main(["bench", "--fetch-vllm", str(tmp_path / "here")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "here" / name) for name in (fetch.GEMM, fetch.OPS)]
    monkeypatch.setattr(fetch, "download", lambda folder: wheel(folder, fetch.GEMM))
    with pytest.raises(ToolchainError, match=r"does not hold .*_C.abi3.so"):
        fetch.fetch(tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []
    (tmp_path / "file").touch()
    assert main(["bench", "--fetch-vllm", str(tmp_path / "file")]) == 1
    assert "give --fetch-vllm another folder" in capsys.readouterr().err


def test_pip_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def refuse(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "no matching distribution")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(ToolchainError, match="no matching distribution\nMake a package index reachable"):
        fetch.download(tmp_path)
    assert commands[0][-1] == "vllm==0.20.2" and "--no-deps" in commands[0]
