"""The command line: show a kernel, build it, list the cache, say what this machine lacks, and measure.

Exit status: 0 done, 1 one of this package's errors (its message is on standard error) or a wrong result that ``bench``
met, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cutlass_w8a8.cli import cache, commands
from cutlass_w8a8.cli import tune as tuner
from cutlass_w8a8.cli.bench import DESCRIPTION, add_bench_options, bench, weight_shapes
from cutlass_w8a8.cli.doctor import doctor
from cutlass_w8a8.cli.options import add_kernel_options, positive
from cutlass_w8a8.errors import W8A8Error
from cutlass_w8a8.problem import CONSTANT_OVERLAP, DEFAULT_OVERLAP, OVERLAPS
from cutlass_w8a8.version import VERSION

__all__ = ["main", "silence_output"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cutlass-w8a8",
        description="8-bit GEMM and quantisation kernels for NVIDIA GPUs: their source, their binaries, their cache.",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")

    show = verbs.add_parser("show", help="print a kernel's CUDA source, or its epilogue tree")
    add_kernel_options(show)
    drawing = show.add_mutually_exclusive_group()
    drawing.add_argument("--tree", action="store_true", help="draw the epilogue tree instead")
    drawing.add_argument("--mermaid", action="store_true", help="the same as a Mermaid flowchart")
    show.set_defaults(run=commands.show)

    build = verbs.add_parser("build", help="compile a kernel into the cache; needs no GPU")
    add_kernel_options(build)
    several = build.add_argument_group("several kernels")
    several.add_argument(
        "--weights",
        type=weight_shapes,
        metavar="NxK,...",
        help="compile what dispatch chooses for these weights and each --m M,...; with --quantize, what quantises too",
    )
    several.add_argument("--device", metavar="NAME", help="with --weights: the GPU, such as 'NVIDIA H200'")
    several.add_argument("--sm-count", type=positive, metavar="N", help="with --weights: its multiprocessors")
    several.add_argument(
        "--overlap",
        choices=OVERLAPS,
        help=f"with --weights: how calls overlap with the kernel before them; default: {DEFAULT_OVERLAP}, as calls do; "
        f"prepared calls and layers: {CONSTANT_OVERLAP}",
    )
    build.add_argument("--force", action="store_true", help="compile even if the kernel is cached")
    several.add_argument(
        "--print-plan",
        action="store_true",
        help="with --weights: only list the kernels, as --plan takes them",
    )
    several.add_argument(
        "--plan", type=Path, metavar="FILE", help="compile the kernels listed there instead, as tune plan writes them"
    )
    several.add_argument("--jobs", type=positive, metavar="N", help="kernels at a time; default: what fits")
    build.set_defaults(run=commands.build)

    keeping = verbs.add_parser("cache", help="list, verify, prune or clear the cache", description=cache.DESCRIPTION)
    cache.add_cache_options(keeping)

    listing = verbs.add_parser("list", help="the same as cache ls")
    listing.set_defaults(run=cache.ls, json=False)

    support = verbs.add_parser("support", help="what serves a compute capability, or why nothing does; needs no GPU")
    support.add_argument(
        "capabilities",
        nargs="*",
        type=commands.capability,
        metavar="CAPABILITY",
        help="such as 8.9; default: all known",
    )
    support.add_argument("--configs", action="store_true", help="list the configurations that dispatch may choose")
    support.set_defaults(run=commands.support)

    tuning = verbs.add_parser(
        "tune",
        help="find the fastest kernels for a GPU and its weight shapes",
        description=tuner.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tuner.add_tune_options(tuning)

    check = verbs.add_parser("doctor", help="what was found on this machine, whether it suffices, and the remedy")
    check.set_defaults(run=doctor)

    measure = verbs.add_parser(
        "bench", help="how fast kernels are beside vLLM's and torch's; needs a GPU", description=DESCRIPTION
    )
    add_bench_options(measure)
    measure.set_defaults(run=bench)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after the program's name; None takes them from ``sys.argv``.

    Returns:
        The exit status.

    Raises:
        SystemExit: the usage is wrong (status 2), or help or the version was asked for (0).
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Trees are drawn with characters that a C or Latin-1 locale lacks.
        sys.stdout.reconfigure(errors="replace")
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except W8A8Error as error:
        print(f"cutlass-w8a8: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader, such as head, has seen enough. Python would complain again when it flushes at exit.
        silence_output()
        return 0
    except OSError as error:
        print(f"cutlass-w8a8: cannot write the output: {error}", file=sys.stderr)
        silence_output()
        return 1


def silence_output() -> None:
    """Let what is still buffered for standard output go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
