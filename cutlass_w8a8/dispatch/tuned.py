"""Selection by tuned tables: what was measured on the very device, where it was, and costs fitted to that elsewhere."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from cutlass_w8a8.arch import Arch, Family
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch.rules import problems
from cutlass_w8a8.dispatch.table import Cost, Row, blocks
from cutlass_w8a8.dispatch.tables import Interval, Section, Table, read_table
from cutlass_w8a8.dispatch.waves import Waves, resident
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import TableError
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.paths import user_path
from cutlass_w8a8.problem import OVERLAPS, Problem
from cutlass_w8a8.spec import KernelSpec

TABLES_VARIABLE = "CUTLASS_W8A8_TABLES"
SHIPPED = Path(__file__).resolve().parents[1] / "tables"

Prior = Callable[[KernelConfig, int, int, int], float]
# Of expected times: 15 %.
FAR_LESS = 1 / 1.15


def choose(problem: Problem) -> KernelConfig | None:
    """The configuration that a tuned table gives for ``problem``; None if there is no table, or it has nothing fitting.

    A weight shape that was measured gets, within the measured M, what was fastest or as good; between two of these M,
    that of their two configurations which is expected to take less, unless another is expected to take far less:
    measured M are mostly multiples of tiles, and others are not. Everything else gets what is expected to take least.

    Raises:
        TableError: a table that ``CUTLASS_W8A8_TABLES`` names cannot be used.
    """
    sections = _sections(problem)
    extents = problem.m, problem.n, problem.k
    usable = [
        _usable(section, problem.arch, problem.operand, problem.out, problem.epilogue, problem.needs_whole_k)
        for section in sections
    ]
    # What was measured in a weaker mode says more than what the model makes of a stronger one.
    prior = prior_of(problem.arch, problem.operand, problem.sm_count)
    for section, rows in zip(sections, usable, strict=True):
        if (row := measured(section, rows, *extents, problem.sm_count, prior)) is not None:
            return row.config
    row = modelled(usable[0], *extents, problem.sm_count, prior) if sections else None
    return None if row is None else row.config


def pick(
    section: Section,
    usable: Mapping[KernelConfig, Row],
    m: int,
    n: int,
    k: int,
    sm_count: int | None,
    prior: Prior | None = None,
) -> Row | None:
    """Of ``usable``, rows of ``section`` by configuration, the one to serve an m x n x k problem; None if none fits."""
    return measured(section, usable, m, n, k, sm_count, prior) or modelled(usable, m, n, k, sm_count, prior)


def prior_of(arch: Arch, operand: DType, sm_count: int | None) -> Prior | None:
    """A model of the device that owes nothing to the times of single configurations; None if there is none."""
    if arch.mainloop(operand).family is not Family.HOPPER:
        return None
    return Waves(sm_count or Waves.sms).time


def measured(
    section: Section,
    usable: Mapping[KernelConfig, Row],
    m: int,
    n: int,
    k: int,
    sm_count: int | None,
    prior: Prior | None = None,
) -> Row | None:
    """The row measured at m x n x k, or for one between two measured M what is expected to take least; None if neither.

    There, of the rows measured on either side, unless another is expected to be far ahead: measured M are mostly
    multiples of tiles, and those between are not.
    """
    near = _measured(section.measured.get((n, k), ()), m)
    fitting = [row for row in near if row.config in usable]
    expected = _expected(m, n, k, sm_count, prior)
    row = min(fitting, key=expected, default=None)
    if row is None or len(near) == 1 or prior is None:
        return row
    other = modelled(usable, m, n, k, sm_count, prior)
    return other if other is not None and expected(other) < FAR_LESS * expected(row) else row


def modelled(
    usable: Mapping[KernelConfig, Row], m: int, n: int, k: int, sm_count: int | None, prior: Prior | None = None
) -> Row | None:
    """The row expected to take least; None if none fits.

    The least of many fitted costs is likely one that is off, so ``prior`` has a say, as `prior_weight` tells: chosen by
    what is lost on weight shapes that were left out (benchmarks/README.md). Blocks divide K to occupy
    multiprocessors that have nothing to do: not where there are none. Tile orders were measured where they may matter
    only, too seldom for a cost: of a kernel's rows that without one stands for all.
    """
    fitting = [row for row in usable.values() if _meant(row, usable, m, n, k, sm_count)]
    return min(fitting, key=_expected(m, n, k, sm_count, prior), default=None)


def ranked(problem: Problem) -> list[KernelConfig]:
    """The configurations of the device's table for ``problem``'s types, best first, those meant for other extents last.

    Raises:
        TableError: a table that ``CUTLASS_W8A8_TABLES`` names cannot be used.
    """
    sections = _sections(problem)
    if not sections:
        return []
    usable = _usable(sections[0], problem.arch, problem.operand, problem.out, problem.epilogue, problem.needs_whole_k)
    extents = problem.m, problem.n, problem.k
    time = _expected(*extents, problem.sm_count, prior_of(problem.arch, problem.operand, problem.sm_count))
    ordered = sorted(usable.values(), key=lambda row: (not _meant(row, usable, *extents, problem.sm_count), time(row)))
    return [row.config for row in ordered]


def _meant(row: Row, usable: Mapping[KernelConfig, Row], m: int, n: int, k: int, sm_count: int | None) -> bool:
    """Whether the cost of a row says something about a problem; of ``usable`` rows that do not, others serve."""
    config = row.config
    at_once = config.slices == 1 or blocks(config, m, n) <= resident(config.slices, sm_count or Cost.SMS)
    return row.fits(m, n, k) and at_once and (config == config.compiled or config.compiled not in usable)


def _expected(m: int, n: int, k: int, sm_count: int | None, prior: Prior | None) -> Callable[[Row], float]:
    def expected(row: Row) -> float:
        time = row.time(m, n, k, sm_count)
        if prior is None:
            return time
        # A weighted mean of logarithms. Only ratios of expected times count, so that units do not.
        weight = prior_weight(m)
        mean: float = (time * prior(row.config, m, n, k) ** weight) ** (1 / (1 + weight))
        return mean

    return expected


def prior_weight(m: int) -> int:
    """How often a prior's time counts beside a row's, as factors of a product.

    Where one tile holds all rows, time is that of the weights on their way, which the model knows; above, the more M,
    the more it is the multiplication and what the card's power allows.
    """
    return 8 if m <= 64 else 1


def tables() -> tuple[Table, ...]:
    """All tables, those that come first winning: the user's in the order they are named, then the shipped ones.

    Files are read when first asked for, and again when ``CUTLASS_W8A8_TABLES`` changes.

    Raises:
        TableError: a table that the variable names cannot be used.
        ArgumentError: the variable names a home that does not exist.
    """
    return _tables(os.environ.get(TABLES_VARIABLE, ""))


@cache
def _tables(variable: str) -> tuple[Table, ...]:
    paths = [path for text in variable.split(os.pathsep) if text for path in _files(text)]
    return tuple(read_table(path) for path in [*paths, *sorted(SHIPPED.glob("*.json"))])


def _files(text: str) -> list[Path]:
    path = user_path(TABLES_VARIABLE, text)
    if path.is_dir():
        return sorted(path.glob("*.json"))
    if not path.is_file():
        raise TableError(
            f"{TABLES_VARIABLE}: {path} is neither a file nor a folder; name tuned tables, or folders of them, "
            f"separated by {os.pathsep!r}, or unset it"
        )
    return [path]


def _sections(problem: Problem) -> list[Section]:
    """Those of the first table that has any, for the problem's mode and for weaker ones, in this order.

    A mode that was not measured goes by the next weaker one: what else a kernel waits for changes its rank little.
    """
    if problem.device is None:
        return []
    modes = OVERLAPS[OVERLAPS.index(problem.overlap) :: -1]
    for table in tables():
        if table.device != problem.device or table.arch is not problem.arch:
            continue
        # The same name with other multiprocessors is a part of the device, or one that was only asked about.
        if problem.sm_count not in (None, table.sm_count):
            continue
        keys = [(problem.operand, mode) for mode in modes]
        if found := [table.sections[key] for key in keys if key in table.sections]:
            return found
    return []


def _measured(intervals: tuple[Interval, ...], m: int) -> tuple[Row, ...]:
    """The row measured at ``m``, or those of the measured M on either side; nothing outside of the measured M."""
    index = bisect_right(intervals, m, key=lambda interval: interval.first) - 1
    if index < 0:
        return ()
    if m <= intervals[index].last:
        return (intervals[index].row,)
    return tuple(interval.row for interval in intervals[index : index + 2]) if index + 1 < len(intervals) else ()


@cache
def _usable(
    section: Section, arch: Arch, operand: DType, out: DType, epilogue: EpilogueSpec, whole_k: bool
) -> dict[KernelConfig, Row]:
    """The rows of ``section`` that can compute this: a larger epilogue may not fit beside a given number of stages."""
    return {
        row.config: row
        for row in section.rows
        if not (whole_k and row.config.divides_k)
        and not problems(KernelSpec(arch, operand, out, epilogue, row.config), row.config)
    }
