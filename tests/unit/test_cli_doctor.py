"""``doctor``: what it finds, what it calls bad, and the remedy it names."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import cutlass_w8a8
from cutlass_w8a8.cli import about, main
from cutlass_w8a8.version import VERSION

Capture = pytest.CaptureFixture[str]


def test_doctor_finds_what_is_there(fake_tools: Any, capsys: Capture) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"ok +nvcc +13\.0\.7, {re.escape(str(fake_tools.nvcc))} \(from CUTLASS_W8A8_NVCC\)", out)
    assert re.search(r"ok +C\+\+ compiler +g\+\+ 12\.2\.0", out)
    # These headers are two files, not those of the pinned package.
    assert re.search(r"note +CUTLASS headers +4\.2\.0", out) and "keys of their own" in out
    assert re.search(rf"ok +cache +{re.escape(os.environ['CUTLASS_W8A8_CACHE_DIR'])}, writable, [\d.]+ GB free", out)
    assert out.splitlines()[-1] == "everything suffices"


def test_doctor_tells_what_a_report_of_a_defect_needs(
    fake_tools: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pack = Path(os.environ["CUTLASS_W8A8_CACHE_DIR"]).parent / "pack"
    pack.mkdir()
    monkeypatch.setenv("CUTLASS_W8A8_PACKS", str(pack))
    for policy, told in (
        ("", "ok +first-use compile +block\n"),
        ("on", r"ok +first-use compile +block \(CUTLASS_W8A8_JIT\)\n"),
        ("background", r"ok +first-use compile +background \(CUTLASS_W8A8_JIT\), \d+ at a time\n"),
    ):
        monkeypatch.setenv("CUTLASS_W8A8_JIT", policy)
        assert main(["doctor"]) == 0
        out = capsys.readouterr().out
        assert re.search(told, out)
    for what, found in {
        "cutlass_w8a8": rf"{re.escape(VERSION)}, {re.escape(str(Path(cutlass_w8a8.__file__).parent))}",
        "system": r"Linux.* cores, \d+ GB: \d+ compilations at a time",
        "packages": r"nvidia-cutlass 4\.2\.0\.0, cuda-bindings \d.*, platformdirs \d",
        "tuned tables": r"NVIDIA H200 \(132 multiprocessors, sm90\)",
        "packs": re.escape(str(pack)),
        "variables": r"CUTLASS_W8A8_CACHE_DIR=.*, CUTLASS_W8A8_JIT=background, .*CUTLASS_W8A8_PACKS=.*, CXX=",
    }.items():
        assert re.search(rf"^ok +{what} +{found}", out, re.MULTILINE), what


def test_doctor_refuses_tables_that_calls_would(
    fake_tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_TABLES", str(tmp_path / "missing.json"))
    assert main(["doctor"]) == 1
    assert re.search(r"bad +tuned tables +not usable\n +CUTLASS_W8A8_TABLES: .*missing.json", capsys.readouterr().out)


def test_the_drivers_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "version"
    monkeypatch.setattr(about, "_DRIVER", path)
    assert about.driver_version() == ""
    for text, expected in (
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\nGCC version: 12", "535.129.03, "),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159  Release Build", "580.159, "),
        ("something else", ""),
    ):
        path.write_text(text)
        assert about.driver_version() == expected


@pytest.mark.parametrize(
    ("damage", "what", "remedy"),
    [
        ("no nvcc", "nvcc", "set it to the path of nvcc, or unset it; needed to compile kernels"),
        ("old nvcc", "nvcc", "pip install nvidia-cuda-nvcc"),
        ("no compiler", "C++ compiler", "is not an executable"),
        ("no headers", "CUTLASS headers", "pip install nvidia-cutlass==4.2.0.0"),
        ("relative cache", "cache", "give an absolute one"),
        ("file as cache", "cache", "set CUTLASS_W8A8_CACHE_DIR to one"),
        ("strange switch", "first-use compile", "block, on, 1, true, yes, background, off"),
        ("strange limit", "first-use compile", "CUTLASS_W8A8_CACHE_LIMIT=much is no size; write it like 2GB"),
        ("strange timeout", "first-use compile", "CUTLASS_W8A8_COMPILE_TIMEOUT=soon is no positive number of seconds"),
    ],
)
def test_doctor_names_what_is_wrong_and_the_remedy(
    damage: str,
    what: str,
    remedy: str,
    fake_tools: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    if damage == "no nvcc":
        fake_tools.nvcc.unlink()
        monkeypatch.setenv("CUTLASS_W8A8_NVCC", str(fake_tools.nvcc) + "-gone")
    elif damage == "old nvcc":
        fake_tools.write(version="11.8")
    elif damage == "no compiler":
        monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    elif damage == "no headers":
        shutil.rmtree(fake_tools.cutlass)
    elif damage == "relative cache":
        monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", "kernels")
    elif damage == "file as cache":
        (tmp_path / "file").touch()
        monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", str(tmp_path / "file"))
    elif damage == "strange limit":
        monkeypatch.setenv("CUTLASS_W8A8_CACHE_LIMIT", "much")
    elif damage == "strange timeout":
        monkeypatch.setenv("CUTLASS_W8A8_COMPILE_TIMEOUT", "soon")
    else:
        monkeypatch.setenv("CUTLASS_W8A8_JIT", "maybe")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    bad = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("bad")]
    assert len(bad) == 1 and bad[0].startswith(what)
    assert remedy in out
    assert out.splitlines()[-1].startswith("1 of these")


def test_doctor_notes_that_first_use_compilation_is_off(
    fake_tools: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_JIT", "off")
    assert main(["doctor"]) == 0
    assert re.search(r"note +first-use compile +off", capsys.readouterr().out)


def test_without_first_use_compilation_no_compiler_is_needed(
    fake_tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_JIT", "off")
    monkeypatch.setenv("CUTLASS_W8A8_NVCC", "/no/such/nvcc")
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for what in ("nvcc", r"C\+\+ compiler"):
        assert re.search(rf"note +{what} +not usable\n +not needed while CUTLASS_W8A8_JIT=off; only cached kern", out)


def test_missing_host_compiler_does_not_hide_nvcc(
    fake_tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"ok +nvcc +13\.0\.7", out) and re.search(r"bad +C\+\+ compiler +not usable", out)
