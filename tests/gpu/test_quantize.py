"""Quantisation on the GPU at hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import quant_checks
from tests.harness import Check


@pytest.mark.parametrize(
    "run",
    [quant_checks.order, quant_checks.handed_on, quant_checks.graph, quant_checks.compiled],
    ids=lambda run: run.__name__,
)
def test_surroundings(run: Callable[[str], list[Check]]) -> None:
    none_failed(run("cuda"))


def test_every_seventh_case() -> None:
    none_failed(quant_checks.correctness("cuda", limit=1 << 22, step=7))
    none_failed(quant_checks.ways("cuda", limit=1 << 22, step=7))


def none_failed(checks: list[Check]) -> None:
    assert not [failure for check in checks for failure in check.failures]
    assert all(check.passed for check in checks)
