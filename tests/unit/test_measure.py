"""The scripts that measure a start and a compilation: that they run, and what they write down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cutlass_w8a8 import calls
from scripts import measure_compile, measure_start

Capture = pytest.CaptureFixture[str]


def test_start(fake_tools: Any, library: Path, tmp_path: Path, capsys: Capture) -> None:
    fake_tools.write(link=f"cp {library} kernel.so; exit 0")
    path = tmp_path / "start.json"
    resolve = calls.resolve
    assert measure_start.main(["--runs", "1", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    kernel = result["milliseconds"]["sm90_quantize_bf16_int8"]
    found = {"modules of the first call", "key", "look-up", "dlopen", "all of these"}
    assert kernel.keys() == {"import cutlass_w8a8, beyond torch"} | found
    assert all(0 < least <= middle for middle, least in kernel.values())
    assert kernel["import cutlass_w8a8, beyond torch"][0] > 1
    assert 0 < result["microseconds"]["prepared, out given"][1] < 1000
    assert result["machine"]["python"] and len(fake_tools.calls) == 1
    assert "first calls were not timed" in capsys.readouterr().out
    # It leaves the package as it was.
    assert calls.resolve is resolve and not calls._kept


def test_starts_get_ready_together_and_are_measured_one_by_one() -> None:
    body = """
import os
took["begin"] = time.clock_gettime(time.CLOCK_BOOTTIME)
took["started"] = int(open("/proc/self/stat").read().rsplit(")")[1].split()[19]) / os.sysconf("SC_CLK_TCK")
time.sleep(0.3)
took["end"] = time.clock_gettime(time.CLOCK_BOOTTIME)
assert "torch" in sys.modules
"""
    first, second = (json.loads(line) for line in measure_start._batch(body, 2, []))
    assert second["started"] < first["begin"] < first["end"] < second["begin"] < second["end"]


def test_a_start_that_fails_is_an_error(
    fake_tools: Any, library: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    fake_tools.write(link=f"cp {library} kernel.so; exit 0")
    monkeypatch.setattr(measure_start, "FIND", "sys.exit(3)")
    assert measure_start.main(["--runs", "1"]) == 1
    told = capsys.readouterr()
    assert "a process that measures ended with status 3" in told.err
    # What was measured by then has been told.
    assert "prepared, out given" in told.out


def test_compile(fake_tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_QUIET", "1")
    # Alone of the two, plain nvcc makes a shared library by itself.
    fake_tools.write(device='case "$*" in *-shared*) sleep 0.4; echo > plain.so;; esac')
    path = tmp_path / "compile.json"
    assert measure_compile.main(["--pairs", "2", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert [run["way"] for run in result["runs"]] == ["ours", "plain", "plain", "ours"]
    walls = [run["wall"] for run in result["runs"]]
    assert result["ratios"] == [round(walls[0] / walls[1], 3), round(walls[3] / walls[2], 3)]
    assert result["bar"] == 0.55 and min(result["ratios"]) <= result["median"] <= max(result["ratios"])
    assert "ours takes" in capsys.readouterr().out
    ours, plain = fake_tools.calls[0], fake_tools.calls[1]
    assert "-fatbin" in ours and "-shared" not in ours and "plain.cu" in plain and "-fatbin" not in plain
    for flag in ("-std=c++17", "-O3", "-gencode arch=compute_90a,code=sm_90a"):
        assert flag in ours and flag in plain
    fake_tools.write(device="exit 1")
    assert measure_compile.main(["--pairs", "1"]) == 1
    assert "measure_compile: nvcc failed with status 1" in capsys.readouterr().err
