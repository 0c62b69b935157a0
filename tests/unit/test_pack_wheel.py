"""pregenerate --wheel: what the wheel holds, that pip installs it, and that the kernels in it are found."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cutlass_w8a8 import pipeline
from cutlass_w8a8.arch import SM80, SM90, arch_named
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import CacheError
from cutlass_w8a8.spec import QuantSpec
from cutlass_w8a8.version import VERSION
from scripts import pack_wheel, pregenerate
from tests.unit.test_background import SPECS

Capture = pytest.CaptureFixture[str]
PACKAGE = "cutlass_w8a8_kernels_sm90_e4m3_int8"
QUANTISES = [QuantSpec(SM90, DType.BF16, target) for target in (DType.E4M3, DType.INT8)]


@pytest.fixture
def tools(fake_tools: Any, library: Path) -> Any:
    fake_tools.write(link=f"cp {library} kernel.so; exit 0")
    return fake_tools


def test_a_wheel_that_pip_installs_and_the_cache_reads(
    tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words = f"--arch sm90 --quantize bf16 --wheel {tmp_path / 'dist'} --out {tmp_path / 'own'}".split()
    assert pregenerate.main(words) == 0
    (path,) = (tmp_path / "dist").iterdir()
    out = capsys.readouterr().out
    assert f"pip install {path}" in out and f"CUTLASS_W8A8_CACHE_DIR=<its copy of {tmp_path / 'own'}>" in out
    assert path.name.startswith(f"{PACKAGE}-{VERSION}-py3-none-manylinux_2_")
    assert path.name.endswith(f"_{platform.machine()}.whl")
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(target), str(path)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    (distribution,) = importlib.metadata.distributions(path=[str(target)])
    assert distribution.metadata["Name"] == PACKAGE.replace("_", "-") and distribution.version == VERSION
    assert distribution.requires == [f"cutlass-w8a8 (=={VERSION})"]
    (point,) = distribution.entry_points
    assert (point.group, point.name, point.value) == ("cutlass_w8a8.packs", "sm90_e4m3_int8", PACKAGE)
    # The package is a cache directory as it stands.
    calls = len(tools.calls)
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", str(target / PACKAGE))
    monkeypatch.setenv("CUTLASS_W8A8_JIT", "off")
    for spec in QUANTISES:
        entry = pipeline.build(spec)
        assert not entry.compiled and entry.library.is_relative_to(target / PACKAGE)
    assert len(tools.calls) == calls == 2
    missing = QuantSpec(SM80, DType.BF16, DType.INT8)
    with pytest.raises(CacheError) as caught:
        pipeline.build(missing)
    for part in (missing.name, str(target / PACKAGE), missing.command("build")):
        assert part in str(caught.value)


def test_equal_kernels_give_equal_bytes(tools: Any, tmp_path: Path, capsys: Capture) -> None:
    """Filled from the ordinary cache, with what else that holds left out."""
    pipeline.build(QuantSpec(SM80, DType.BF16, DType.INT8))
    wheels = []
    for folder in ("first", "second"):
        words = f"--arch sm90 --quantize bf16 --wheel {tmp_path / folder} --name mine".split()
        assert pregenerate.main(words) == 0
        (path,) = (tmp_path / folder).iterdir()
        wheels.append(path.read_bytes())
    assert wheels[0] == wheels[1] and path.name.startswith("cutlass_w8a8_kernels_mine-")
    assert "CACHE_DIR" not in capsys.readouterr().out.splitlines()[-1]
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        assert all(entry.date_time == (1980, 1, 1, 0, 0, 0) for entry in archive.infolist())
        package, info = "cutlass_w8a8_kernels_mine", f"cutlass_w8a8_kernels_mine-{VERSION}.dist-info"
        recorded = {}
        for line in archive.read(f"{info}/RECORD").decode().splitlines():
            name, digest, size = line.split(",")
            recorded[name] = digest
            if digest:
                content = archive.read(name)
                hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                assert (digest, size) == (f"sha256={hashed}", str(len(content)))
    assert sorted(recorded) == sorted(names) and recorded[f"{info}/RECORD"] == ""
    assert sum(name.startswith(f"{package}/v1/entries/") for name in names) == 2
    assert sum(name.endswith("/kernel.so") for name in names) == 2
    kinds = {name.split("/")[2] for name in names if name.startswith(f"{package}/v1/")}
    assert kinds == {"entries", "objects"}


def test_the_tag_is_what_the_libraries_need() -> None:
    def tag(*contents: bytes) -> str:
        return pack_wheel.platform_tag({f"v1/objects/{i}/kernel.so": content for i, content in enumerate(contents)})

    machine = platform.machine()
    assert tag(b"library\n") == f"manylinux_2_17_{machine}"
    assert tag(b"\0GLIBC_2.2.5\0", b"x\0GLIBC_2.34\0GLIBC_2.3\0") == f"manylinux_2_34_{machine}"
    # Only what is a library is asked.
    assert pack_wheel.platform_tag({"v1/objects/0/kernel.cu": b"GLIBC_2.99\0"}) == f"manylinux_2_17_{machine}"


def test_names() -> None:
    assert pack_wheel.default_name(QUANTISES[:1]) == pack_wheel.default_name(SPECS) == "sm90_e4m3"
    mixed = [*SPECS, QuantSpec(arch_named("sm86"), DType.BF16, DType.INT8)]
    assert pack_wheel.default_name(mixed) == "sm90_sm86_e4m3_int8"


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--wheel {dist} --name a-b", 1, "--name 'a-b': use lower-case letters"),
        ("--out {dist} --name ab", 2, "--name is a wheel's"),
        ("--wheel {dist} --sources-only", 2, "leave out --sources-only"),
    ],
)
def test_wrong_usage(fake_tools: Any, tmp_path: Path, capsys: Capture, words: str, status: int, message: str) -> None:
    given = ["--arch", "sm90", "--quantize", "bf16", *words.format(dist=tmp_path / "dist").split()]
    if status == 2:
        with pytest.raises(SystemExit) as caught:
            pregenerate.main(given)
        assert caught.value.code == 2
    else:
        assert pregenerate.main(given) == status
    assert message in capsys.readouterr().err and not (tmp_path / "dist").exists()


def test_no_wheel_of_what_failed(fake_tools: Any, tmp_path: Path, capsys: Capture) -> None:
    fake_tools.write(device="exit 1")
    words = f"--arch sm90 --a-dtype int8 --quantize bf16 --wheel {tmp_path / 'dist'}"
    assert pregenerate.main(words.split()) == 1
    assert not (tmp_path / "dist").exists() and "1 failed" in capsys.readouterr().out
    with pytest.raises(CacheError, match="is not in the cache; compile it with: cutlass-w8a8 build"):
        pack_wheel.write_wheel(QUANTISES, tmp_path / "dist", "x")
