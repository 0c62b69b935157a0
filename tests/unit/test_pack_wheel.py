"""pregenerate --wheel: what the wheel holds, that pip installs it, and that the kernels in it are found."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cutlass_w8a8 import pipeline
from cutlass_w8a8.arch import SM80, SM90, arch_named
from cutlass_w8a8.cache.location import PACKS_GROUP
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import CacheError
from cutlass_w8a8.spec import QuantSpec, Scheme
from cutlass_w8a8.version import VERSION
from scripts import pack_wheel, pregenerate
from tests.unit.test_background import SPECS

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]
PACKAGE = "cutlass_w8a8_kernels_sm90_e4m3_int8"
QUANTISES = [QuantSpec(SM90, DType.BF16, target, scheme) for scheme in Scheme for target in scheme.targets]


@pytest.fixture
def tools(fake_tools: Any, library: Path) -> Any:
    fake_tools.write(link=f"cp {library} kernel.so; exit 0")
    return fake_tools


# What runs where the wheel is installed: the kernels named, one a line, or the error.
SERVE = """
import sys
from cutlass_w8a8 import counters, pipeline
from cutlass_w8a8.errors import CacheError
from cutlass_w8a8.spec import spec_from_json
try:
    for text in sys.argv[1:]:
        entry = pipeline.build(spec_from_json(text))
        print(entry.compiled, entry.library)
    print(counters.snapshot())
except CacheError as error:
    print("CacheError", error)
"""


def serve(site: Path, cache: Path, tools: Any, *specs: QuantSpec) -> list[str]:
    """What `SERVE` prints in a fresh process that has the wheel, an empty cache and no leave to compile."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("CUTLASS_W8A8_")}
    environment |= {
        # Keys hold the headers' digest.
        "CUTLASS_W8A8_CUTLASS_DIR": str(tools.cutlass),
        "CUTLASS_W8A8_CACHE_DIR": str(cache),
        "CUTLASS_W8A8_JIT": "off",
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
    }
    command = [sys.executable, "-c", SERVE, *(spec.to_json() for spec in specs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    return done.stdout.splitlines()


def test_a_wheel_that_pip_installs_is_found(tools: Any, tmp_path: Path, capsys: Capture) -> None:
    words = f"--arch sm90 --quantize bf16 --wheel {tmp_path / 'dist'} --out {tmp_path / 'own'}".split()
    assert pregenerate.main(words) == 0
    (path,) = (tmp_path / "dist").iterdir()
    out = capsys.readouterr().out
    assert f"pip install {path}" in out and f"CUTLASS_W8A8_CACHE_DIR=<its copy of {tmp_path / 'own'}>" in out
    assert path.name.startswith(f"{PACKAGE}-{VERSION}-py3-none-manylinux_2_")
    assert path.name.endswith(f"_{platform.machine()}.whl")
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(site), str(path)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    (distribution,) = importlib.metadata.distributions(path=[str(site)])
    assert distribution.metadata["Name"] == PACKAGE.replace("_", "-") and distribution.version == VERSION
    assert distribution.requires == [f"cutlass-w8a8 (=={VERSION})"]
    (point,) = distribution.entry_points
    assert (point.group, point.name, point.value) == (PACKS_GROUP, "sm90_e4m3_int8", PACKAGE)
    # Nothing of what made it is needed where it serves, and nothing is written there.
    shutil.rmtree(tmp_path / "own")
    calls, cache = len(tools.calls), tmp_path / "empty"
    *lines, counted = serve(site, cache, tools, *QUANTISES)
    assert len(lines) == len(QUANTISES) == calls
    assert all(line.startswith(f"False {site / PACKAGE / 'v1' / 'objects'}{os.sep}") for line in lines)
    assert f"lookups={calls}, hits={calls}, pack_hits={calls}, compiles=0" in counted
    assert not cache.exists() and len(tools.calls) == calls
    # What it does not hold is an error that tells where it was looked for and how to get it.
    missing = QuantSpec(SM80, DType.BF16, DType.INT8, Scheme.TENSOR)
    (refused,) = serve(site, cache, tools, missing)
    for part in ("CacheError", missing.name, str(cache), str(site / PACKAGE), f"with: {missing.command('build')}"):
        assert part in refused


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
    assert sum(name.startswith(f"{package}/v1/entries/") for name in names) == len(QUANTISES)
    assert sum(name.endswith("/kernel.so") for name in names) == len(QUANTISES)
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
    words = f"--arch sm90 --a-dtype int8 --quantize bf16 --scheme token --wheel {tmp_path / 'dist'}"
    assert pregenerate.main(words.split()) == 1
    assert not (tmp_path / "dist").exists() and "1 failed" in capsys.readouterr().out
    with pytest.raises(CacheError, match="is not in the cache; compile it with: cutlass-w8a8 build"):
        pack_wheel.write_wheel(QUANTISES, tmp_path / "dist", "x")
