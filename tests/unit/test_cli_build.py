"""The commands that compile and list: ``build`` and ``list``, with compilers that take milliseconds."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cutlass_w8a8 import batch, pipeline
from cutlass_w8a8.arch import SM80, SM90
from cutlass_w8a8.cli import commands, main
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.spec import KernelSpec, QuantSpec

Capture = pytest.CaptureFixture[str]


@dataclass
class FakeInfo:
    smem_bytes: int = 81920
    threads: int = 384


class FakeLibrary:
    def __init__(self, path: str) -> None:
        assert Path(path).read_text() == "library\n"
        self.info = FakeInfo()


@pytest.fixture
def tools(fake_tools: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compilers that take milliseconds; what they make cannot be loaded."""
    monkeypatch.setattr(commands, "Library", FakeLibrary)
    return fake_tools


def rows(out: str) -> dict[str, str]:
    return {line[:15].strip(): line[15:] for line in out.splitlines()}


def test_quantisation_is_built_and_listed_like_any_kernel(tools: Any, capsys: Capture) -> None:
    spec = QuantSpec(SM80, DType.FP16, DType.E4M3)
    assert main(spec.command("build").split()[1:]) == 0
    assert rows(capsys.readouterr().out)["kernel"] == spec.name == "sm80_quantize_fp16_e4m3"
    assert pipeline.find(spec) is not None
    assert main(["list"]) == 0
    assert spec.name in capsys.readouterr().out


def test_build_compiles_once_and_says_so(tools: Any, capsys: Capture) -> None:
    words = ["build", "--config", "128x128x128_pingpong"]
    spec = KernelSpec(SM90, DType.E4M3, DType.BF16, EpilogueSpec.of(), KernelConfig.parse("128x128x128_pingpong"))
    assert main(words) == 0
    first = rows(capsys.readouterr().out)
    entry = pipeline.find(spec)
    assert entry is not None
    assert first["state"] == "compiled" and first["kernel"] == spec.name
    assert first["key"] == entry.key and first["library"] == str(entry.library) and first["source"] == str(entry.source)
    assert first["registers"] == "168 a thread" and first["spills"] == "12 bytes a thread"
    assert first["shared memory"] == "81920 bytes a block" and first["threads"] == "384 a block"
    assert first["compiler"] == "nvcc 13.0.7, CUTLASS 4.2.0"
    assert main(words) == 0
    again = rows(capsys.readouterr().out)
    assert again == first | {"state": "was in the cache"}
    assert len(tools.calls) == 1
    assert main([*words, "--force"]) == 0
    assert rows(capsys.readouterr().out)["state"] == "compiled"
    assert len(tools.calls) == 2


def test_build_compiles_even_where_first_use_must_not(
    tools: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_JIT", "off")
    assert main(["build", "--config", "128x128x128_pingpong"]) == 0
    assert rows(capsys.readouterr().out)["state"] == "compiled"


def test_compile_failure_is_status_1_with_the_log(tools: Any, capsys: Capture) -> None:
    tools.write(device="echo 'error: expected a ;' >&2; exit 1")
    assert main(["build", "--config", "128x128x128_pingpong"]) == 1
    captured = capsys.readouterr()
    assert "error: expected a ;" in captured.err and "Traceback" not in captured.err


def test_library_that_cannot_be_loaded_is_status_1(fake_tools: Any, capsys: Capture) -> None:
    assert main(["build", "--config", "128x128x128_pingpong"]) == 1
    captured = capsys.readouterr()
    assert "cannot be loaded" in captured.err and "--force" in captured.err


def test_list_shows_each_kernel(tools: Any, capsys: Capture) -> None:
    assert main(["list"]) == 0
    assert capsys.readouterr().out.startswith("0 kernels, 0 KB, in ")
    for config in ("128x128x128_pingpong", "64x32x128_pingpong_swap"):
        assert main(["build", "--config", config]) == 0
    capsys.readouterr()
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kernel", "compiled", "with", "size", "date"]
    assert [line.split()[0] for line in lines[1:3]] == [
        "sm90_e4m3_bf16_scaled_token_channel_128x128x128_1x1_pingpong",
        "sm90_e4m3_bf16_scaled_token_channel_64x32x128_1x1_pingpong_swap",
    ]
    assert all(
        re.search(r"nvcc 13\.0\.7, CUTLASS 4\.2\.0 +\d+ KB +20\d\d-\d\d-\d\d \d\d:\d\d", line) for line in lines[1:3]
    )
    assert lines[3].startswith("2 kernels, ") and lines[3].endswith(os.environ["CUTLASS_W8A8_CACHE_DIR"])


def test_build_compiles_a_plan(tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    specs = [
        KernelSpec(SM90, DType.E4M3, DType.BF16, EpilogueSpec.of(), KernelConfig.parse(name))
        for name in ("128x128x128_pingpong", "64x32x128_pingpong_swap")
    ]
    path = tmp_path / "plan.jsonl"
    path.write_text("".join(f"{spec.to_json()}\n" for spec in [*specs, specs[0]]))
    built: list[KernelSpec] = []

    def build_all(chosen: list[KernelSpec], jobs: int, console: object) -> list[batch.Outcome]:
        assert jobs == 3
        built.extend(chosen)
        return [batch.Outcome(spec, error="" if len(chosen) > 1 else "no room") for spec in chosen]

    monkeypatch.setattr(batch, "build_all", build_all)
    assert main(["build", "--plan", str(path), "--jobs", "3"]) == 0
    assert built == specs
    assert all(spec.name in capsys.readouterr().out for spec in specs[:1])
    path.write_text(specs[0].to_json())
    assert main(["build", "--plan", str(path), "--jobs", "3"]) == 1
    assert "no room" in capsys.readouterr().out
    path.write_text("\n")
    assert main(["build", "--plan", str(path)]) == 1
    assert f"plan {path} cannot be read" in capsys.readouterr().err
