"""Measured times on disk: a line a finished point, so that an interrupted run resumes where it stopped."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutlass_w8a8.arch import Arch, arch_named, match
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ConfigError, TableError, W8A8Error
from cutlass_w8a8.problem import OVERLAPS

# Names of operand types in benchmarks.
OPERANDS = {"fp8": DType.E4M3, "int8": DType.INT8}
Extents = tuple[int, int, int]
# Microseconds by (m, n, k) and configuration.
Times = dict[Extents, dict[KernelConfig, float]]


@dataclass(frozen=True)
class Record:
    """The times at one point.

    Attributes:
        dtype: ``fp8`` or ``int8``.
        overlap: how kernels overlapped with the one before, of `OVERLAPS`.
        m, n, k: extents, in elements.
        microseconds: median time of a call, by the configuration's name.
        dropped: the configurations that were measured in quick rounds only.
        errors: why a configuration has no time.
    """

    dtype: str
    overlap: str
    m: int
    n: int
    k: int
    microseconds: Mapping[str, float]
    dropped: Sequence[str] = ()
    errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        """What tells it from other records."""
        return self.dtype, self.overlap, self.m, self.n, self.k

    def to_json(self) -> str:
        """One line."""
        return json.dumps(
            {
                "point": {"dtype": self.dtype, "m": self.m, "n": self.n, "k": self.k},
                "overlap": self.overlap,
                "microseconds": {name: round(us, 3) for name, us in self.microseconds.items()},
                "dropped": list(self.dropped),
                "errors": dict(self.errors),
            }
        )


@dataclass(frozen=True)
class Machine:
    """Where times were measured.

    Attributes:
        device: the GPU's name, as the driver gives it.
        arch: the architecture of the kernels.
        sm_count: multiprocessors.
        facts: everything that was recorded about it.
    """

    device: str
    arch: Arch
    sm_count: int
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Machine:
        """From what `cutlass_w8a8.bench.machine.facts` told, and the name of the arch if that is not the device's own.

        Raises:
            KeyError, ValueError: a fact is missing or malformed.
            UnsupportedError: no kernels run on such a device.
        """
        major, minor = map(int, str(facts["capability"]).split("."))
        arch = arch_named(facts["arch"]) if "arch" in facts else match((major, minor)).arch
        return cls(str(facts["gpu"]), arch, int(facts["multiprocessors"]), dict(facts))


@dataclass(frozen=True)
class Measurements:
    """All times of one kind of device, by operand type and overlap."""

    machine: Machine
    times: Mapping[tuple[DType, str], Times]

    def without(self, shape: tuple[int, int]) -> Measurements:
        """All but those of the weight shape (n, k)."""
        return self._where(lambda extents: extents[1:] != shape)

    def only(self, shape: tuple[int, int]) -> Measurements:
        """Those of the weight shape (n, k)."""
        return self._where(lambda extents: extents[1:] == shape)

    def _where(self, kept: Callable[[Extents], bool]) -> Measurements:
        times = {key: {x: t for x, t in times.items() if kept(x)} for key, times in self.times.items()}
        return Measurements(self.machine, {key: kept_times for key, kept_times in times.items() if kept_times})


def read(paths: Sequence[Path]) -> Measurements:
    """The times in files of `Log`, or of ``scripts/bench.py --json``.

    A point that several files hold gets what `combined` makes of them; within a file the later times count.

    Raises:
        TableError: a file cannot be read, holds no times of ours, or is of another device than the first.
    """
    machine: Machine | None = None
    files: list[dict[tuple[DType, str], Times]] = []
    for path in paths:
        files.append({})
        for entry in _entries(path):
            try:
                if "machine" in entry:
                    found = Machine.of(entry["machine"])
                    if machine is not None and _identity(found) != _identity(machine):
                        raise TableError(
                            f"{path} is of {found.device} ({found.sm_count} multiprocessors, {found.arch.name}), what "
                            f"was read before of {machine.device} ({machine.sm_count}, {machine.arch.name}); fit a "
                            "table for each"
                        )
                    machine = machine or found
                    continue
                point, overlap = entry["point"], entry.get("overlap", OVERLAPS[0])
                extents = int(point["m"]), int(point["n"]), int(point["k"])
                configs = dict(_configs(entry["microseconds"]))
                if overlap not in OVERLAPS:
                    raise ValueError(f"overlap {overlap!r} is not one of {', '.join(OVERLAPS)}")
                if configs:
                    files[-1].setdefault((OPERANDS[point["dtype"]], overlap), {})[extents] = configs
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                if isinstance(error, W8A8Error):
                    raise
                raise TableError(
                    f"{path} holds a point that is not understood ({type(error).__name__}: {error}); it must be what "
                    "cutlass-w8a8 tune measure or scripts/bench.py --json writes"
                ) from error
    runs: dict[tuple[DType, str], dict[Extents, list[dict[KernelConfig, float]]]] = {}
    for file in files:
        for key, points in file.items():
            for extents, configs in points.items():
                runs.setdefault(key, {}).setdefault(extents, []).append(configs)
    if machine is None or not runs:
        raise TableError(
            f"{', '.join(map(str, paths))}: no times of configurations, or no word about the machine; measure with "
            "cutlass-w8a8 tune measure, or scripts/bench.py --configs"
        )
    times = {key: {extents: combined(found) for extents, found in points.items()} for key, points in runs.items()}
    return Measurements(machine, times)


def combined(runs: Sequence[Mapping[KernelConfig, float]]) -> dict[KernelConfig, float]:
    """Times of one point from several runs: those of the last, and what only earlier ones have, brought to its clock.

    A card that throttles is slower by ten percent and more, and some tiles suffer more than others; only times of one
    run can be compared. An earlier run's times are scaled by the median ratio of the configurations that it shares with
    what is known.
    """
    found: dict[KernelConfig, float] = {}
    for run in reversed(runs):
        ratios = [found[config] / us for config, us in run.items() if config in found]
        scale = statistics.median(ratios) if ratios else 1.0
        found = {config: us * scale for config, us in run.items()} | found
    return found


def _identity(machine: Machine) -> tuple[str, str, int]:
    return machine.device, machine.arch.name, machine.sm_count


def _configs(microseconds: Mapping[str, float]) -> Iterator[tuple[KernelConfig, float]]:
    for name, us in microseconds.items():
        try:
            config = KernelConfig.parse(name)
        except ConfigError:
            continue  # a peer, or what dispatch chose
        if not us > 0:
            raise ValueError(f"{name} took {us} microseconds")
        # Accurate sums have other bits: a caller asks for them, a table never chooses them.
        if config.fast_accum:
            yield config, float(us)


def _entries(path: Path) -> list[dict[str, Any]]:
    """The file's objects: machines and points."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TableError(f"{path} cannot be read: {error}") from error
    try:
        whole = json.loads(text)
        if isinstance(whole, dict) and "points" in whole:
            conditions = whole.get("conditions", whole)
            return [{"machine": conditions["machine"]}, *filter(_alone, whole["points"])]
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    lines = text.splitlines()
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError("not an object")
            entries.append(entry)
        except ValueError as error:
            # A killed run may have left half of its last line.
            if number < len(lines) or text.endswith("\n"):
                raise TableError(f"{path}, line {number}: {error}; delete the line, and measure again") from error
    return entries


def _alone(entry: Mapping[str, Any]) -> bool:
    """Whether a point of a benchmark is a GEMM without overlap; what it measures otherwise are sequences of kernels."""
    return bool(entry["point"].get("order", "alone") == "alone")


class Log:
    """A file of records that grows by whole lines."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Open ``path``, make it if it is missing, and read which points it has.

        Args:
            path: the file; its folder is made if need be.
            facts: of the machine that will measure.

        Raises:
            TableError: the file is of another kind of device, or damaged before its last line.
        """
        self.path = path
        self.finished: set[tuple[str, str, int, int, int]] = set()
        here = Machine.of(facts)
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = _entries(path) if path.exists() else []
        for entry in entries:
            if "machine" in entry:
                there = Machine.of(entry["machine"])
                if _identity(there) != _identity(here):
                    raise TableError(
                        f"{path} holds times of {there.device} ({there.sm_count} multiprocessors, {there.arch.name}), "
                        f"this is {here.device} ({here.sm_count}, {here.arch.name}); name another file"
                    )
            else:
                point = entry["point"]
                self.finished.add((point["dtype"], entry["overlap"], int(point["m"]), int(point["n"]), int(point["k"])))
        _cut_to_whole_lines(path)
        self._write(json.dumps({"machine": dict(facts)}))

    def append(self, record: Record) -> None:
        """Add a finished point; on disk when this returns."""
        self._write(record.to_json())
        self.finished.add(record.key)

    def _write(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def _cut_to_whole_lines(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
