#!/usr/bin/env python3
"""Compile a set of kernels into a cache directory, on a machine that needs a CUDA compiler but no GPU.

    python scripts/pregenerate.py --arch sm90 --a-dtype e4m3 --out-dtype bf16 --epilogue all --out kernels/
    python scripts/pregenerate.py --plan kernels.json --out kernels/ --jobs 4

Copy the directory to the machine with the GPU and set CUTLASS_W8A8_CACHE_DIR to its place there: every kernel in it is
then served without a compiler. Options that name kernels may be repeated; the set is their product. ``all`` stands
for every possible value. Kernels that are in the directory already are not compiled again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.installed import require_package

require_package()

from rich.console import Console
from rich.table import Table

from cutlass_w8a8 import dispatch, emit, pipeline
from cutlass_w8a8.arch import ARCHS, arch_named
from cutlass_w8a8.cache.files import write_synced
from cutlass_w8a8.cache.location import ROOT_VARIABLE
from cutlass_w8a8.cli import silence_output
from cutlass_w8a8.cli.options import operand_name
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dtypes import OUTPUT_DTYPES, DType
from cutlass_w8a8.errors import ArgumentError, UnsupportedError, W8A8Error
from cutlass_w8a8.evt.epilogues import FORMULAS, EpilogueSpec, ScaleA, ScaleB
from cutlass_w8a8.runtime.abi import Library
from cutlass_w8a8.spec import KernelSpec
from cutlass_w8a8.toolchain.progress import QUIET_VARIABLE

ALL = "all"
# nvcc takes 3.5 GB for a Hopper kernel.
GB_PER_JOB = 4


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel: its numbers, or the error."""

    spec: KernelSpec
    compiled: bool = False
    seconds: float = 0.0
    registers: int = 0
    spills: int = 0
    smem: int = 0
    size: int = 0
    error: str = ""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several: dict[str, Any] = {"action": "append", "metavar": "NAME"}
    parser.add_argument("--arch", choices=[*ARCHS, ALL], help="default: all", **several)
    operands = sorted({dtype.value for arch in ARCHS.values() for dtype in arch.operands})
    parser.add_argument(
        "--a-dtype",
        type=operand_name,
        choices=[*operands, ALL],
        help="e4m3 (or fp8) or int8; default: all the arch serves",
        **several,
    )
    parser.add_argument(
        "--out-dtype", choices=[*(d.value for d in OUTPUT_DTYPES), ALL], help="default: bf16", **several
    )
    parser.add_argument("--epilogue", help="such as scaled_token_channel; default: all", **several)
    parser.add_argument(
        "--config", help="a configuration; default: all that dispatch may choose on the arch", **several
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="a JSON list of specifications, instead of the above")
    parser.add_argument("--print-plan", action="store_true", help="print the set as such a list, and do nothing else")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the cache directory to fill")
    parser.add_argument("--sources-only", action="store_true", help="write DIR/sources/NAME.cu; compile nothing")
    parser.add_argument("--jobs", type=int, metavar="N", help="kernels at a time; default: by cores and memory")
    options = parser.parse_args(arguments)
    if options.out is None and not options.print_plan:
        parser.error("--out DIR is needed, unless --print-plan is given")
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: must be at least 1")
    if options.plan and (options.arch or options.a_dtype or options.out_dtype or options.epilogue or options.config):
        parser.error("--plan already names the kernels; leave out --arch, --a-dtype, --out-dtype, --epilogue, --config")
    return options


def default_jobs() -> int:
    """As many compilations as cores and memory allow."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // (GB_PER_JOB * 10**9)))


def kernels(options: argparse.Namespace) -> list[KernelSpec]:
    """The kernels asked for, without repetitions, each checked.

    Raises:
        W8A8Error: one of them is impossible, or the plan cannot be read.
    """
    specs = read_plan(options.plan) if options.plan else product(options)
    if not specs:
        raise ArgumentError("the set is empty: the plan holds no kernels, or no epilogue suits the types")
    for spec in specs:
        if reasons := dispatch.problems(spec):
            raise ArgumentError(f"kernel {spec.name} is impossible: {'; '.join(reasons)}")
    return list(dict.fromkeys(specs))


def read_plan(path: Path) -> list[KernelSpec]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [KernelSpec.from_json(entry if isinstance(entry, str) else json.dumps(entry)) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"plan {path} cannot be read ({type(error).__name__}: {error}); it must be a JSON list of strings, each "
            "as KernelSpec.to_json() writes it; --print-plan prints one"
        ) from error


def product(options: argparse.Namespace) -> list[KernelSpec]:
    found = []
    archs = list(ARCHS.values()) if wants_all(options.arch) else [arch_named(name) for name in options.arch]
    for arch in archs:
        operands = list(arch.operands) if wants_all(options.a_dtype) else [DType(name) for name in options.a_dtype]
        if wants_all(options.arch):
            operands = [operand for operand in operands if operand in arch.operands]
        outs = [DType(name) for name in options.out_dtype or [DType.BF16.value] if name != ALL]
        for operand, out in itertools.product(
            operands, outs if ALL not in (options.out_dtype or []) else OUTPUT_DTYPES
        ):
            epilogues = (
                every_epilogue(operand)
                if wants_all(options.epilogue)
                else [EpilogueSpec.parse(name) for name in options.epilogue]
            )
            if wants_all(options.a_dtype):
                # Zero points are a matter of int8: where types are not named, epilogues choose them.
                epilogues = [epilogue for epilogue in epilogues if suits(epilogue, operand)]
            configs = (
                list(dispatch.configs_of(arch, operand))
                if wants_all(options.config)
                else [KernelConfig.parse(name) for name in options.config]
            )
            found += [KernelSpec(arch, operand, out, epilogue, config) for epilogue in epilogues for config in configs]
    return found


def wants_all(names: list[str] | None) -> bool:
    return not names or ALL in names


def every_epilogue(operand: DType) -> list[EpilogueSpec]:
    every = (EpilogueSpec(*parts) for parts in itertools.product(FORMULAS, ScaleA, ScaleB))
    return [epilogue for epilogue in every if suits(epilogue, operand)]


def suits(epilogue: EpilogueSpec, operand: DType) -> bool:
    try:
        epilogue.tree(operand.accumulator, DType.BF16)
    except UnsupportedError:
        return False
    return True


def write_sources(specs: Iterable[KernelSpec], folder: Path) -> None:
    """Write every kernel's text."""
    folder.mkdir(parents=True, exist_ok=True)
    for spec in specs:
        files = emit.render(spec)
        write_synced(folder / f"{spec.name}.cu", files["kernel.cu"].encode())
        write_synced(folder / "host_prelude.h", files["host_prelude.h"].encode())


def build(text: str) -> Outcome:
    """Compile one kernel, given as JSON; runs in a worker process."""
    spec = KernelSpec.from_json(text)
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


def build_all(specs: Sequence[KernelSpec], jobs: int, console: Console) -> list[Outcome]:
    """Compile ``specs``, ``jobs`` at a time, reporting each as it ends; outcomes come in the order of ``specs``."""
    outcomes: dict[KernelSpec, Outcome] = {}
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
    return f"{len(kernels)} kernel{'s' * (len(kernels) != 1)}"


def report(outcomes: Sequence[Outcome], console: Console) -> None:
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


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        status = run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader, such as head, has seen enough. Python would complain again when it flushes at exit.
        silence_output()
        return 1


def run(arguments: Sequence[str] | None) -> int:
    options = parse(arguments)
    # A pipe has no width: lines as long as they need to be rather than folded names.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 250)
    try:
        specs = kernels(options)
        if options.print_plan:
            print(json.dumps([spec.to_json() for spec in specs], indent=1))
            return 0
        folder = options.out.absolute()
        if options.sources_only:
            write_sources(specs, folder / "sources")
            print(f"sources of {count(specs)} in {folder / 'sources'}")
            return 0
        os.environ[ROOT_VARIABLE] = str(folder)
        os.environ[QUIET_VARIABLE] = "1"
        outcomes = build_all(specs, options.jobs or default_jobs(), console)
    except W8A8Error as error:
        print(f"pregenerate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pregenerate: interrupted; finished kernels are kept", file=sys.stderr)
        return 130
    report(outcomes, console)
    failed = sum(bool(outcome.error) for outcome in outcomes)
    compiled = sum(outcome.compiled for outcome in outcomes)
    print(f"{count(outcomes)} in {folder}: {compiled} compiled, {len(outcomes) - compiled - failed} were there, "
          f"{failed} failed")  # fmt: skip
    if not failed:
        print(f"On the GPU machine: {ROOT_VARIABLE}=<its copy of {folder}>")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
