"""Selection: a problem to its configuration, by the tables of its arch."""

from __future__ import annotations

from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch import sm80, sm90
from cutlass_w8a8.dispatch.table import Row
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import UnsupportedError
from cutlass_w8a8.problem import Problem

TABLES: dict[str, dict[DType, tuple[Row, ...]]] = {"sm80": sm80.TABLES, "sm90": sm90.TABLES}


def select(problem: Problem) -> KernelConfig:
    """The configuration of the row that fits ``problem`` and is expected to take least.

    Raises:
        UnsupportedError: the arch has no table for this operand type, or no row fits.
    """
    tables = TABLES[problem.arch.name]
    if problem.operand not in tables:
        served = ", ".join(dtype.value for dtype in tables)
        raise UnsupportedError(f"{problem.arch.name} has no {problem.operand.value} kernels; it serves {served}")
    extents = problem.m, problem.n, problem.k
    fitting = [row for row in tables[problem.operand] if row.fits(*extents)]
    if not fitting:
        raise UnsupportedError(
            f"no {problem.arch.name} {problem.operand.value} configuration fits "
            f"{'x'.join(map(str, extents))}; pass config= to choose one"
        )
    return min(fitting, key=lambda row: row.time(*extents)).config
