"""Selection: a problem to its configuration, by the tables of its arch."""

from __future__ import annotations

from cutlass_w8a8.arch import ARCHS, Arch
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch import blackwell, geforce, hopper, multistage
from cutlass_w8a8.dispatch.table import Row, Tables
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import UnsupportedError
from cutlass_w8a8.problem import Problem

TABLES: Tables = {
    name: {
        operand: table[name][operand]
        for table in (hopper.TABLES, blackwell.TABLES, geforce.TABLES, multistage.TABLES)
        for operand in table.get(name, {})
    }
    for name in ARCHS
}


def rows_of(arch: Arch, operand: DType) -> tuple[Row, ...]:
    """The rows of ``arch`` for ``operand``.

    Raises:
        UnsupportedError: the arch does not multiply this type.
    """
    arch.mainloop(operand)
    return TABLES[arch.name][operand]


def select(problem: Problem) -> KernelConfig:
    """The configuration of the row that fits ``problem`` and is expected to take least.

    Raises:
        UnsupportedError: the arch does not multiply the operand type, or no row fits.
    """
    extents = problem.m, problem.n, problem.k
    rows = rows_of(problem.arch, problem.operand)
    whole = problem.needs_whole_k
    fitting = [row for row in rows if row.fits(*extents) and not (whole and row.config.divides_k)]
    if not fitting:
        raise UnsupportedError(
            f"no {problem.arch.name} {problem.operand.value} configuration fits "
            f"{'x'.join(map(str, extents))}; pass config= to choose one"
        )
    return min(fitting, key=lambda row: row.time(*extents, problem.sm_count)).config
