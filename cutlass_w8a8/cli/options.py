"""Options that name one kernel, the same for every command that takes one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from cutlass_w8a8.arch import ARCHS
from cutlass_w8a8.calls import Options
from cutlass_w8a8.config import CONFIG_FIELDS, KernelConfig, Schedule, Scheduler
from cutlass_w8a8.dispatch import schedules, select, validate
from cutlass_w8a8.dtypes import OPERAND_DTYPES, OUTPUT_DTYPES, DType
from cutlass_w8a8.errors import ArgumentError, W8A8Error
from cutlass_w8a8.evt.epilogues import FORMULAS, Azp, EpilogueSpec, ScaleA, ScaleB
from cutlass_w8a8.evt.evaluate import TORCH_DTYPES
from cutlass_w8a8.problem import CALL_OVERLAP, Overlap, Problem
from cutlass_w8a8.request import K_MULTIPLE, MAX_K_INT8, MAX_K_INT8_AZP, N_MULTIPLE
from cutlass_w8a8.spec import KernelSpec, QuantSpec, Scheme, Spec
from cutlass_w8a8.wanted import Target, Weight, plan

T = TypeVar("T")

DEFAULT_EXTENT = 4096
DEFAULT_OUT = DType.BF16


def add_kernel_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `kernel` reads."""
    what = parser.add_argument_group("what the kernel computes")
    what.add_argument("--arch", choices=list(ARCHS), default="sm90", help="default: %(default)s")
    what.add_argument(
        "--a-dtype",
        type=operand_name,
        choices=[dtype.value for dtype in OPERAND_DTYPES],
        help="type of A and B, e4m3 (or fp8) or int8; default: e4m3 where the arch has it, else int8",
    )
    what.add_argument(
        "--out-dtype", choices=[dtype.value for dtype in OUTPUT_DTYPES], help=f"default: {DEFAULT_OUT.value}"
    )
    what.add_argument("--scale-a", choices=[x.value for x in ScaleA], help="granularity; default: token")
    what.add_argument("--scale-b", choices=[x.value for x in ScaleB], help="granularity; default: channel")
    what.add_argument("--azp", choices=[x.value for x in Azp], help="zero point of A (int8); default: none")
    what.add_argument("--bias", action="store_true", default=None, help="add a bias")
    what.add_argument(
        "--epilogue",
        type=_reader(EpilogueSpec.parse),
        metavar="NAME",
        help="instead of the four options above: <formula>_<scale_a>_<scale_b>, such as azp-token-bias_token_channel; "
        f"formulas: {', '.join(FORMULAS)}",
    )

    what.add_argument(
        "--quantize",
        choices=[dtype.value for dtype in OUTPUT_DTYPES],
        metavar="DTYPE",
        help="instead of a GEMM, the kernel that quantises a matrix of this type to --a-dtype; but for --scheme no "
        "further options belong to it",
    )
    what.add_argument(
        "--scheme",
        choices=[scheme.value for scheme in Scheme],
        metavar="NAME",
        help="with --quantize, what shares a scale and where that comes from: "
        f"{', '.join(scheme.value for scheme in Scheme)}; default: {Scheme.TOKEN.value}",
    )

    how = parser.add_argument_group(
        "how it is tiled and scheduled",
        "--config or --tile set the configuration. Without them the heuristic chooses one for an M x N x K problem "
        f"(each {DEFAULT_EXTENT} unless given). Other options replace parts of it. The parts of a configuration's "
        "name as options: 128x128x128 --tile, 2x1 --cluster, pingpong --schedule, w64x64x64 --warp, s5 --stages 5, "
        "swap --swap-ab, streamk --scheduler streamk, accurate --no-fast-accum, slices2 --slices 2; split<n>, "
        "swizzle<n>, along_m and along_n are chosen at launch and change nothing here.",
    )
    how.add_argument("--m", type=_reader(_several), metavar="M", help="rows of A and D")
    how.add_argument("--n", type=_reader(_extent), metavar="N", help=f"columns of B and D, a multiple of {N_MULTIPLE}")
    how.add_argument("--k", type=_reader(_extent), metavar="K", help=f"extent summed over, a multiple of {K_MULTIPLE}")
    base = how.add_mutually_exclusive_group()
    base.add_argument(
        "--config", type=_reader(KernelConfig.parse), metavar="NAME", help="such as 128x128x128_2x1_pingpong"
    )
    base.add_argument(
        "--tile",
        type=_reader(_extents(3)),
        metavar="MxNxK",
        help="block tile; with --schedule or, multistage, --warp and --stages",
    )
    how.add_argument("--cluster", type=_reader(_extents(2)), metavar="MxN", help="thread-block cluster")
    how.add_argument("--schedule", type=Schedule, choices=list(Schedule), metavar="NAME", help=_one_of(Schedule))
    how.add_argument("--warp", type=_reader(_extents(3)), metavar="MxNxK", help="warp tile (multistage)")
    how.add_argument(
        "--stages", type=int, metavar="N", help="main loop stages; default: as many as fit (multistage: none)"
    )
    how.add_argument("--scheduler", type=Scheduler, choices=list(Scheduler), metavar="NAME", help=_one_of(Scheduler))
    yes_no: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": None}
    how.add_argument("--swap-ab", help="compute the transposed problem (not multistage)", **yes_no)
    how.add_argument("--fast-accum", help="fp8: leave partial sums in the tensor core; --no-: accurate", **yes_no)
    how.add_argument("--slices", type=int, metavar="N", help="blocks of a cluster that divide K (sm90, ws)")


def kernel(options: argparse.Namespace) -> KernelSpec | QuantSpec:
    """The kernel that ``options`` name, checked.

    Raises:
        W8A8Error: the options contradict each other, or the kernel is impossible.
    """
    arch = ARCHS[options.arch]
    operand = DType(options.a_dtype) if options.a_dtype else arch.operands[0]
    if options.quantize is not None:
        scheme = Scheme(options.scheme or Scheme.TOKEN)
        if options.a_dtype is None and operand not in scheme.targets:
            operand = scheme.targets[0]
        return _quantization(options, QuantSpec(arch, DType(options.quantize), operand, scheme))
    _refuse_scheme(options)
    out = DType(options.out_dtype) if options.out_dtype else DEFAULT_OUT
    epilogue = _chosen_epilogue(options)
    m, n, k = _shape(options)
    if operand is DType.INT8:
        operands = epilogue.tree(operand.accumulator, out).loads
        limit = MAX_K_INT8_AZP if any(load.element is DType.INT32 for load in operands) else MAX_K_INT8
        if k > limit:
            raise ArgumentError(
                f"--k {k}: int8 products could overflow int32 beyond K={limit}; split K over several calls"
            )
    config = _chosen_config(options, Problem(arch, m, n, k, operand, out, epilogue))
    spec = KernelSpec(arch, operand, out, epilogue, config)
    validate(spec, config)
    return spec


def weights_kernels(options: argparse.Namespace) -> list[Spec]:
    """The kernels that dispatch chooses for the weights that ``options`` name, each once.

    Raises:
        W8A8Error: the options contradict each other, or no kernel serves.
    """
    refuse(options, "--weights leaves configurations to dispatch", ("n", "k", "config", "plan", *CONFIG_FIELDS))
    if not options.m:
        raise ArgumentError("--weights needs --m: the rows of activations to expect, such as --m 1,16,256")
    _refuse_scheme(options)
    arch = ARCHS[options.arch]
    operand = DType(options.a_dtype) if options.a_dtype else arch.operands[0]
    out = TORCH_DTYPES[DType(options.out_dtype) if options.out_dtype else DEFAULT_OUT]
    epilogue = _chosen_epilogue(options)
    calls = Options(overlap=Overlap(options.overlap or CALL_OVERLAP))
    return plan(
        options.weights,
        options.m,
        Target(arch, options.sm_count, options.device),
        lambda n, k: Weight.of_shape(n, k, TORCH_DTYPES[operand], out, epilogue, calls),
        scale_a=epilogue.scale_a,
        azp=Azp.TOKEN if epilogue.formula.startswith("azp-token") else Azp.TENSOR,
        quantize=TORCH_DTYPES[DType(options.quantize)] if options.quantize else None,
        schemes=[Scheme(options.scheme)] if options.scheme else None,
    )


def refuse(options: argparse.Namespace, why: str, names: Iterable[str]) -> None:
    """Refuse those of the options called ``names`` that are given.

    Raises:
        ArgumentError: ``why``, and which to leave out.
    """
    given = [name for name in dict.fromkeys(names) if getattr(options, name, None) not in (None, False)]
    if given:
        listed = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ArgumentError(f"{why}; leave out {listed}")


def _refuse_scheme(options: argparse.Namespace) -> None:
    if options.scheme is not None and options.quantize is None:
        raise ArgumentError(f"--scheme {options.scheme} is for kernels that quantise; add --quantize, or leave it out")


def _quantization(options: argparse.Namespace, spec: QuantSpec) -> QuantSpec:
    of_gemms = ("out_dtype", "scale_a", "scale_b", "azp", "bias", "epilogue", "m", "n", "k", "config", *CONFIG_FIELDS)
    refuse(options, "--quantize names a kernel that has no epilogue and no configuration", of_gemms)
    return spec


def _chosen_epilogue(options: argparse.Namespace) -> EpilogueSpec:
    parts = {name: getattr(options, name) for name in ("scale_a", "scale_b", "azp", "bias")}
    given = {name: value for name, value in parts.items() if value is not None}
    if options.epilogue is None:
        return EpilogueSpec.of(**given)
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ArgumentError(f"--epilogue {options.epilogue.name} says it all already; leave out {names}")
    epilogue: EpilogueSpec = options.epilogue
    return epilogue


def _shape(options: argparse.Namespace) -> tuple[int, int, int]:
    for name, value, multiple in (("n", options.n, N_MULTIPLE), ("k", options.k, K_MULTIPLE)):
        if value is not None and value % multiple:
            raise ArgumentError(
                f"--{name} {value}: {name.upper()} must be a multiple of {multiple}; pad the operands with zeros to "
                f"{-(-value // multiple) * multiple}"
            )
    if options.m and len(options.m) > 1:
        raise ArgumentError(f"--m names {len(options.m)} numbers of rows; only build --weights takes several")
    return (options.m or [DEFAULT_EXTENT])[0], options.n or DEFAULT_EXTENT, options.k or DEFAULT_EXTENT


def _chosen_config(options: argparse.Namespace, problem: Problem) -> KernelConfig:
    base: KernelConfig
    if options.tile is not None:
        base = KernelConfig(options.tile, options.schedule or _only_schedule(problem))
    else:
        base = options.config or select(problem)
    given = {name: getattr(options, name, None) for name in CONFIG_FIELDS}
    return replace(base, **{name: value for name, value in given.items() if value is not None})


def _only_schedule(problem: Problem) -> Schedule:
    served = schedules(problem.arch.mainloop(problem.operand).family)
    if len(served) == 1:
        return served[0]
    raise ArgumentError(
        f"--tile for {problem.operand.value} on {problem.arch.name} needs --schedule: "
        f"{' or '.join(schedule.value for schedule in served)}"
    )


def operand_name(text: str) -> str:
    """The name of an operand type; ``fp8`` is another for e4m3."""
    return DType.E4M3.value if text == "fp8" else text


def _extent(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"{text!r} is not a positive number")
    return int(text)


def _several(text: str) -> list[int]:
    return [_extent(part) for part in text.split(",")]


def _extents(count: int) -> Callable[[str], tuple[int, ...]]:
    def read(text: str) -> tuple[int, ...]:
        parts = text.split("x")
        if len(parts) != count:
            raise ArgumentError(f"{text!r} is not {count} numbers joined by x")
        return tuple(_extent(part) for part in parts)

    return read


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    return _reader(_extent)(text)


def factor(text: str) -> float:
    """A number above 0, for argparse."""
    value = _number(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def share(text: str) -> float:
    """A number from 0 to less than 1, for argparse."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to less than 1, such as 0.02")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _one_of(enum: type[Schedule] | type[Scheduler]) -> str:
    return " or ".join(member.value for member in enum)


def _reader(read: Callable[[str], T]) -> Callable[[str], T]:
    """``read`` for argparse, which shows the message of this exception alone."""

    def wrapped(text: str) -> T:
        try:
            return read(text)
        except W8A8Error as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return wrapped
