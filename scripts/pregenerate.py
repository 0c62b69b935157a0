#!/usr/bin/env python3
"""Compile a set of kernels into a cache directory, on a machine that needs a CUDA compiler but no GPU.

    python scripts/pregenerate.py --arch sm90 --a-dtype e4m3 --out-dtype bf16 --epilogue all --out kernels/
    python scripts/pregenerate.py --arch sm90 --quantize bf16 --out kernels/
    python scripts/pregenerate.py --plan kernels.json --out kernels/ --jobs 4
    python scripts/pregenerate.py --arch sm90 --a-dtype e4m3 --epilogue scaled_token_channel --wheel dist/

Copy the directory to the machine with the GPU and set CUTLASS_W8A8_CACHE_DIR to its place there, or install the wheel
there: every kernel in it is then served without a compiler. Options that name kernels may be repeated; the set is their
product. ``all`` stands for every possible value. Kernels that are in the directory already are not compiled again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.installed import require_package

require_package()

from rich.console import Console

from cutlass_w8a8 import dispatch, emit
from cutlass_w8a8.arch import ARCHS, Arch, arch_named
from cutlass_w8a8.batch import build_all, checked, count, default_jobs, read_plan, report
from cutlass_w8a8.cache.files import write_synced
from cutlass_w8a8.cache.location import LIMIT_VARIABLE, PACKS_VARIABLE, ROOT_VARIABLE, cache_root
from cutlass_w8a8.cli import silence_output
from cutlass_w8a8.cli.options import operand_name
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dtypes import OUTPUT_DTYPES, DType
from cutlass_w8a8.errors import UnsupportedError, W8A8Error
from cutlass_w8a8.evt.epilogues import FORMULAS, EpilogueSpec, ScaleA, ScaleB
from cutlass_w8a8.spec import KernelSpec, QuantSpec, Scheme, Spec
from cutlass_w8a8.toolchain.progress import QUIET_VARIABLE
from scripts import pack_wheel

ALL = "all"


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
    parser.add_argument(
        "--quantize",
        choices=[*(d.value for d in OUTPUT_DTYPES), ALL],
        help="instead of GEMMs, the kernels that quantise from these types to --a-dtype",
        **several,
    )
    parser.add_argument(
        "--scheme",
        choices=[*(scheme.value for scheme in Scheme), ALL],
        help="with --quantize, what shares a scale and where that comes from; default: all",
        **several,
    )
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="kernels as --print-plan and tune plan write, instead of the above"
    )
    parser.add_argument("--print-plan", action="store_true", help="print the set as such a list, and do nothing else")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the cache directory to fill; with --wheel: the cache's"
    )
    parser.add_argument("--wheel", type=Path, metavar="DIR", help="put them into a wheel in this folder")
    parser.add_argument(
        "--name", metavar="NAME", help="with --wheel: what tells it from others; default: architectures and types"
    )
    parser.add_argument("--sources-only", action="store_true", help="write DIR/sources/NAME.cu; compile nothing")
    parser.add_argument("--jobs", type=int, metavar="N", help="kernels at a time; default: by cores and memory")
    options = parser.parse_args(arguments)
    if options.out is None and options.wheel is None and not options.print_plan:
        parser.error("--out DIR or --wheel DIR is needed, unless --print-plan is given")
    if options.wheel and options.sources_only:
        parser.error("--wheel is for compiled kernels; leave out --sources-only")
    if options.name and not options.wheel:
        parser.error("--name is a wheel's; add --wheel DIR")
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: must be at least 1")
    of_gemms = options.out_dtype or options.epilogue or options.config
    if options.plan and (options.arch or options.a_dtype or options.quantize or options.scheme or of_gemms):
        parser.error("--plan already names the kernels; leave out the options that do")
    if options.quantize and of_gemms:
        parser.error("--quantize names kernels without epilogues; leave out --out-dtype, --epilogue, --config")
    if options.scheme and not options.quantize:
        parser.error("--scheme is for kernels that quantise; add --quantize DTYPE")
    return options


def kernels(options: argparse.Namespace) -> list[Spec]:
    """The kernels asked for, without repetitions, each checked.

    Raises:
        W8A8Error: one of them is impossible, or the plan cannot be read.
    """
    if options.plan:
        return checked(read_plan(options.plan))
    return checked(quantizations(options) if options.quantize else product(options))


def archs(options: argparse.Namespace) -> list[Arch]:
    return list(ARCHS.values()) if wants_all(options.arch) else [arch_named(name) for name in options.arch]


def quantizations(options: argparse.Namespace) -> list[QuantSpec]:
    sources = OUTPUT_DTYPES if wants_all(options.quantize) else [DType(name) for name in options.quantize]
    schemes = list(Scheme) if wants_all(options.scheme) else [Scheme(name) for name in options.scheme]
    return [
        QuantSpec(arch, source, target, scheme)
        for arch in archs(options)
        for source in sources
        for target in (arch.operands if wants_all(options.a_dtype) else map(DType, options.a_dtype))
        for scheme in schemes
        # Where schemes are not named, types choose them.
        if target in scheme.targets or not wants_all(options.scheme)
    ]


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


def write_sources(specs: Iterable[Spec], folder: Path) -> None:
    """Write every kernel's text."""
    folder.mkdir(parents=True, exist_ok=True)
    for spec in specs:
        files = emit.render(spec)
        write_synced(folder / f"{spec.name}.cu", files["kernel.cu"].encode())
        write_synced(folder / "host_prelude.h", files["host_prelude.h"].encode())


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
        name = pack_wheel.check_name(options.name or pack_wheel.default_name(specs))
        # Without a directory of its own a wheel is filled from the ordinary cache.
        folder = options.out.absolute() if options.out else cache_root()
        if options.sources_only:
            write_sources(specs, folder / "sources")
            print(f"sources of {count(specs)} in {folder / 'sources'}")
            return 0
        os.environ[ROOT_VARIABLE] = str(folder)
        os.environ[QUIET_VARIABLE] = "1"
        # Everything asked for belongs into this directory, whatever else is installed and however large it becomes.
        os.environ[PACKS_VARIABLE] = os.environ[LIMIT_VARIABLE] = "none"
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
    if failed:
        return 1
    if options.wheel:
        try:
            print(f"On the GPU machine: pip install {pack_wheel.write_wheel(specs, options.wheel, name)}")
        except (W8A8Error, OSError) as error:
            print(f"pregenerate: the wheel cannot be written to {options.wheel}: {error}", file=sys.stderr)
            return 1
    if options.out:
        print(f"On the GPU machine: {ROOT_VARIABLE}=<its copy of {folder}>")
    return 0


if __name__ == "__main__":
    sys.exit(main())
