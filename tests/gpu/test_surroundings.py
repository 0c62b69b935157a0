"""Graphs, streams, threads, changing arguments, torch.compile and opcheck."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import gpu_checks
from tests.harness import Check, Plan

CHECKS = (
    gpu_checks.graph,
    gpu_checks.streams,
    gpu_checks.threads,
    gpu_checks.arguments,
    gpu_checks.compiled,
    gpu_checks.opcheck,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda function: function.__name__)
def test_surroundings(plan: Plan, check: Callable[[Plan], list[Check]]) -> None:
    results = check(plan)
    failures = [failure for result in results for failure in result.failures]
    assert not failures, "\n".join(failures[:10])
    assert sum(result.passed for result in results) > 0
