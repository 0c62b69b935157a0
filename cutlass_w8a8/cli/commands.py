"""The commands about kernels: show, build, support."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cutlass_w8a8 import batch, emit, pipeline
from cutlass_w8a8.arch import ARCHS, Capability, spell
from cutlass_w8a8.arch import match as match_capability
from cutlass_w8a8.cli.cache import compiler
from cutlass_w8a8.cli.options import kernel, refuse, weights_kernels
from cutlass_w8a8.dispatch import configs_of
from cutlass_w8a8.dtypes import OPERAND_DTYPES
from cutlass_w8a8.errors import ArgumentError, CacheError, UnsupportedError
from cutlass_w8a8.evt import draw
from cutlass_w8a8.runtime.abi import Library
from cutlass_w8a8.spec import QuantSpec, Spec
from cutlass_w8a8.toolchain.progress import QUIET_VARIABLE


def show(options: argparse.Namespace) -> int:
    """Print the source of a kernel, and nothing else; on a terminal, highlighted."""
    spec = kernel(options)
    if options.tree or options.mermaid:
        if isinstance(spec, QuantSpec):
            raise ArgumentError(
                f"{spec.name} has no epilogue to draw; leave out {'--tree' if options.tree else '--mermaid'}"
            )
        tree = spec.epilogue.tree(spec.operand.accumulator, spec.out)
        print(draw.mermaid(tree) if options.mermaid else draw.text(tree))
        return 0
    source = emit.render(spec)["kernel.cu"]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        Console().print(Syntax(source, "cuda", background_color="default", word_wrap=True))
    else:
        sys.stdout.write(source)
    return 0


def build(options: argparse.Namespace) -> int:
    """Compile a kernel into the cache, and print where it is and what it uses; or all of a plan or of some weights."""
    if options.weights is not None:
        specs = weights_kernels(options)
        if options.print_plan:
            print(json.dumps([spec.to_json() for spec in specs], indent=1))
            return 0
        return compile_all(specs, options.jobs)
    refuse(options, "these belong to --weights", ("device", "sm_count", "overlap", "print_plan"))
    if options.plan is not None:
        return compile_plan(options.plan, options.jobs)
    spec = kernel(options)
    entry = pipeline.build(spec, force=options.force, explicit=True)
    try:
        info = Library(str(entry.library)).info
    except (OSError, ValueError) as error:
        raise CacheError(
            f"{entry.library} cannot be loaded ({error}); compile it anew with: {spec.command('build')} --force"
        ) from error
    resources = entry.manifest["resources"]
    spilled = resources["spill_stores"] + resources["spill_loads"]
    rows = {
        "kernel": spec.name,
        "state": "compiled" if entry.compiled else "was in the cache",
        "key": entry.key,
        "library": str(entry.library),
        "source": str(entry.source),
        "compiler": compiler(entry),
        "compile time": f"{entry.manifest['seconds']:.1f} s",
        "registers": f"{resources['registers']} a thread",
        "spills": f"{spilled} bytes a thread" if spilled else "none",
        "shared memory": f"{info.smem_bytes} bytes a block",
        "threads": f"{info.threads} a block",
    }
    for label, value in rows.items():
        print(f"{label:15}{value}")
    return 0


def compile_plan(plan: Path, jobs: int | None) -> int:
    """Compile what ``plan`` lists, ``jobs`` at a time (None: as many as cores and memory allow), and print a report.

    Raises:
        ArgumentError: the plan cannot be read, or lists no kernels or impossible ones.
    """
    return compile_all(batch.read_plan(plan), jobs)


def compile_all(specs: Sequence[Spec], jobs: int | None) -> int:
    """Compile ``specs``, ``jobs`` at a time (None: as many as cores and memory allow), and print a report.

    Raises:
        ArgumentError: there are none, or one is impossible.
    """
    from rich.console import Console

    specs = batch.checked(specs)
    os.environ.setdefault(QUIET_VARIABLE, "1")
    # A pipe has no width: lines as long as they need to be rather than folded names.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 250)
    outcomes = batch.build_all(specs, jobs or batch.default_jobs(), console)
    batch.report(outcomes, console)
    return 1 if any(outcome.error for outcome in outcomes) else 0


def capability(text: str) -> Capability:
    """A compute capability written as ``8.9``."""
    match = re.fullmatch(r"(\d{1,3})\.(\d{1,2})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a compute capability; write it like 8.9")
    return int(match[1]), int(match[2])


def support(options: argparse.Namespace) -> int:
    """Print what serves each capability, for each operand type."""
    for asked in options.capabilities or [arch.capability for arch in ARCHS.values()]:
        for operand in OPERAND_DTYPES:
            head = f"{spell(asked):5} {operand.value:5}"
            try:
                found = match_capability(asked)
                mainloop = found.arch.mainloop(operand)
            except UnsupportedError as error:
                print(f"{head} no: {error}")
                continue
            notes = found.notes(operand)
            toolkit = spell(found.arch.toolkit_for(operand))
            print(
                f"{head} {found.arch.name}, {mainloop.family.value}, CUDA {toolkit}" + (f" ({notes})" if notes else "")
            )
            if options.configs:
                for config in configs_of(found.arch, operand):
                    print(f"            {config.name}")
    return 0
