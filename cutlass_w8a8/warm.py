"""Everything compiled and loaded before it is needed: which kernels calls will want, and getting them all at once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cutlass_w8a8 import calls
from cutlass_w8a8.arch import arch_named, runs_on
from cutlass_w8a8.errors import ArgumentError, CacheError, LaunchError, ToolchainError
from cutlass_w8a8.evt.epilogues import Azp, EpilogueSpec, ScaleA, ScaleB
from cutlass_w8a8.prepared import PreparedMM
from cutlass_w8a8.problem import DEFAULT_OVERLAP
from cutlass_w8a8.runtime.device import Device, arch_of, capturing, current_device
from cutlass_w8a8.runtime.device import device as facts_of
from cutlass_w8a8.settings import device_index, options
from cutlass_w8a8.spec import KernelSpec, QuantSpec, Scheme, Spec
from cutlass_w8a8.wanted import Target, Weight, items_of, plan, positive

if TYPE_CHECKING:
    from cutlass_w8a8.worker import Outcome

Extents = tuple[int, int]
Wanted = Spec | Extents | PreparedMM | torch.nn.Module


@dataclass(frozen=True)
class WarmupReport:
    """What `warmup` did.

    Attributes:
        kernels: the kernels wanted, each once, in the order in which they were met.
        compiled: those that had to be compiled.
        cached: those that were in the cache or a pack.
        loaded: those that can be launched now without being loaded first.
        seconds: how long all of it took.
    """

    kernels: tuple[Spec, ...]
    compiled: int
    cached: int
    loaded: int
    seconds: float


def warmup(
    what: Wanted | Iterable[Wanted],
    *,
    ms: Iterable[int] = (),
    dtype: torch.dtype = torch.float8_e4m3fn,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    azp: str = "none",
    scale_a: str = "token",
    scale_b: str = "channel",
    overlap: str = DEFAULT_OVERLAP,
    batch_invariant: bool | None = None,
    quantize: torch.dtype | None = torch.bfloat16,
    schemes: Iterable[str] | None = None,
    jobs: int | None = None,
    device: int | torch.device | str | None = None,
    arch: str | None = None,
    sm_count: int | None = None,
    device_name: str | None = None,
    progress: bool | None = None,
) -> WarmupReport:
    """Compile, side by side, and load every kernel that calls will want, so that none of them waits for one.

    Which kernels these are is asked of dispatch, for each weight and each M. Afterwards calls with these weights and M
    need neither compiler nor cache, in CUDA graphs as well. With ``CUTLASS_W8A8_JIT=off`` nothing is compiled: kernels
    that are missing are named, all of them, in an error.

    Args:
        what: one or several of: an (N, K) pair, the shape of a weight; what `prepare` returned; a module, for what its
            submodules keep of `prepare`, directly or in lists and dictionaries, and for what the methods
            ``prepared_mms`` of those that have one return; a `KernelSpec` or `QuantSpec`.
        ms: the rows of activations to expect, such as the sizes that graphs are captured for.
        dtype, out_dtype, bias, scale_b, overlap, batch_invariant: what calls with weights given by shape are like:
            element types, whether there is a bias, ``"channel"`` or ``"tensor"``, and as in `scaled_mm`. Of shapes that
            `prepare` or layers will be given, name their overlap, ``"weights"``: dispatch may choose other kernels for
            it. Of other weights all this is known; of a `cutlass_w8a8.nn.W8A8Linear` so is what follows, its inputs
            taken to be of its results' type.
        azp: zero points of activations: ``"none"``, ``"tensor"`` or ``"token"``. Prepared weights with ``azp_adj`` are
            taken to be called with one for each token, unless this is ``"tensor"``.
        scale_a: ``"token"`` or ``"tensor"``.
        quantize: the type from which activations are quantised, for the kernels that do; None for none, not
            those of layers either.
        schemes: how they are: ``"token"``, ``"tensor"``, ``"static"`` (one scale that is given), and these with
            ``"-azp"``. None: in all ways that give scales as ``scale_a`` and zero points as ``azp`` say.
        jobs: compilations at a time; None: as many as cores and memory allow.
        device: the CUDA device; None: the current one.
        arch: compile for this architecture, such as ``"sm90"``, and load nothing; needs no GPU.
        sm_count, device_name: with ``arch``, the multiprocessors and the name of the device it is for, such as
            ``"NVIDIA H200"``. They decide what dispatch chooses, as the device's own do where there is one.
        progress: whether to show a bar; None: if standard error is a terminal and ``CUTLASS_W8A8_QUIET`` is not set.

    Raises:
        ArgumentError: an argument is not acceptable, or there is neither a GPU nor ``arch``.
        CacheError: ``CUTLASS_W8A8_JIT=off``, and kernels are missing.
        LaunchError: a CUDA graph is being captured, or the driver refused to load a kernel.
        ToolchainError: kernels cannot be compiled, or the cache cannot take them; all others have been by then, and are
            loaded.
        W8A8Error: otherwise as `scaled_mm` says.
    """
    begin = time.monotonic()
    items = list(items_of(what))
    if jobs is not None and (not isinstance(jobs, int) or jobs < 1):
        raise ArgumentError(f"jobs is {jobs!r}; pass how many kernels to compile at a time, or None")
    where = None if arch is not None else _device(device)
    if where is None and arch is None and not all(isinstance(item, (KernelSpec, QuantSpec)) for item in items):
        raise ArgumentError(
            "there is no CUDA device to choose kernels for; pass arch='sm90', or another, to compile without loading"
        )
    target = None
    if where is not None:
        target = Target(arch_of(where), where.sm_count, where.name)
        if capturing(where.index):
            raise LaunchError("a CUDA graph is being captured, during which nothing can be loaded; call warmup before")
    elif arch is not None:
        if device is not None:
            raise ArgumentError(f"arch is {arch!r} and device {device!r}: with arch nothing is loaded; leave out one")
        target = Target(arch_named(arch), sm_count, device_name)
    like = _epilogue(azp, bias, scale_a, scale_b)
    shared = options(None, overlap, batch_invariant)
    specs = plan(
        items,
        positive("ms", ms),
        target,
        lambda n, k: Weight.of_shape(n, k, dtype, out_dtype, like, shared),
        scale_a=ScaleA(scale_a),
        azp=Azp(azp),
        quantize=quantize,
        schemes=None if schemes is None else _schemes(schemes),
    )
    outcomes = compile_missing(specs, jobs, progress)
    loaded = 0 if where is None else sum(_load(spec, where, outcomes) for spec in specs)
    compiled = sum(outcome.compiled for outcome in outcomes.values())
    if compiled:
        # Where others serve for good because a compilation behind them had failed.
        calls.forget()
    if failed := [outcome for outcome in outcomes.values() if outcome.error]:
        told = "\n".join(f"{outcome.spec.name}: {outcome.error}" for outcome in failed)
        raise ToolchainError(f"{len(failed)} of {len(specs)} kernels could not be compiled\n{told}")
    return WarmupReport(tuple(specs), compiled, len(specs) - compiled, loaded, time.monotonic() - begin)


def compile_missing(specs: Sequence[Spec], jobs: int | None, progress: bool | None) -> dict[Spec, Outcome]:
    """Compile those of ``specs`` that are not in the cache; what became of these.

    Raises:
        CacheError: there are such, and ``CUTLASS_W8A8_JIT=off``.
    """
    # Here because compilers and their like take as long to import as the rest.
    from cutlass_w8a8 import batch, pipeline
    from cutlass_w8a8.toolchain.progress import QUIET_VARIABLE

    missing = [spec for spec in specs if pipeline.find(spec) is None]
    if not missing:
        return {}
    if not pipeline.jit_enabled():
        told = "\n".join(f"{spec.name}: {spec.command('build')}" for spec in missing)
        raise CacheError(
            f"{batch.count(missing)} of {len(specs)} are in neither cache nor pack, and {pipeline.JIT_VARIABLE}=off "
            f"forbids compiling them now; these commands do:\n{told}"
        )
    if progress is None:
        progress = sys.stderr.isatty() and not os.environ.get(QUIET_VARIABLE)
    running = batch.outcomes(batch.checked(missing), jobs or batch.default_jobs())
    with _bar(len(missing), progress) as advance:
        outcomes = {}
        for outcome in running:
            outcomes[outcome.spec] = outcome
            advance()
    return outcomes


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Any]:
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("compiling kernels"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("kernels", total=total)
        yield lambda: progress.advance(task)


def _load(spec: Spec, where: Device, outcomes: dict[Spec, Outcome]) -> bool:
    """Load a kernel that is there and that the device runs; whether it did."""
    from cutlass_w8a8.acquire import entry_points
    from cutlass_w8a8.dispatch import quant_symbols

    failed = spec in outcomes and outcomes[spec].error
    if failed or not runs_on(spec.arch, where.capability):
        return False
    if isinstance(spec, QuantSpec):
        entry_points(spec, where, quant_symbols(spec.scheme))
    else:
        entry_points(spec, where)
    return True


def _epilogue(azp: str, bias: bool, scale_a: str, scale_b: str) -> EpilogueSpec:
    for name, value, accepted in (("azp", azp, Azp), ("scale_a", scale_a, ScaleA), ("scale_b", scale_b, ScaleB)):
        if value not in list(accepted):
            raise ArgumentError(f"{name} is {value!r}; accepted: {', '.join(each.value for each in accepted)}")
    return EpilogueSpec.of(scale_a, scale_b, azp, bool(bias))


def _schemes(names: Iterable[str]) -> list[Scheme]:
    accepted = {scheme.value: scheme for scheme in Scheme}
    given = [names] if isinstance(names, str) else list(names)
    for name in given:
        if name not in accepted:
            raise ArgumentError(f"schemes names {name!r}; accepted: {', '.join(accepted)}")
    return [accepted[name] for name in given]


def _device(device: int | torch.device | str | None) -> Device | None:
    index = device_index(device)
    if index is None:
        if current_device is None or not torch.cuda.is_available():
            return None
        index = current_device()
    return facts_of(index)
