"""Fixtures: compilers that take milliseconds, and a GPU that is not there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cutlass_w8a8 import acquire, background, batch, calls, ops, pipeline, prepared, quant_calls, quant_ops, warm
from cutlass_w8a8.arch import SM90
from cutlass_w8a8.cache import chain, location, temporary, users
from cutlass_w8a8.cache.location import LIMIT_VARIABLE, PACKS_VARIABLE, ROOT_VARIABLE
from cutlass_w8a8.runtime import device
from cutlass_w8a8.spec import Spec
from cutlass_w8a8.toolchain import discover, headers
from cutlass_w8a8.toolchain.process import TIMEOUT_VARIABLE
from cutlass_w8a8.worker import Outcome
from tests.fake_tools import LIBRARY, FakeTools
from tests.unit.fake_gpu import WHERE, FakeGpu, OnGpu


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that can be loaded."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "kernel.c").write_text(LIBRARY)
    subprocess.run(["gcc", "-shared", "-fPIC", "kernel.c", "-o", "kernel.so"], cwd=folder, check=True)
    return folder / "kernel.so"


@pytest.fixture
def fake_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTools]:
    """Fake tools, found through the environment, and nothing of the real machine's."""
    tools = FakeTools(tmp_path / "tools")
    tools.write()
    tools.write_headers()
    for name in ("CUDA_HOME", "CUDA_PATH", "CUTLASS_W8A8_JIT", PACKS_VARIABLE, LIMIT_VARIABLE, TIMEOUT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in tools.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "cache"))
    location._advertised.cache_clear()
    location._warned.clear()
    monkeypatch.setattr(chain, "_fell_back", False)
    monkeypatch.setattr(temporary, "_made", [])
    discover._find.cache_clear()
    headers._read.cache_clear()
    yield tools
    users.leave()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGpu]:
    """A fake GPU of compute capability 9.0, under ``CUTLASS_W8A8_JIT=background``."""
    fake = FakeGpu()
    monkeypatch.setenv("CUTLASS_W8A8_JIT", "background")
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(pipeline, "find", fake.find)
    monkeypatch.setattr(pipeline, "build", fake.build)
    monkeypatch.setattr(acquire, "load", fake.load)
    monkeypatch.setattr(background, "compile_behind", fake.compile_behind)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(acquire, "_loaded", {})
    monkeypatch.setattr(device, "current_device", lambda: 0)
    for module in (calls, quant_calls):
        monkeypatch.setattr(module, "device", lambda index: WHERE)
        monkeypatch.setattr(module, "arch_of", lambda where: SM90)
        monkeypatch.setattr(module, "current_device", lambda: 0)
        monkeypatch.setattr(module, "raw_stream", lambda index: 7)
    for module in (ops, prepared, quant_ops):
        monkeypatch.setattr(module, "PLAIN", frozenset((*calls.PLAIN, OnGpu)))
    calls.forget()
    quant_calls._prepared.forget()
    yield fake
    calls.forget()
    quant_calls._prepared.forget()


@pytest.fixture
def compiled(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What was compiled by workers, `jobs` at a time; and how each ends."""
    found = SimpleNamespace(specs=[], jobs=[], errors={})

    def outcomes(specs: Sequence[Spec], jobs: int) -> Iterator[Outcome]:
        found.jobs.append(jobs)
        for spec in specs:
            found.specs.append(spec)
            error = found.errors.get(spec, "")
            if not error:
                gpu.disk.add(spec)
            yield Outcome(spec, compiled=not error, error=error)

    monkeypatch.setattr(batch, "outcomes", outcomes)
    monkeypatch.setattr(warm, "facts_of", lambda index: WHERE)
    monkeypatch.setattr(warm, "arch_of", lambda where: SM90)
    monkeypatch.setattr(warm, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return found
