"""Calls of the public API with test operands, and the record of what was found."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

import cutlass_w8a8
from tests.cases import Combination, Epilogue, Inputs, combinations

Plan = dict[Combination, list["str | None"]]
"""For each combination, the configurations to force; None leaves the choice to dispatch, INVARIANT to its
batch-invariant mode."""

INVARIANT = "invariant"


def call(
    combination: Combination,
    inputs: Inputs,
    epilogue: Epilogue,
    *,
    out: torch.Tensor | None = None,
    config: str | None = None,
) -> torch.Tensor:
    """One call of the public function that ``combination`` stands for."""
    options: dict[str, Any] = {"batch_invariant": True} if config == INVARIANT else {"config": config}
    if combination.azp == "none":
        return cutlass_w8a8.scaled_mm(
            inputs.a,
            inputs.b,
            epilogue.scale_a,
            epilogue.scale_b,
            combination.out_dtype,
            epilogue.bias,
            out=out,
            **options,
        )
    return cutlass_w8a8.scaled_mm_azp(
        inputs.a,
        inputs.b,
        epilogue.scale_a,
        epilogue.scale_b,
        combination.out_dtype,
        epilogue.azp_adj,
        epilogue.azp,
        epilogue.bias,
        out=out,
        **options,
    )


def chosen(combination: Combination, inputs: Inputs, epilogue: Epilogue, config: str | None) -> str | None:
    """The configuration that runs: ``config``, or what dispatch chooses on a GPU where that decides about fp8 bits."""
    if config is not None or combination.operand == "int8" or not inputs.a.is_cuda:
        return config
    return cutlass_w8a8.explain(
        inputs.a, inputs.b, epilogue.scale_a, epilogue.scale_b, combination.out_dtype, epilogue.bias
    ).config.name


def is_split(config: str | None) -> bool:
    """Whether K is divided among blocks, so that fp8 partial sums are added in another order."""
    tokens = (config or "").split("_")
    return any(token.startswith(("split", "slices")) for token in tokens)


def k_multiple(config: str | None) -> int:
    """What K must be a multiple of where ``config`` divides it among the blocks of a cluster."""
    slices = next((token[len("slices") :] for token in (config or "").split("_") if token.startswith("slices")), "1")
    return 16 * int(slices)


def is_accurate(config: str | None) -> bool:
    """Whether the kernel promotes fp8 partial sums to float32 registers."""
    return "accurate" in (config or "").split("_")


def bit_class(combination: Combination, config: str | None) -> str:
    """Configurations of one class promise identical bits for identical operands."""
    if combination.operand == "int8":
        return "exact"
    tokens = (config or "").split("_")
    if "multistage" in tokens:
        # These begin with what K leaves over a multiple of the tile's k, and promote once a tile.
        kind = "promoted" if is_accurate(config) else "".join(t for t in tokens if t.startswith("split")) or "fast"
        return f"tile{tokens[0].rpartition('x')[2]}-{kind}"
    if sliced := next((token for token in tokens if token.startswith("slices")), ""):
        return sliced
    if is_split(config):
        return "split:" + ",".join(t for t in (config or "").split("_") if t.startswith("split"))
    return "accurate" if is_accurate(config) else "fast"


def load_plan(path: Path, dispatch: bool = True) -> Plan:
    """The plan in a JSON list of kernel specifications (objects, or their JSON text).

    The ``config`` text is taken as written, so it may hold launch-time choices such as ``split2``. Kernels that are no
    GEMMs are passed over.

    Raises:
        ValueError: an entry names a combination that `combinations` does not hold.
    """
    known = {combination.name: combination for combination in combinations()}
    plan: Plan = defaultdict(list)
    for entry in json.loads(path.read_text()):
        spec = json.loads(entry) if isinstance(entry, str) else entry
        if "kernel" in spec:
            continue
        name = f"{spec['operand']}_{spec['out']}_{spec['epilogue']}"
        if name not in known:
            raise ValueError(f"{path} holds {name!r}, which is none of the {len(known)} known combinations")
        configs = plan[known[name]]
        if dispatch and None not in configs:
            configs += dispatched(known[name])
        if spec["config"] not in configs:
            configs.append(spec["config"])
    return dict(plan)


def dispatch_plan(chosen: Iterable[Combination] | None = None) -> Plan:
    """Every combination, with the configuration left to dispatch."""
    return {combination: dispatched(combination) for combination in chosen or combinations()}


def dispatched(combination: Combination) -> list[str | None]:
    """What leaves the choice to dispatch; fp8 also in the mode that keeps bits from depending on the batch."""
    return [None] if combination.operand == "int8" else [None, INVARIANT]


@dataclass
class Check:
    """One line of the report.

    Attributes:
        section: the section of the proof.
        name: what was checked.
        passed, failed: counts of cases.
        details: anything else worth keeping, JSON-able.
        failures: the first failures, described.
    """

    section: str
    name: str
    passed: int = 0
    failed: int = 0
    details: dict[str, float | str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    KEPT: ClassVar[int] = 20

    def record(self, ok: bool, description: str = "") -> None:
        """Count a case; keep the description of a failed one."""
        if ok:
            self.passed += 1
            return
        self.failed += 1
        if len(self.failures) < self.KEPT:
            self.failures.append(description)

    def count(self, key: str, amount: int = 1) -> None:
        """Add to a number among the details."""
        self.details[key] = int(self.details.get(key, 0)) + amount

    def largest(self, key: str, value: float) -> None:
        """Keep the largest value given under ``key``; not-a-number counts as infinite."""
        value = math.inf if math.isnan(value) else value
        self.details[key] = max(float(self.details.get(key, 0.0)), value)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def first_mismatch(got: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> str:
    """Where ``wrong`` [M, N] first holds, and both values there."""
    total = int(wrong.sum())
    if not total:
        return "no mismatch when repeated: the result is not reproducible"
    m, n = (int(i) for i in wrong.nonzero()[0])
    return f"{total} of {wrong.numel()} wrong, first at ({m}, {n}): {got[m, n].item()} for {expected[m, n].item()}"
