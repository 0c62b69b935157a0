"""What a run found, and its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cutlass_w8a8.bench.shapes import Point
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.errors import ArgumentError, ConfigError

SCHEMA = 2
"""Version of the JSON. 1, without a number in the file, had one order, no accuracy and no ceilings."""
PROVIDERS = ("ours", "vllm", "torch_row", "torch_tensor", "int_mm", "int_mm_dequant", "triton", "bf16")
"""All that can be measured, in the order of the table's columns."""
NOT_COMPARABLE = ("bf16", "int_mm", "torch_tensor")
"""Providers that compute something else than ours: shown, not counted among the best."""


@dataclass
class Measurement:
    """Times at one point.

    Attributes:
        point: the problem.
        microseconds: median time of a call, by provider.
        spread: (largest - smallest) / median over the rounds, by provider.
        accuracy: what `accuracy.check` found, by provider that computes what ours computes.
        errors: why a provider has no time.
        rounds, calls: graph replays, and calls in a graph.
        config: the configuration that dispatch chose for ours; None if ours took no part.
    """

    point: Point
    microseconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    rounds: int = 0
    calls: int = 0
    config: str | None = None


@dataclass(frozen=True)
class Column:
    """A provider as a table sees it.

    Attributes:
        name: heading.
        comparable: whether it computes what ours computes.
        forced: ours with a configuration that dispatch did not choose.
    """

    name: str
    comparable: bool = True
    forced: bool = False


@dataclass
class Run:
    """Everything a run found.

    Attributes:
        columns: providers that took part in any order.
        points: one measurement for each point.
        missing: why a provider has no column, by ``provider`` or ``order: provider``.
        layers: which models' layers have a weight, by ``NxK``.
        ceilings: what `ceilings.find` found.
        conditions: machine, clocks, versions, method: whatever else belongs into the JSON.
    """

    columns: list[Column]
    points: list[Measurement]
    missing: dict[str, str] = field(default_factory=dict)
    layers: dict[str, list[str]] = field(default_factory=dict)
    ceilings: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """What `load` reads."""
        return {"schema": SCHEMA} | asdict(self)


def load(path: Path) -> Run:
    """Read the JSON of a run, of this schema or of schema 1.

    Raises:
        ArgumentError: the file cannot be read, is of a newer schema, or is not of a benchmark.
    """
    try:
        content = json.loads(path.read_text())
        schema = content.get("schema", 1)
        if schema > SCHEMA:
            raise ArgumentError(f"{path} has schema {schema}, and this version reads up to {SCHEMA}; use a newer one")
        points = [Measurement(**m | {"point": Point(**m["point"])}) for m in content["points"]]
        if schema == SCHEMA:
            columns = [Column(**column) for column in content["columns"]]
            return Run(columns, points, *(content[name] for name in ("missing", "layers", "ceilings", "conditions")))
        return Run(
            [Column(name, name not in NOT_COMPARABLE, _is_config(name)) for name in content["providers"]],
            points,
            content["missing"],
            conditions={name: content[name] for name in ("machine", "gpu after", "method", "host microseconds")},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"{path} is not the JSON of a benchmark ({type(error).__name__}: {error}); give a file that "
            "cutlass-w8a8 bench --json wrote"
        ) from error


def _is_config(name: str) -> bool:
    try:
        KernelConfig.parse(name)
    except ConfigError:
        return False
    return True
