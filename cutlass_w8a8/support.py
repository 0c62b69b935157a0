"""What is served, and by which kernel: answers that compile and launch nothing."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from cutlass_w8a8.arch import Arch, Capability, match, spell
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dtypes import OPERAND_DTYPES, OUTPUT_DTYPES
from cutlass_w8a8.errors import ArgumentError, ConfigError, UnsupportedError
from cutlass_w8a8.evt.epilogues import Azp, EpilogueSpec
from cutlass_w8a8.evt.evaluate import TORCH_DTYPES
from cutlass_w8a8.problem import CALL_OVERLAP, DEFAULT_OVERLAP, Overlap, Problem
from cutlass_w8a8.request import FROM_TORCH, Request, check
from cutlass_w8a8.runtime.device import arch_of, device
from cutlass_w8a8.spec import KernelSpec

Tensor = torch.Tensor
Config = KernelConfig | str | None

# One for each context of the process that asks for batch invariance, and is entered.
invariance: list[None] = []


@dataclass(frozen=True)
class Support:
    """Whether a combination is served; truthy if so.

    Attributes:
        supported: the answer.
        reason: why not; empty if it is.
        arch: the architecture whose kernels serve it; empty if it is not.
        note: what there is to say of that: that the kernels are another capability's, or of an older kind than the
            chip's own; else empty.
    """

    supported: bool
    reason: str = ""
    arch: str = ""
    note: str = ""

    def __bool__(self) -> bool:
        return self.supported


def is_supported(
    capability: Capability,
    a_dtype: torch.dtype,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    azp: str = "none",
    toolkit: tuple[int, int] | None = None,
) -> Support:
    """Whether kernels exist for a device of ``capability`` (major, minor); needs no GPU and no compiler.

    It is about the kernels that serve such a device of themselves: `use_arch` and ``CUTLASS_W8A8_ARCH`` do not count.

    Args:
        capability: compute capability, as of ``torch.cuda.get_device_capability()``.
        a_dtype: torch.float8_e4m3fn or torch.int8.
        out_dtype: the result's type.
        azp: ``"none"``, ``"tensor"`` or ``"token"``.
        toolkit: version (major, minor) of the CUDA toolkit that is to compile them; None if that is no question, as
            where kernels come from elsewhere.

    Raises:
        ArgumentError: ``capability`` or ``toolkit`` is not a pair of integers.
    """
    where = _version("capability", capability, "(9, 0), as torch.cuda.get_device_capability() returns")
    oldest = None if toolkit is None else _version("toolkit", toolkit, "(13, 0), or None")
    for name, dtype in (("a_dtype", a_dtype), ("out_dtype", out_dtype)):
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError(f"{name} is {dtype!r}; pass a torch.dtype such as torch.int8")
    if azp not in list(Azp):
        raise ArgumentError(f"azp is {azp!r}; accepted: {', '.join(x.value for x in Azp)}")
    operand, out_type = FROM_TORCH.get(a_dtype), FROM_TORCH.get(out_dtype)
    if operand not in OPERAND_DTYPES or operand is None:
        names = " and ".join(str(TORCH_DTYPES[dtype]) for dtype in OPERAND_DTYPES)
        return Support(False, f"operands of dtype {a_dtype} are not served; {names} are")
    if out_type not in OUTPUT_DTYPES or out_type is None:
        names = ", ".join(str(TORCH_DTYPES[dtype]) for dtype in OUTPUT_DTYPES)
        return Support(False, f"results of dtype {out_dtype} are not served; {names} are")
    try:
        found = match(where)
        needed = found.arch.toolkit_for(operand)
        EpilogueSpec.of(azp=Azp(azp)).tree(operand.accumulator, out_type)
    except UnsupportedError as error:
        asked = f"compute capability {spell(where)}"
        return Support(False, str(error) if asked in str(error) else f"{asked}: {error}")
    if oldest is not None and oldest < needed:
        return Support(
            False,
            f"{operand.value} kernels for {found.arch.name} need CUDA {spell(needed)} or newer to be compiled, not "
            f"{spell(oldest)}",
        )
    return Support(True, arch=found.arch.name, note=found.notes(operand))


def _version(name: str, value: object, example: str) -> tuple[int, int]:
    """Two numbers, of whatever integer type.

    Raises:
        ArgumentError: it is something else.
    """
    try:
        if isinstance(value, tuple) and not any(isinstance(part, bool) for part in value):
            major, minor = map(operator.index, value)
            if major >= 0 and minor >= 0:
                return major, minor
    except (TypeError, ValueError):
        pass
    raise ArgumentError(f"{name} is {value!r}; pass (major, minor), such as {example}")


@dataclass(frozen=True)
class Explanation:
    """What would run for a call.

    Attributes:
        spec: the kernel.
        config: its configuration, launch-time choices included.
        note: why kernels of another architecture serve, if they do; else empty.
    """

    spec: KernelSpec
    config: KernelConfig
    note: str = ""


def explain(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    azp_adj: Tensor | None = None,
    azp: Tensor | None = None,
    *,
    config: Config = None,
    capability: Capability | None = None,
    sm_count: int | None = None,
    overlap: str = DEFAULT_OVERLAP,
    batch_invariant: bool | None = None,
) -> Explanation:
    """The kernel that serves this call on a device of ``capability`` (default: that of a's device).

    Nothing is compiled or launched, and CPU tensors are welcome when ``capability`` is given. An architecture forced by
    `use_arch` or ``CUTLASS_W8A8_ARCH`` counts for a's device, not for a capability that is given. Prepared calls
    and layers have another ``overlap`` of themselves, ``"weights"``. ``sm_count`` is the
    number of multiprocessors to choose for; without it, and without a device, that of a typical one of the capability.

    Raises:
        ArgumentError: as for `scaled_mm`; also when a is on the CPU and no capability is given.
    """
    request = check(a, b, scale_a, scale_b, out_dtype, bias, azp_adj, azp, None)
    if sm_count is not None and (not isinstance(sm_count, int) or sm_count < 1):
        raise ArgumentError(f"sm_count is {sm_count!r}; pass the number of multiprocessors, or None")
    invariant = parse_batch_invariant(batch_invariant)
    if capability is None:
        if not a.is_cuda:
            raise ArgumentError("a is on the CPU; pass capability=(major, minor) to say for which device to explain")
        where = device(a.get_device())
        return choose(
            request,
            arch_of(where),
            parse_config(config),
            sm_count=sm_count or where.sm_count,
            device=where.name,
            overlap=parse_overlap(overlap),
            batch_invariant=invariant,
        )
    found = match(_version("capability", capability, "(9, 0), as torch.cuda.get_device_capability() returns"))
    return replace(
        choose(
            request,
            found.arch,
            parse_config(config),
            sm_count=sm_count,
            overlap=parse_overlap(overlap),
            batch_invariant=invariant,
        ),
        note=found.note,
    )


def choose(
    request: Request,
    arch: Arch,
    config: KernelConfig | None,
    *,
    sm_count: int | None = None,
    device: str | None = None,
    overlap: Overlap = CALL_OVERLAP,
    batch_invariant: bool = False,
) -> Explanation:
    """The kernel that serves a checked request on ``arch``: the heuristic's, or the one ``config`` asks for.

    Args:
        request: the call.
        arch: whose kernels serve it.
        config: the configuration asked for, if any.
        sm_count, device: multiprocessors and name of the device; None if there is none at hand.
        overlap: how the kernel may overlap with the one before it.
        batch_invariant: whether the bits of a row must not depend on the number of rows.

    Raises:
        ConfigError: ``config`` is impossible.
        TableError: a table that ``CUTLASS_W8A8_TABLES`` names cannot be used.
        UnsupportedError: no kernel serves it.
    """
    # Here because the tables take as long to import as all that a process needs which makes no call.
    from cutlass_w8a8.dispatch import refusal, select, validate

    problem = _problem(request, arch, sm_count, device, overlap, batch_invariant)
    chosen = config or select(problem)
    spec = KernelSpec(arch, request.operand, request.out, request.epilogue, chosen)
    validate(spec, chosen)
    if reason := refusal(problem, chosen):
        raise ConfigError(f"config {chosen.name!r} {reason}")
    return Explanation(spec, chosen)


def alternatives(
    request: Request,
    arch: Arch,
    *,
    sm_count: int | None = None,
    device: str | None = None,
    overlap: Overlap = CALL_OVERLAP,
    batch_invariant: bool = False,
) -> Iterator[Explanation]:
    """All kernels that dispatch may have serve a checked request, best first, beginning with what `choose` gives.

    Args:
        request, arch, sm_count, device, overlap, batch_invariant: as in `choose`.

    Raises:
        TableError, UnsupportedError: as `choose`.
    """
    from cutlass_w8a8.dispatch import ranked

    problem = _problem(request, arch, sm_count, device, overlap, batch_invariant)
    for config in ranked(problem):
        yield Explanation(KernelSpec(arch, request.operand, request.out, request.epilogue, config), config)


def _problem(
    request: Request, arch: Arch, sm_count: int | None, device: str | None, overlap: Overlap, batch_invariant: bool
) -> Problem:
    extents = request.m, request.n, request.k
    types = request.operand, request.out, request.epilogue
    return Problem(arch, *extents, *types, sm_count, device, overlap, batch_invariant)


def parse_config(config: Config) -> KernelConfig | None:
    """The configuration a caller names, or None where the heuristic is to choose.

    Raises:
        ArgumentError: ``config`` is of another type.
        ConfigError: its text is not understood.
    """
    if config is None or isinstance(config, KernelConfig):
        return config
    if not isinstance(config, str):
        raise ArgumentError(f"config is a {type(config).__name__}; pass a KernelConfig, its text form, or None")
    return KernelConfig.parse(config)


def parse_overlap(overlap: str) -> Overlap:
    """The overlap a caller names.

    Raises:
        ArgumentError: there is no such overlap.
    """
    try:
        return Overlap(overlap)
    except ValueError:
        raise ArgumentError(f"overlap is {overlap!r}; pass {', '.join(repr(o.value) for o in Overlap)}") from None


def parse_batch_invariant(value: bool | None) -> bool:
    """Whether a caller wants batch invariance: as it says, or, where it says nothing, as the process's contexts do.

    Raises:
        ArgumentError: ``value`` is neither.
    """
    if not (value is None or isinstance(value, bool)):
        raise ArgumentError(f"batch_invariant is {value!r}; pass True, False, or None for the context's setting")
    return bool(invariance) if value is None else value
