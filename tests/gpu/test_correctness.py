"""Outputs against the reference: int8 to the last bit, fp8 within its bound and as the tensor core is modelled."""

from __future__ import annotations

from tests import cases, grid
from tests.family_checks import judged
from tests.harness import Check, Plan


def none_failed(checks: list[Check]) -> None:
    failures = [f"{check.name}: {failure}" for check in checks for failure in check.failures]
    assert not failures, "\n".join(failures[:10])
    assert sum(check.passed for check in checks) > 0


def test_odd_shapes(plan: Plan) -> None:
    none_failed(grid.Grid(plan, "cuda", **judged("cuda")).run(cases.SMALL_SHAPES))


def test_every_tenth_shape_of_the_grid(plan: Plan) -> None:
    none_failed(grid.Grid(plan, "cuda", **judged("cuda")).run(cases.shapes()[::10]))


def test_rows_do_not_depend_on_the_batch(plan: Plan) -> None:
    none_failed(grid.row_invariance(plan, "cuda"))
