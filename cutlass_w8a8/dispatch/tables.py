"""Tuned tables as files: JSON read, every entry checked, and written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from cutlass_w8a8.arch import Arch, arch_named
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch.rules import problems
from cutlass_w8a8.dispatch.table import UNBOUNDED, Corrected, Cost, Row
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import TableError, W8A8Error
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.problem import OVERLAPS
from cutlass_w8a8.spec import KernelSpec

# Raise it when the meaning of a table's entries changes.
SCHEMA = 1
_BOUNDS = {"min_m": 0, "max_m": UNBOUNDED, "min_n": 0, "max_n": UNBOUNDED, "min_k": 0}
T = TypeVar("T")


@dataclass(frozen=True)
class Interval:
    """M from ``first`` to ``last``, both measured, where ``row`` serves: at each M measured the fastest, or as good."""

    first: int
    last: int
    row: Row


@dataclass(frozen=True, eq=False)
class Section:
    """What was found for one operand type and one way to overlap.

    Attributes:
        rows: configurations with their costs, each possible for the arch.
        measured: by (n, k), intervals of ascending M.
    """

    rows: tuple[Row, ...]
    measured: Mapping[tuple[int, int], tuple[Interval, ...]]


@dataclass(frozen=True, eq=False)
class Table:
    """A tuned table: what measurements on one kind of device found.

    Attributes:
        device: the device's name, as the driver gives it.
        arch: the architecture of its kernels.
        sm_count: its multiprocessors.
        conditions: driver, date, package version and the like, for the reader.
        sections: by operand type and overlap.
    """

    device: str
    arch: Arch
    sm_count: int
    conditions: Mapping[str, str]
    sections: Mapping[tuple[DType, str], Section]


def read_table(path: Path) -> Table:
    """The table in the file ``path``.

    Raises:
        TableError: it cannot be read, is of another schema, or an entry is malformed or impossible; the message names
            file and entry.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(
            f"tuned table {path} cannot be read ({error}); it must be JSON as cutlass-w8a8 tune fit writes it"
        ) from error
    reader = _Reader(path)
    content = reader.typed(content, dict, "the file")
    if content.get("schema") != SCHEMA:
        raise TableError(
            f"tuned table {path} is of schema {content.get('schema')!r}, this version reads {SCHEMA}; "
            "make it anew with cutlass-w8a8 tune fit"
        )
    arch = reader.attempt("arch", arch_named, content.get("arch"))
    sections = {}
    for where, entry in reader.entries(content.get("tables"), "tables"):
        operand = reader.attempt(f"{where}.operand", DType, entry.get("operand"))
        overlap = entry.get("overlap")
        if overlap not in OVERLAPS:
            raise reader.error(f"{where}.overlap", f"{overlap!r} is not one of {', '.join(OVERLAPS)}")
        if (operand, overlap) in sections:
            raise reader.error(where, f"{operand.value} with overlap {overlap} is there twice")
        sections[operand, overlap] = reader.section(entry, arch, operand, where)
    conditions = reader.typed(content.get("conditions", {}), dict, "conditions")
    return Table(
        device=reader.typed(content.get("device"), str, "device"),
        arch=arch,
        sm_count=reader.extent(content.get("multiprocessors"), "multiprocessors"),
        conditions={str(name): str(value) for name, value in conditions.items()},
        sections=sections,
    )


@dataclass(frozen=True)
class _Reader:
    """Entries of one file, each refused with the file's name and its own."""

    path: Path

    def error(self, entry: str, reason: str) -> TableError:
        return TableError(
            f"tuned table {self.path}, {entry}: {reason}; correct the entry, or make the table anew with "
            "cutlass-w8a8 tune fit"
        )

    def attempt(self, entry: str, read: Callable[[Any], T], value: object) -> T:
        try:
            return read(value)
        except (W8A8Error, ValueError, TypeError, AttributeError) as error:
            raise self.error(entry, f"{value!r} is not understood ({error})") from error

    def typed(self, value: object, kind: type[T], entry: str) -> T:
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise self.error(entry, f"{value!r} is not a {kind.__name__}")
        return value

    def entries(self, value: object, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The objects of a list, each with its name."""
        for index, item in enumerate(self.typed(value, list, name)):
            entry = f"{name}[{index}]"
            yield entry, self.typed(item, dict, entry)

    def extent(self, value: object, entry: str, least: int = 1) -> int:
        number = self.typed(value, int, entry)
        if number < least:
            raise self.error(entry, f"{number} is below {least}")
        return number

    def section(self, entry: dict[str, Any], arch: Arch, operand: DType, where: str) -> Section:
        rows: dict[KernelConfig, Row] = {}
        for at, item in self.entries(entry.get("rows"), f"{where}.rows"):
            row = self.row(item, arch, operand, at)
            if row.config in rows:
                raise self.error(at, f"config {row.config.name} is there twice")
            rows[row.config] = row
        if not rows:
            raise self.error(f"{where}.rows", "there are none")
        measured = {}
        for at, item in self.entries(entry.get("measured", []), f"{where}.measured"):
            shape = self.extent(item.get("n"), f"{at}.n"), self.extent(item.get("k"), f"{at}.k")
            if shape in measured:
                raise self.error(at, f"n={shape[0]}, k={shape[1]} is there twice")
            measured[shape] = self.intervals(item, rows, at)
        return Section(tuple(rows.values()), measured)

    def row(self, item: dict[str, Any], arch: Arch, operand: DType, at: str) -> Row:
        config = self.attempt(at, KernelConfig.parse, item.get("config"))
        spec = KernelSpec(arch, operand, DType.BF16, EpilogueSpec.of(), config)
        if reasons := problems(spec, config):
            raise self.error(at, f"config {config.name} is impossible for {arch.name}: {'; '.join(reasons)}")
        if not spec.config.fast_accum:
            # Which of the two sums a caller gets must not hang on the shape.
            raise self.error(at, f"config {config.name} is accurate, which only a caller may choose; leave it out")
        if unknown := set(item) - {"config", "cost", "residuals", *_BOUNDS}:
            raise self.error(at, f"{', '.join(sorted(unknown))} is not understood")
        numbers = self.floats(item.get("cost"), len(fields(Cost)), f"{at}.cost")
        if min(numbers) < 0 or numbers[-1] == 0:
            raise self.error(f"{at}.cost", f"{numbers} holds a negative number or a bandwidth of zero")
        residuals = []
        for index, value in enumerate(self.typed(item.get("residuals", []), list, f"{at}.residuals")):
            entry = f"{at}.residuals[{index}]"
            *_, ratio = self.floats(value, 4, entry)
            m, n, k = (self.extent(part, entry) for part in value[:3])
            residuals.append((m, n, k, ratio))
        bounds = {name: self.extent(item.get(name, default), f"{at}.{name}", 0) for name, default in _BOUNDS.items()}
        return Row(config, Corrected(Cost(*numbers), tuple(sorted(residuals))), **bounds)

    def floats(self, value: object, count: int, entry: str) -> list[float]:
        numbers = self.typed(value, list, entry)
        if len(numbers) != count or not all(type(x) in (int, float) and abs(x) < UNBOUNDED for x in numbers):
            raise self.error(entry, f"{value!r} is not {count} finite numbers")
        return [float(x) for x in numbers]

    def intervals(self, item: dict[str, Any], rows: Mapping[KernelConfig, Row], at: str) -> tuple[Interval, ...]:
        found = []
        for index, value in enumerate(self.typed(item.get("intervals"), list, f"{at}.intervals")):
            entry = f"{at}.intervals[{index}]"
            if len(self.typed(value, list, entry)) != 3:
                raise self.error(entry, f"{value!r} is not [first M, last M, config]")
            first, last = (self.extent(part, entry) for part in value[:2])
            config = self.attempt(entry, KernelConfig.parse, value[2])
            if config not in rows:
                raise self.error(entry, f"config {config.name} is none of the rows")
            found.append(Interval(first, last, rows[config]))
        disordered = any(before.last >= after.first for before, after in pairwise(found))
        if not found or disordered or any(interval.first > interval.last for interval in found):
            raise self.error(f"{at}.intervals", "they must be at least one, ascending, and apart from each other")
        return tuple(found)


def write_text(table: Table) -> str:
    """The text of ``table`` as `read_table` reads it: one line a row and an interval, the same for the same table."""
    head = {
        "schema": SCHEMA,
        "device": table.device,
        "arch": table.arch.name,
        "multiprocessors": table.sm_count,
        "conditions": dict(table.conditions),
    }
    sections = []
    for (operand, overlap), section in table.sections.items():
        rows = _lines(_row(row) for row in section.rows)
        measured = _lines(
            {"n": n, "k": k, "intervals": [[x.first, x.last, x.row.config.name] for x in intervals]}
            for (n, k), intervals in sorted(section.measured.items())
        )
        sections.append(
            f'{{"operand": "{operand.value}", "overlap": "{overlap}",\n"rows": [\n{rows}\n],\n'
            f'"measured": [\n{measured}\n]}}'
        )
    return json.dumps(head, indent=1)[:-2] + ',\n "tables": [\n' + ",\n".join(sections) + "\n]}\n"


def _lines(items: Iterable[object]) -> str:
    return ",\n".join(json.dumps(item) for item in items)


def _row(row: Row) -> dict[str, object]:
    cost = row.cost.cost if isinstance(row.cost, Corrected) else row.cost
    residuals = [list(entry) for entry in row.cost.residuals] if isinstance(row.cost, Corrected) else []
    bounds = {name: getattr(row, name) for name, default in _BOUNDS.items() if getattr(row, name) != default}
    return {"config": row.config.name, "cost": list(astuple(cost)), **bounds, "residuals": residuals}
