"""scripts/pregenerate.py: which kernels its options name, and what it refuses. Compiling is tested in tests/compile."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cutlass_w8a8 import emit, worker
from cutlass_w8a8.arch import ARCHS
from cutlass_w8a8.dispatch import configs_of, problems
from cutlass_w8a8.dtypes import OUTPUT_DTYPES, DType
from cutlass_w8a8.evt.epilogues import FORMULAS
from cutlass_w8a8.spec import KernelSpec, Scheme, spec_from_json
from scripts import pregenerate
from tests.harness import load_plan

Capture = pytest.CaptureFixture[str]


def plan(capsys: Capture, *words: str) -> list[KernelSpec]:
    assert pregenerate.main([*words, "--print-plan"]) == 0
    return [KernelSpec.from_json(text) for text in json.loads(capsys.readouterr().out)]


def test_options_multiply(capsys: Capture) -> None:
    specs = plan(
        capsys,
        *"--arch sm90 --a-dtype e4m3 --a-dtype int8 --out-dtype bf16 --out-dtype fp16".split(),
        *"--epilogue scaled_token_channel --epilogue scaled-bias_tensor_tensor".split(),
        *"--config 128x128x128_pingpong --config 64x32x128_pingpong_swap".split(),
    )
    assert len(specs) == len(set(specs)) == 2 * 2 * 2 * 2


def test_all_means_everything_possible(capsys: Capture) -> None:
    specs = plan(capsys, "--arch", "all", "--out-dtype", "all")
    assert len(specs) == len(set(specs))
    assert not any(problems(spec) for spec in specs)
    expected = sum(
        len(configs_of(arch, operand))
        * len(OUTPUT_DTYPES)
        * 4
        * sum(operand is DType.INT8 or "azp" not in name for name in FORMULAS)
        for arch, operand in itertools.chain.from_iterable(((a, o) for o in a.operands) for a in ARCHS.values())
    )
    assert len(specs) == expected


def test_plan_is_read_back_and_launch_choices_do_not_multiply(capsys: Capture, tmp_path: Path) -> None:
    specs = plan(capsys, "--arch", "sm80")
    path = tmp_path / "plan.json"
    entry = json.loads(specs[0].to_json())
    again = [*(spec.to_json() for spec in specs), entry, entry | {"config": entry["config"] + "_swizzle4"}]
    path.write_text(json.dumps(again))
    assert plan(capsys, "--plan", str(path)) == specs


def test_quantisation_is_a_set_of_its_own(capsys: Capture, tmp_path: Path) -> None:
    words = "--arch sm90 --arch sm80 --quantize bf16 --scheme token --print-plan".split()
    assert pregenerate.main(words) == 0
    lines = json.loads(capsys.readouterr().out)
    assert [spec_from_json(line).name for line in lines] == [
        "sm90_quantize_bf16_e4m3",
        "sm90_quantize_bf16_int8",
        "sm80_quantize_bf16_int8",
    ]
    assert pregenerate.main("--arch sm90 --quantize all --print-plan".split()) == 0
    every = [spec_from_json(line) for line in json.loads(capsys.readouterr().out)]
    # By default every scheme, for the types that it is for.
    assert len(every) == len(set(every)) == 3 * 9 and {spec.scheme for spec in every} == set(Scheme)
    # A plan may hold kernels of both kinds.
    gemm = plan(capsys, *"--arch sm80 --epilogue scaled_tensor_tensor".split())[0].to_json()
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([gemm, json.loads(lines[0])]))
    assert pregenerate.main(["--plan", str(path), "--print-plan"]) == 0
    assert json.loads(capsys.readouterr().out) == [gemm, lines[0]]
    assert pregenerate.main(["--plan", str(path), "--sources-only", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "sources" / "sm90_quantize_bf16_e4m3.cu").is_file()
    harness_plan = load_plan(path)
    assert [combination.operand for combination in harness_plan] == ["int8"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--arch sm90 --a-dtype e4m3 --epilogue azp_token_channel", "needs int8 operands"),
        ("--arch sm80 --a-dtype e4m3", "sm80 has no e4m3 tensor cores"),
        ("--arch sm90 --quantize bf16 --a-dtype e4m3 --scheme static-azp", "quantises to int8 only, not to e4m3"),
        ("--arch sm90 --config 96x128x128_pingpong", "tile m 96"),
        ("--arch sm90 --config nonsense", "'nonsense'"),
        ("--epilogue scaled", "<formula>_<scale_a>_<scale_b>"),
        ("--epilogue unscaled_token_channel", "unscaled"),
        ("--plan /no/such/file", "/no/such/file"),
    ],
)
def test_impossible_sets_are_refused_before_anything_runs(
    words: str, message: str, capsys: Capture, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert pregenerate.main([*words.split(), "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("pregenerate: ") and captured.out == ""
    assert not out.exists()


@pytest.mark.parametrize("text", ["", "{}x", '["{}"]', "[1]", '[{"arch": "sm90"}]', '{"a": 1}'])
def test_bad_plans_are_refused(text: str, capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert pregenerate.main(["--plan", str(path), "--print-plan"]) == 1
    assert f"plan {path} cannot be read" in capsys.readouterr().err


def test_empty_sets_are_refused(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("[]")
    assert pregenerate.main(["--plan", str(path), "--print-plan"]) == 1
    assert "the set is empty" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    script = Path(__file__).parents[2] / "scripts" / "pregenerate.py"
    command = f"{sys.executable} {script} --print-plan --arch all | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "[\n" and done.stderr == ""


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--out x --jobs 0",
        "--plan p.json --arch sm90 --out x",
        "--quantize bf16 --config x --out x",
        "--scheme static --out x",
        "--arch sm70 --out x",
    ],
)
def test_wrong_usage_is_status_2(words: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        pregenerate.main(words.split())
    assert caught.value.code == 2


def test_sources_only_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_NVCC", "/no/such/nvcc")
    words = "--arch sm90 --a-dtype e4m3 --epilogue scaled_token_channel --sources-only".split()
    specs = plan(capsys, *words)
    assert pregenerate.main([*words, "--out", str(tmp_path)]) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "sources").iterdir()}
    assert written.keys() == {"host_prelude.h", *(f"{spec.name}.cu" for spec in specs)}
    assert all(written[f"{spec.name}.cu"] == emit.render(spec)["kernel.cu"] for spec in specs)


def test_python_without_the_package_is_told_apart() -> None:
    command = [sys.executable, "-S", str(Path(pregenerate.__file__)), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("pregenerate: the package is not installed in this Python (")
    assert ".venv/bin/python" in done.stderr and "pip install ." in done.stderr


def test_jobs_fit_cores_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker, "_MEMORY_LIMITS", (tmp_path / "memory.max", tmp_path / "limit_in_bytes"))
    monkeypatch.setattr(worker, "_CPU_LIMIT", tmp_path / "cpu.max")

    def machine(cores: int, gigabytes: int) -> int:
        sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": gigabytes * 10**9 // 4096}
        monkeypatch.setattr(pregenerate.os, "sysconf", sizes.__getitem__)
        monkeypatch.setattr(pregenerate.os, "sched_getaffinity", lambda pid: range(cores))
        return pregenerate.default_jobs()

    assert [machine(16, 128), machine(64, 62), machine(2, 24), machine(8, 2)] == [16, 15, 2, 1]
    # A container's share of a large machine, with and without limits.
    for name, text, expected in (
        ("memory.max", "max\n", 16),
        ("memory.max", f"{9 * 10**9}\n", 2),
        ("memory.max", f"{100 * 10**9}\n", 16),
        ("limit_in_bytes", "9223372036854771712\n", 16),
        ("limit_in_bytes", f"{12 * 10**9}\n", 3),
        ("limit_in_bytes", f"{100 * 10**9}\n", 16),
        ("cpu.max", "max 100000\n", 16),
        ("cpu.max", "250000 100000\n", 3),
    ):
        (tmp_path / name).write_text(text)
        assert machine(16, 128) == expected, (name, text)
