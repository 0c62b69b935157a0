"""GPU tests: skipped where no CUDA device is visible, or none that kernels are written for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import cutlass_w8a8
from tests import gpu_checks
from tests.harness import Plan, load_plan

PLAN_VARIABLE = "CUTLASS_W8A8_TEST_PLAN"
"""A JSON list of kernel specifications to test; without it, a few combinations run as dispatch decides."""


def _reason_to_skip() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    support = cutlass_w8a8.is_supported(torch.cuda.get_device_capability(), torch.int8)
    return None if support else f"needs another CUDA device: {support.reason}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    reason = _reason_to_skip()
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def plan() -> Plan:
    """The combinations and configurations to test."""
    path = os.environ.get(PLAN_VARIABLE)
    if path:
        return load_plan(Path(path))
    capability = torch.cuda.get_device_capability()
    return {
        combination: [None]
        for combination in gpu_checks.COMMON
        if cutlass_w8a8.is_supported(capability, combination.operand_dtype, combination.out_dtype, azp=combination.azp)
    }
