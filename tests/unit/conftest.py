"""Fixtures: compilers that take milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cutlass_w8a8.cache import chain, location, temporary, users
from cutlass_w8a8.cache.location import LIMIT_VARIABLE, PACKS_VARIABLE, ROOT_VARIABLE
from cutlass_w8a8.toolchain import discover, headers
from cutlass_w8a8.toolchain.process import TIMEOUT_VARIABLE
from tests.fake_tools import FakeTools


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
