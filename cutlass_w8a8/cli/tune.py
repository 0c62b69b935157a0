"""``tune``: plan candidates, compile them, measure them, and fit a table; each step where its machine is."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cutlass_w8a8 import batch
from cutlass_w8a8.arch import ARCHS
from cutlass_w8a8.bench import shapes
from cutlass_w8a8.cache.files import write_synced
from cutlass_w8a8.cli.bench import dtype_names, model_names, numbers, weight_shapes
from cutlass_w8a8.cli.commands import compile_plan
from cutlass_w8a8.cli.options import factor, positive, share
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch import configs_of
from cutlass_w8a8.dispatch.tables import write_text
from cutlass_w8a8.dispatch.tuned import TABLES_VARIABLE
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.pipeline import JIT_VARIABLE
from cutlass_w8a8.problem import OVERLAPS
from cutlass_w8a8.spec import KernelSpec
from cutlass_w8a8.tune import fit, plan, records, report, space

DESCRIPTION = """\
Find the fastest kernels for a GPU and its weight shapes, and write a table that dispatch follows (CUTLASS_W8A8_TABLES).
Without a step all are run, in order, in --dir; a run that was interrupted goes on where it stopped.
"""
STEPS = {
    "plan": "choose candidates by rules and a model of the device; needs neither GPU nor compiler",
    "compile": "compile the plan into the cache; needs no GPU",
    "measure": "time the plan's kernels on this GPU",
    "fit": "make a table of measured times, and tell what it loses; needs neither GPU nor compiler",
}
PLAN, TIMES, TABLE = "plan.jsonl", "times.jsonl", "table.json"
DEFAULTS: dict[str, Any] = {
    "dir": Path("tune"),
    "tp": [1],
    "m": list(shapes.BATCHES),
    "dtypes": list(shapes.DTYPES),
    "keep": plan.KEEP,
    "arch": "sm90",
    "max_kernels": 100,
    "overlaps": ["none"],
    "budget": 25.0,
    "no_compile": False,
    "within": fit.WITHIN,
    "points": False,
}


def add_tune_options(parser: argparse.ArgumentParser) -> None:
    """Add the steps, and the options that each reads."""
    for add in (_add_folder, _add_shapes, _add_plan, _add_compile, _add_measure, _add_fit):
        add(parser)
    # Steps have no defaults of their own, which would undo what is given before the step's name.
    parser.set_defaults(**DEFAULTS, run=tune)
    steps = parser.add_subparsers(dest="step", metavar="STEP")
    for name, run, adders in (
        ("plan", plan_step, (_add_shapes, _add_plan)),
        ("compile", compile_step, (_add_compile,)),
        ("measure", measure_step, (_add_shapes, _add_measure)),
        ("fit", fit_step, (_add_fit,)),
    ):
        step = steps.add_parser(name, help=STEPS[name], description=STEPS[name], argument_default=argparse.SUPPRESS)
        _add_folder(step)
        for add in adders:
            add(step)
        step.set_defaults(run=run)
        if name == "fit":
            step.add_argument(
                "times",
                nargs="*",
                default=[],
                type=Path,
                metavar="FILE",
                help=f"measured times; default: {TIMES} in --dir",
            )


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, metavar="DIR", help=f"holds {PLAN}, {TIMES} and {TABLE}; default: tune")


def _add_shapes(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("problems")
    shape = what.add_mutually_exclusive_group()
    shape.add_argument("--model", type=model_names, metavar="NAME,...", help=f"of {', '.join(shapes.MODELS)}")
    shape.add_argument("--weights", type=weight_shapes, metavar="NxK,...", help="default: eight of 8B and 70B models")
    what.add_argument("--tp", type=numbers, metavar="N,...", help="with --model: tensor-parallel ranks; default: 1")
    what.add_argument("--m", type=numbers, metavar="M,...", help=f"default: {','.join(map(str, shapes.BATCHES))}")
    what.add_argument("--dtypes", type=dtype_names, metavar="NAME,...", help="fp8, int8")
    what.add_argument(
        "--keep",
        type=factor,
        metavar="X",
        help=f"pass over what the model says takes X times the best; default: {plan.KEEP}",
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("candidates")
    how.add_argument("--arch", choices=list(ARCHS), help="default: sm90")
    how.add_argument("--sm-count", type=positive, metavar="N", help="multiprocessors; default: a typical device's")
    how.add_argument(
        "--bandwidth", type=factor, metavar="TB/S", help="memory bandwidth on sm90; default: an H200's 4.8"
    )
    how.add_argument("--max-kernels", type=positive, metavar="N", help="for each type; default: 100")


def _add_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=positive, metavar="N", help="kernels at a time; default: by cores and memory")


def _add_measure(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("measuring")
    how.add_argument(
        "--overlaps",
        type=_overlaps,
        metavar="NAME,...",
        help="how calls overlap with the kernel before: none; launch, by dependent launch; weights, loaded before the "
        "wait; default: none",
    )
    how.add_argument("--budget", type=factor, metavar="MS", help="device time a finalist; default: 25")
    how.add_argument("--minutes", type=factor, metavar="N", help="stop before a point that would begin later")
    how.add_argument(
        "--no-compile",
        action="store_true",
        default=argparse.SUPPRESS,
        help="a kernel missing from the cache has no time",
    )
    how.add_argument("--commit", help="recorded")


def _add_fit(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("the table")
    how.add_argument("--within", type=share, metavar="SHARE", help="lost at a point at most; default: 0.02")
    how.add_argument("--points", action="store_true", default=argparse.SUPPRESS, help="list the loss at every point")
    how.add_argument("--out", type=Path, metavar="FILE", help=f"the table; default: {TABLE} in --dir")


def tune(options: argparse.Namespace) -> int:
    """Run all steps in order; what a step has left in the folder before is used."""
    if not (options.dir / PLAN).exists():
        plan_step(options)
    options.times = []
    return compile_step(options) or measure_step(options) or fit_step(options)


def plan_step(options: argparse.Namespace) -> int:
    """Write the candidates, a line each.

    Raises:
        ArgumentError: a shape cannot be made, or nothing is left to compile.
        UnsupportedError: the arch does not multiply a type.
    """
    arch, epilogue = ARCHS[options.arch], EpilogueSpec.of()
    extents = [(point.m, point.n, point.k) for point in _points(options, options.dtypes[:1])]
    chosen: list[KernelSpec] = []
    for dtype in options.dtypes:
        operand = records.OPERANDS[dtype]
        model = plan.model_of(arch, operand, options.sm_count, options.bandwidth)
        configs = [spec.config for spec in space.kernels(arch, operand, DType.BF16, epilogue)]
        near = plan.near_best(model, configs, extents, options.keep)
        kept = plan.choose(near, options.max_kernels, configs_of(arch, operand), options.keep)
        chosen += [KernelSpec(arch, operand, DType.BF16, epilogue, config) for config in kept]
        each = sorted(sum(config in near[point] for config in kept) for point in extents)
        print(f"{dtype}: {len(kept)} of {len(configs)} candidates, {each[0]} to {each[-1]} of them at a point")
    options.dir.mkdir(parents=True, exist_ok=True)
    path = options.dir / PLAN
    write_synced(path, "".join(f"{spec.to_json()}\n" for spec in batch.checked(chosen)).encode())
    print(f"{batch.count(chosen)} in {path}")
    return 0


def compile_step(options: argparse.Namespace) -> int:
    """Compile the plan into the cache.

    Raises:
        ArgumentError: there is no plan.
    """
    return compile_plan(options.dir / PLAN, options.jobs)


def measure_step(options: argparse.Namespace) -> int:
    """Time the plan's kernels; status 1 if time ran out before all points were done.

    Raises:
        ArgumentError: there is no plan, or it is another arch's.
        TableError: the file of times is another device's.
        UnsupportedError: there is no GPU, or it runs no kernels.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    specs = batch.checked(batch.read_plan(options.dir / PLAN))
    # Read by the package when a kernel is first looked for.
    if options.no_compile:
        os.environ[JIT_VARIABLE] = "off"
    from cutlass_w8a8.tune import measure

    facts = measure.facts(options.commit)
    serving = [spec for spec in specs if isinstance(spec, KernelSpec) and spec.arch is records.Machine.of(facts).arch]
    if not serving:
        raise ArgumentError(
            f"{options.dir / PLAN} lists kernels of {specs[0].arch.name}, and this GPU runs those of "
            f"{records.Machine.of(facts).arch.name}; plan with --arch {records.Machine.of(facts).arch.name}"
        )
    log = records.Log(options.dir / TIMES, facts)
    plans = measure.Plan(
        kernels=_by_operand(serving),
        points=_points(options, options.dtypes),
        overlaps=options.overlaps,
        budget_ms=options.budget,
        keep=options.keep,
        seconds=None if options.minutes is None else options.minutes * 60,
    )
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    columns = TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("measuring", total=len(plans.points) * len(plans.overlaps))

        def told(line: str, done: int, _: int) -> None:
            progress.update(task, completed=done)
            console.print(line)

        finished = measure.run(plans, log, told)
    if not finished:
        print(f"time is up; the same command goes on after the {len(log.finished)} points in {log.path}")
    return 0 if finished else 1


def fit_step(options: argparse.Namespace) -> int:
    """Write the table, and say what it loses.

    Raises:
        TableError: times cannot be read.
    """
    measured = records.read(options.times or [options.dir / TIMES])
    table = fit.fit_table(measured, options.within)
    path = options.out or options.dir / TABLE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_synced(path, write_text(table).encode())
    # What follows takes a minute or two, and nobody need wait for it.
    print(f"table in {path}; to use it: {TABLES_VARIABLE}={path.absolute()}", flush=True)
    own = fit.losses(table, measured)
    unseen = list(fit.unseen_losses(measured, options.within))
    for line in report.lines(table, own, fit.losses(table, measured, by_model=True), unseen):
        print(line)
    if options.points:
        for line in report.point_lines(own):
            print(line)
    return 0


def _points(options: argparse.Namespace, dtypes: Sequence[str]) -> list[shapes.Point]:
    weights: Sequence[tuple[int, int]] = options.weights or shapes.WEIGHTS
    if options.model:
        found, refused = shapes.weights_of(options.model, options.tp)
        for line in refused:
            print(f"left out: {line}", file=sys.stderr)
        if not found:
            raise ArgumentError("--model and --tp leave no weight; ask for other models, or fewer ranks")
        weights = list(found)
    return shapes.points(weights, options.m, dtypes, ["alone"])


def _by_operand(specs: Sequence[KernelSpec]) -> Mapping[DType, list[KernelConfig]]:
    found: dict[DType, list[KernelConfig]] = {}
    for spec in specs:
        found.setdefault(spec.operand, []).append(spec.config)
    return found


def _overlaps(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in OVERLAPS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} not among {', '.join(OVERLAPS)}")
    return chosen
