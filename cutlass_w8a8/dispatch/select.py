"""Selection: a problem to its configuration, by its device's tuned table or else by the table of its arch."""

from __future__ import annotations

from functools import partial

from cutlass_w8a8.arch import ARCHS, Arch
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch import blackwell, geforce, hopper, multistage, tuned
from cutlass_w8a8.dispatch.rules import problems
from cutlass_w8a8.dispatch.table import Row, Tables, in_grid
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import UnsupportedError
from cutlass_w8a8.problem import Problem
from cutlass_w8a8.spec import KernelSpec

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


def configs_of(arch: Arch, operand: DType) -> tuple[KernelConfig, ...]:
    """The kernels that dispatch may choose, launch-time choices apart: those of the arch's rows and of tuned tables.

    Raises:
        TableError: a table that ``CUTLASS_W8A8_TABLES`` names cannot be used.
        UnsupportedError: the arch does not multiply this type.
    """
    found = [row.config.compiled for row in rows_of(arch, operand)]
    for table in tuned.tables():
        for (served, _), section in table.sections.items():
            if table.arch is arch and served is operand:
                found += [row.config.compiled for row in section.rows]
    return tuple(dict.fromkeys(found))


def select(problem: Problem) -> KernelConfig:
    """The configuration that is expected to take least: by a tuned table, else by the rows of the arch that fit.

    Raises:
        TableError: a table that ``CUTLASS_W8A8_TABLES`` names cannot be used.
        UnsupportedError: the arch does not multiply the operand type, or no row fits.
    """
    extents = problem.m, problem.n, problem.k
    rows = rows_of(problem.arch, problem.operand)
    if (measured := tuned.choose(problem)) is not None:
        return measured
    whole = problem.needs_whole_k
    fitting = [row for row in rows if row.fits(*extents) and not (whole and row.config.divides_k)]
    if not fitting:
        raise UnsupportedError(
            f"no {problem.arch.name} {problem.operand.value} configuration fits "
            f"{'x'.join(map(str, extents))}; pass config= to choose one"
        )
    return min(fitting, key=lambda row: row.time(*extents, problem.sm_count)).config


def ranked(problem: Problem) -> list[KernelConfig]:
    """All configurations of the tables that can serve ``problem``, best first, beginning with what `select` chooses.

    For where the best is not at hand, when any serves: those meant for other extents come after the others, and those
    that only tables of other modes and devices have come last.

    Raises:
        TableError: a table that ``CUTLASS_W8A8_TABLES`` names cannot be used.
        UnsupportedError: as `select`.
    """
    extents = problem.m, problem.n, problem.k
    rows = sorted(
        rows_of(problem.arch, problem.operand),
        key=lambda row: (not row.fits(*extents), row.time(*extents, problem.sm_count)),
    )
    found = dict.fromkeys(
        [
            select(problem),
            *tuned.ranked(problem),
            *(row.config for row in rows),
            *configs_of(problem.arch, problem.operand),
        ]
    )
    kernel = partial(KernelSpec, problem.arch, problem.operand, problem.out, problem.epilogue)
    return [config for config in found if not refusal(problem, config) and not problems(kernel(config), config)]


def refusal(problem: Problem, config: KernelConfig) -> str:
    """Why a configuration that is possible cannot serve ``problem``, as the rest of a sentence; empty if it can."""
    if problem.k % config.k_multiple:
        return (
            f"divides K among {config.slices} blocks, so K must be a multiple of {config.k_multiple}; it is {problem.k}"
        )
    if not in_grid(config, problem.m, problem.n):
        return (
            f"needs more blocks than a launch has for {problem.m}x{problem.n}; use a persistent schedule (pingpong or "
            "cooperative)"
        )
    if problem.needs_whole_k and config.divides_k:
        return "divides K among blocks, which changes the bits of fp8 sums; with batch_invariant pass another, or none"
    return ""
