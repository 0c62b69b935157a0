"""What every test gets: a cache of its own, no variables of the user's, and no GPU test where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def isolated(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's cache and settings out of tests. GPU tests use both: their kernels take long to compile."""
    if request.node.get_closest_marker("gpu"):
        return
    for name in os.environ:
        # The compiler and headers to use are a fact about the machine.
        if name.startswith("CUTLASS_W8A8_") and name not in ("CUTLASS_W8A8_NVCC", "CUTLASS_W8A8_CUTLASS_DIR"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", str(tmp_path / "kernel-cache"))
