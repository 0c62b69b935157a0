"""Compilers made of shell built-ins, so that everything around them is tested in milliseconds."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cutlass_w8a8 import acquire, background, calls, ops, pipeline, prepared, quantize
from cutlass_w8a8.arch import SM90
from cutlass_w8a8.runtime import device
from cutlass_w8a8.toolchain import discover, headers
from tests.unit.fake_gpu import WHERE, FakeGpu, OnGpu

NVCC = """\
#!/bin/sh
case "$*" in
  --version) echo "nvcc: fake"; echo "Cuda compilation tools, release {version}, V{version}.7";;
  --list-gpu-code) for n in 75 80 86 87 89 90 100 103 110 120 121; do echo "sm_$n"; done;;
  -dryrun*) echo '#$ INCLUDES="-I{include}"  ' >&2; echo '#$ SYSTEM_INCLUDES="-isystem" "{include}/cccl"  ' >&2;;
  *)
    echo "$PWD $TMPDIR $*" >> {calls}
    {device}
    echo "ptxas info    : Compiling entry function 'w8a8_kernel' for 'sm_90a'"
    echo "ptxas info    : Function properties for w8a8_kernel"
    echo "    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads"
    echo "ptxas info    : Used 168 registers, used 2 barriers"
    echo "image {include}" > kernel.fatbin;;
esac
"""
CXX = """\
#!/bin/sh
case "$*" in
  --version) echo "{cxx_version}";;
  *-shared*) {link}
    echo "library" > kernel.so;;
  *) {host}
    echo "object" > host.o;;
esac
"""


# What a kernel's library exports, in C.
LIBRARY = """
struct { int abi_version, smem_bytes, threads, params_bytes, operands; } w8a8_info = {2, 4096, 256, 0, 0};
char w8a8_image[8], w8a8_image_end;
int w8a8_launch(void* call) { return 0; }
long w8a8_workspace(void* call) { return 0; }
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that can be loaded."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "kernel.c").write_text(LIBRARY)
    subprocess.run(["gcc", "-shared", "-fPIC", "kernel.c", "-o", "kernel.so"], cwd=folder, check=True)
    return folder / "kernel.so"


@dataclass
class FakeTools:
    """A toolkit, a host compiler and a CUTLASS tree in one directory."""

    root: Path

    @property
    def nvcc(self) -> Path:
        return self.root / "cuda" / "bin" / "nvcc"

    @property
    def cxx(self) -> Path:
        return self.root / "bin" / "g++"

    @property
    def cutlass(self) -> Path:
        return self.root / "cutlass"

    @property
    def calls(self) -> list[str]:
        """One line for each device compilation."""
        log = self.root / "calls"
        return log.read_text().splitlines() if log.exists() else []

    def write(
        self,
        *,
        version: str = "13.0",
        cxx_version: str = "g++ 12.2.0",
        device: str = ":",
        host: str = ":",
        link: str = ":",
    ) -> None:
        """Install the compilers; ``device``, ``host`` and ``link`` are shell commands run by the three steps."""
        include = self.root / "cuda" / "include"
        values = {
            "version": version,
            "cxx_version": cxx_version,
            "include": include,
            "calls": self.root / "calls",
            "device": device,
            "host": host,
            "link": link,
        }
        (include / "cccl").mkdir(parents=True, exist_ok=True)
        (include / "cuda_runtime.h").touch()
        for path, text in ((self.nvcc, NVCC), (self.cxx, CXX)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(**values))
            path.chmod(0o755)

    def write_headers(self, marker: str = "") -> None:
        """Install a CUTLASS tree of two files."""
        for name, text in {
            "cutlass/version.h": "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n",
            "cute/tensor.hpp": f"// {marker}\n",
        }.items():
            path = self.cutlass / "include" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))


@pytest.fixture
def fake_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTools:
    """Fake tools, found through the environment, and nothing of the real machine's."""
    tools = FakeTools(tmp_path / "tools")
    tools.write()
    tools.write_headers()
    for name in ("CUDA_HOME", "CUDA_PATH", "CUTLASS_W8A8_JIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUTLASS_W8A8_NVCC", str(tools.nvcc))
    monkeypatch.setenv("CXX", str(tools.cxx))
    monkeypatch.setenv("CUTLASS_W8A8_CUTLASS_DIR", str(tools.cutlass))
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", str(tmp_path / "cache"))
    discover._find.cache_clear()
    headers._read.cache_clear()
    return tools


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGpu]:
    """A fake GPU of compute capability 9.0, under ``CUTLASS_W8A8_JIT=background``."""
    fake = FakeGpu()
    monkeypatch.setenv("CUTLASS_W8A8_JIT", "background")
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(pipeline, "find", fake.find)
    monkeypatch.setattr(pipeline, "build", fake.build)
    monkeypatch.setattr(acquire, "load", fake.load)
    monkeypatch.setattr(background, "compile_behind", fake.compile_behind)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(acquire, "_loaded", {})
    monkeypatch.setattr(device, "current_device", lambda: 0)
    for module in (calls, quantize):
        monkeypatch.setattr(module, "device", lambda index: WHERE)
        monkeypatch.setattr(module, "arch_of", lambda where: SM90)
        monkeypatch.setattr(module, "current_device", lambda: 0)
        monkeypatch.setattr(module, "raw_stream", lambda index: 7)
    for module in (ops, prepared, quantize):
        monkeypatch.setattr(module, "PLAIN", frozenset((*calls.PLAIN, OnGpu)))
    calls.forget()
    quantize._prepared.forget()
    yield fake
    calls.forget()
    quantize._prepared.forget()
