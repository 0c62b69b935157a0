"""``bench``: measure on a GPU beside other kernels, or show again what an earlier run found."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from cutlass_w8a8.bench import fetch, report, results, shapes, smooth
from cutlass_w8a8.cache.location import ROOT_VARIABLE
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.errors import ArgumentError, ConfigError
from cutlass_w8a8.pipeline import JIT_VARIABLE

PLOT_FORMATS = ("svg", "png")
_NO_FOLDER = Path()
DESCRIPTION = """\
Measure our kernels beside vLLM's and torch's in one run on one GPU. Without options: eight weight shapes of 8B and 70B
models, ten M, fp8 and int8; per-token x per-channel scales, no bias, bf16 out. benchmarks/README.md tells the method.
Exit status 1: one of ours failed, or its result was wrong.
"""


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `bench` reads."""
    what = parser.add_argument_group("what to measure")
    shape = what.add_mutually_exclusive_group()
    shape.add_argument("--model", type=model_names, metavar="NAME,...", help=f"of {', '.join(shapes.MODELS)}")
    shape.add_argument("--weights", type=weight_shapes, metavar="NxK,...", help="weight shapes instead of the eight")
    what.add_argument("--tp", type=numbers, metavar="N,...", help="with --model: tensor-parallel ranks; default: 1")
    what.add_argument("--m", type=numbers, metavar="M,...", help=f"default: {','.join(map(str, shapes.BATCHES))}")
    what.add_argument("--dtypes", type=dtype_names, default=list(shapes.DTYPES), metavar="NAME,...", help="fp8, int8")
    what.add_argument(
        "--orders",
        type=_names(shapes.ORDERS),
        default=["alone"],
        metavar="NAME,...",
        help="what calls follow each other: "
        + "; ".join(f"{name}: {meaning}" for name, meaning in shapes.ORDERS.items())
        + "; default: alone",
    )
    what.add_argument(
        "--smooth",
        action="store_true",
        help="ours alone, about 60 M from 1 to 1024, and the steps in its time from one to the next",
    )

    whom = parser.add_argument_group("beside whom")
    whom.add_argument(
        "--providers",
        type=_names(results.PROVIDERS),
        metavar="NAME,...",
        help=f"of {', '.join(results.PROVIDERS)}; default: all",
    )
    whom.add_argument("--configs", type=_configs, default=[], metavar="NAME,...", help="of ours, forced, besides")
    whom.add_argument(
        "--vllm", type=Path, metavar="FILE", help=f"vLLM's {fetch.GEMM}; default: the one --fetch-vllm got"
    )
    whom.add_argument(
        "--vllm-ops",
        type=Path,
        metavar="FILE",
        help=f"vLLM's {fetch.OPS}, whose quantisation serves peers in a chain; default likewise",
    )
    whom.add_argument(
        "--fetch-vllm",
        type=Path,
        nargs="?",
        const=_NO_FOLDER,
        metavar="DIR",
        help=f"only download these two libraries of vllm {fetch.VERSION} (250 MB; they need torch {fetch.TORCH})",
    )

    how = parser.add_argument_group("how")
    how.add_argument(
        "--budget", type=float, default=25, metavar="MS", help="device time per provider and point; default: 25"
    )
    how.add_argument("--cache", type=Path, metavar="DIR", help=f"kernel cache (sets {ROOT_VARIABLE})")
    how.add_argument("--no-compile", action="store_true", help="a kernel missing from the cache is an error")
    how.add_argument("--no-host", action="store_true", help="leave out the host time of eager calls")

    then = parser.add_argument_group("what becomes of it")
    then.add_argument("--json", type=Path, metavar="FILE", help="write all measurements and conditions")
    then.add_argument("--commit", help="recorded in the JSON")
    then.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw heat maps, rooflines and curves (needs matplotlib)"
    )
    then.add_argument("--plot-format", choices=PLOT_FORMATS, default="svg", help="default: svg")
    then.add_argument("--from-json", type=Path, metavar="FILE", help="measure nothing, show this run; needs no GPU")


def bench(options: argparse.Namespace) -> int:
    """Run the command; status 1 if one of ours failed or was wrong.

    Raises:
        W8A8Error: options contradict each other, there is no GPU, a file cannot be read or written, or something
            optional that was asked for is not installed.
    """
    if options.fetch_vllm is not None:
        return _fetch(None if options.fetch_vllm == _NO_FOLDER else options.fetch_vllm)
    if options.plots:
        # Told before an hour is spent on measuring.
        from cutlass_w8a8.bench import plots

        plots.require_matplotlib()
    run = results.load(options.from_json) if options.from_json else _measure(options)
    print(report.text(run, smooth=options.smooth))
    if options.json:
        from cutlass_w8a8.bench import machine

        summary = report.summary(run.points, run.columns)
        machine.write_json(options.json, run.as_json() | {"summary": summary})
    if options.plots:
        for path in plots.render(run, options.plots, options.plot_format):
            print(path)
    failures = report.own_failures(run)
    for line in failures[:5]:
        print(f"cutlass-w8a8: {line}", file=sys.stderr)
    return 1 if failures else 0


def _measure(options: argparse.Namespace) -> results.Run:
    if options.tp and not options.model:
        raise ArgumentError("--tp divides the weights of --model NAME, which is not given")
    if options.smooth and options.providers not in (None, ["ours"]):
        raise ArgumentError("--smooth measures ours alone; leave out --providers")
    # Read by the package when a kernel is first looked for.
    if options.cache:
        os.environ[ROOT_VARIABLE] = str(options.cache.resolve())
    if options.no_compile:
        os.environ[JIT_VARIABLE] = "off"
    from cutlass_w8a8.bench.run import Plan, run

    plan = Plan(
        dtypes=options.dtypes,
        orders=options.orders,
        providers=["ours"] if options.smooth else options.providers or results.PROVIDERS,
        configs=options.configs,
        vllm=_library("--vllm", options.vllm, fetch.GEMM),
        vllm_ops=_library("--vllm-ops", options.vllm_ops, fetch.OPS),
        budget_ms=options.budget,
        host=not (options.no_host or options.smooth),
        commit=options.commit,
        batches=options.m or (smooth.dense_batches() if options.smooth else shapes.BATCHES),
    )
    if options.model:
        plan.weights, plan.left_out = shapes.weights_of(options.model, options.tp or [1])
    elif options.weights:
        plan.weights = {weight: [] for weight in options.weights}
    for line in plan.left_out:
        print(f"left out: {line}", file=sys.stderr)
    return run(plan)


def _library(option: str, given: Path | None, name: str) -> Path | None:
    if given is None:
        return fetch.present(name)
    if not given.is_file():
        raise ArgumentError(f"{option} {given} is not a file; give vLLM's {name}, which --fetch-vllm downloads")
    return given.resolve()


def _fetch(folder: Path | None) -> int:
    for path in fetch.fetch(folder):
        print(path)
    print(f"they need torch {fetch.TORCH}; another one may not load them, or may crash", file=sys.stderr)
    return 0


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    accepted = list(known)

    def read(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in accepted]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} not among {', '.join(accepted)}")
        return chosen

    return read


def model_names(text: str) -> list[str]:
    """Names of models joined by commas, for argparse."""
    return _names(shapes.MODELS)(text)


def dtype_names(text: str) -> list[str]:
    """Names of operand types joined by commas, for argparse."""
    return _names(shapes.DTYPES)(text)


def numbers(text: str) -> list[int]:
    """Positive numbers joined by commas, for argparse."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not positive numbers joined by commas")
    return [int(part) for part in parts]


def weight_shapes(text: str) -> list[tuple[int, int]]:
    """Weights' N x K joined by commas, for argparse."""
    found = []
    for part in text.split(","):
        n, x, k = part.partition("x")
        if not (x and n.isdecimal() and k.isdecimal()):
            raise argparse.ArgumentTypeError(f"{part!r} is not a weight's N x K, such as 6144x4096")
        try:
            shapes.refuse_extents(int(n), int(k))
        except ArgumentError as error:
            raise argparse.ArgumentTypeError(f"{part}: {error}") from error
        found.append((int(n), int(k)))
    return found


def _configs(text: str) -> list[str]:
    try:
        return [name for name in text.split(",") if KernelConfig.parse(name)]
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
