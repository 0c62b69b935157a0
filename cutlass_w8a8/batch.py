"""Many kernels at once: lists of them, compiled side by side as far as cores and memory go."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cutlass_w8a8 import dispatch, pipeline
from cutlass_w8a8.errors import ArgumentError, W8A8Error
from cutlass_w8a8.runtime.abi import Library
from cutlass_w8a8.spec import KernelSpec, Spec, spec_from_json

if TYPE_CHECKING:
    from rich.console import Console

# nvcc takes 3.5 GB for a Hopper kernel.
GB_PER_JOB = 4


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel: its numbers, or the error."""

    spec: Spec
    compiled: bool = False
    seconds: float = 0.0
    registers: int = 0
    spills: int = 0
    smem: int = 0
    size: int = 0
    error: str = ""


def default_jobs() -> int:
    """As many compilations as cores and memory allow."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // (GB_PER_JOB * 10**9)))


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


def build(text: str) -> Outcome:
    """Compile one kernel, given as JSON; runs in a worker process."""
    spec = spec_from_json(text)
    try:
        entry = pipeline.build(spec, explicit=True)
        info = Library(str(entry.library)).info
    except (W8A8Error, OSError, ValueError) as error:
        return Outcome(spec, error=str(error))
    except KeyboardInterrupt:
        # The compilers are stopped by now. Merely raising would have this worker take the next kernel.
        os._exit(130)
    resources = entry.manifest["resources"]
    return Outcome(
        spec,
        compiled=entry.compiled,
        seconds=entry.manifest["seconds"],
        registers=resources["registers"],
        spills=resources["spill_stores"] + resources["spill_loads"],
        smem=info.smem_bytes,
        size=entry.library.stat().st_size,
    )


def build_all(specs: Sequence[Spec], jobs: int, console: Console) -> list[Outcome]:
    """Compile ``specs`` into the cache, ``jobs`` at a time, reporting each as it ends; outcomes come in their order."""
    outcomes: dict[Spec, Outcome] = {}
    jobs = min(jobs, len(specs))
    console.print(f"compiling {count(specs)}, {jobs} at a time; each takes half a minute or more")
    # Fresh processes, so that an interrupt reaches each and with it the compilers it started.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=jobs, mp_context=context) as pool:
        futures = [pool.submit(build, spec.to_json()) for spec in specs]
        try:
            for future in as_completed(futures):
                outcome = future.result()
                outcomes[outcome.spec] = outcome
                what = "FAILED" if outcome.error else f"{outcome.seconds:.0f} s" if outcome.compiled else "was there"
                console.print(f"[{len(outcomes)}/{len(specs)}] {outcome.spec.name}: {what}", markup=False)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [outcomes[spec] for spec in specs]


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
