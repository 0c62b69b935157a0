"""What a process pays before its first call: modules, not times, which are scripts/measure_start.py's business."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

# Those that compiling needs and serving does not; those that only tools need; and what a driver is needed for.
COMPILING = {"cutlass_cppgen", "cutlass_library", "jinja2", "rich"}
TOOLS = {
    "matplotlib",
    "numpy.testing",
    "multiprocessing.pool",
    "cutlass_w8a8.cli",
    "cutlass_w8a8.bench",
    "cutlass_w8a8.tune",
}
LATER = {
    "platformdirs",
    "cuda",
    "cutlass_w8a8.cache",
    "cutlass_w8a8.pipeline",
    "cutlass_w8a8.dispatch",
    "cutlass_w8a8.toolchain",
}

LISTED = (
    "import json, sys, torch; before = set(sys.modules); {code}; print(json.dumps(sorted(set(sys.modules) - before)))"
)


def imported(code: str) -> set[str]:
    """The modules that ``code`` brings in beyond torch's, in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", LISTED.format(code=code)], capture_output=True, text=True, check=True, timeout=120
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "code",
    [
        "import cutlass_w8a8",
        "import cutlass_w8a8; a = torch.zeros(4, 64, dtype=torch.int8); s = torch.ones(4, 1); "
        "cutlass_w8a8.scaled_mm(a, torch.zeros(8, 64, dtype=torch.int8).t(), s, torch.ones(1, 8)); "
        "cutlass_w8a8.quantize_per_token(torch.zeros(4, 64), torch.int8); "
        "cutlass_w8a8.quantize(torch.zeros(4, 64), torch.int8, symmetric=False); cutlass_w8a8.stats(); "
        "torch.ops.cutlass_w8a8.scaled_mm_out",
    ],
    ids=["import", "CPU calls"],
)
def test_import_brings_in_what_calls_need(code: str) -> None:
    new = imported(code)
    assert "cutlass_w8a8.ops" in new
    assert not new & (COMPILING | TOOLS | LATER)


def test_finding_a_kernel_needs_neither_templates_nor_progress_bars(fake_tools: Any) -> None:
    code = (
        "import cutlass_w8a8.acquire; from cutlass_w8a8.arch import SM90; from cutlass_w8a8.dtypes import DType; "
        "from cutlass_w8a8.spec import QuantSpec; "
        "assert cutlass_w8a8.pipeline.find(QuantSpec(SM90, DType.BF16, DType.INT8)) is None"
    )
    new = imported(code)
    assert {"cutlass_w8a8.pipeline", "cutlass_w8a8.emit.render"} <= new
    assert not new & (COMPILING | TOOLS | {"cutlass_w8a8.background", "cutlass_w8a8.worker", "cuda"})
