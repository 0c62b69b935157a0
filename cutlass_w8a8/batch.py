"""Many kernels at once: lists of them, compiled side by side as far as cores and memory go."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from cutlass_w8a8 import dispatch
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.spec import KernelSpec, Spec, spec_from_json
from cutlass_w8a8.worker import Outcome, Worker, default_jobs

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Outcome", "build_all", "checked", "count", "default_jobs", "outcomes", "read_plan", "report"]


def read_plan(path: Path) -> list[Spec]:
    """The kernels named in ``path``: a JSON list of specifications, or one specification a line.

    A specification is what `KernelSpec.to_json` or `QuantSpec.to_json` writes, or that as a JSON string.

    Raises:
        ArgumentError: the file cannot be read as either.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return [spec_from_json(entry if isinstance(entry, str) else json.dumps(entry)) for entry in _entries(text)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"plan {path} cannot be read ({type(error).__name__}: {error}); it must be a JSON list, or lines, of what "
            "to_json() of a specification writes; pregenerate.py --print-plan and cutlass-w8a8 tune plan write one"
        ) from error


def checked(specs: Sequence[Spec]) -> list[Spec]:
    """``specs`` without repetitions.

    Raises:
        ArgumentError: there are none, or one is impossible.
    """
    if not specs:
        raise ArgumentError("the set is empty: the plan holds no kernels, or no epilogue suits the types")
    for spec in specs:
        if isinstance(spec, KernelSpec) and (reasons := dispatch.problems(spec)):
            raise ArgumentError(f"kernel {spec.name} is impossible: {'; '.join(reasons)}")
    return list(dict.fromkeys(specs))


def _entries(text: str) -> list[object]:
    if text.lstrip().startswith("{"):
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return list(json.loads(text))


def outcomes(specs: Sequence[Spec], jobs: int) -> Iterator[Outcome]:
    """Compile ``specs`` into the cache, ``jobs`` at a time, each in another process; what became of each, as it ends.

    Abandoned half way, by an exception or otherwise, it ends what is being compiled.
    """
    jobs = min(jobs, len(specs))
    idle: SimpleQueue[Worker] = SimpleQueue()
    workers = [Worker() for _ in range(jobs)]
    for worker in workers:
        idle.put(worker)

    def build(spec: Spec) -> Outcome:
        worker = idle.get()
        try:
            return worker.build(spec)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        try:
            for future in as_completed([pool.submit(build, spec) for spec in specs]):
                yield future.result()
        finally:
            # In this order: a thread whose worker ends takes no other kernel.
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.close()


def build_all(specs: Sequence[Spec], jobs: int, console: Console) -> list[Outcome]:
    """`outcomes`, each reported as it ends, in the order of ``specs``."""
    found: dict[Spec, Outcome] = {}
    jobs = min(jobs, len(specs))
    console.print(f"compiling {count(specs)}, {jobs} at a time; each takes half a minute or more")
    for outcome in outcomes(specs, jobs):
        found[outcome.spec] = outcome
        what = "FAILED" if outcome.error else f"{outcome.seconds:.0f} s" if outcome.compiled else "was there"
        console.print(f"[{len(found)}/{len(specs)}] {outcome.spec.name}: {what}", markup=False)
    return [found[spec] for spec in specs]


def count(kernels: Sequence[object]) -> str:
    """How many kernels, in words: ``1 kernel``, ``2 kernels``."""
    return f"{len(kernels)} kernel{'s' * (len(kernels) != 1)}"


def report(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print a table of all outcomes, then the errors in full."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("kernel", overflow="fold")
    for heading in ("seconds", "registers", "spilled bytes", "shared memory", "library KB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        if outcome.error:
            table.add_row(outcome.spec.name, "failed", "", "", "", "")
        else:
            seconds = f"{outcome.seconds:.1f}" + ("" if outcome.compiled else " (was there)")
            cells = (outcome.registers, outcome.spills, outcome.smem, outcome.size // 1000)
            table.add_row(outcome.spec.name, seconds, *map(str, cells))
    console.print(table)
    for outcome in outcomes:
        if outcome.error:
            console.print(f"\n{outcome.spec.name}: {outcome.error}", markup=False)
