"""Getting a kernel ready to launch: the one chosen, or one that can take its place until it has been compiled."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutlass_w8a8 import pipeline
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.errors import LaunchError
from cutlass_w8a8.pipeline import Jit, jit_policy
from cutlass_w8a8.runtime.device import Device
from cutlass_w8a8.runtime.loader import KERNEL_SYMBOL, LoadedKernel, load, refuse_capture
from cutlass_w8a8.spec import KernelSpec, Spec
from cutlass_w8a8.support import Explanation

if TYPE_CHECKING:
    from cutlass_w8a8.background import Compilation

# Kernels in use by their entry points, so that a new shape needs no look at the cache.
_loaded: dict[tuple[Spec, int], Mapping[str, LoadedKernel]] = {}
# Held while the first kernel of its kind is compiled.
_first: dict[tuple[Any, ...], threading.Lock] = {}


@dataclass(frozen=True)
class Acquired:
    """A kernel that serves.

    Attributes:
        kernel: it, ready to launch.
        spec: which it is.
        config: its configuration, launch-time choices included.
        awaits: the compilation of the kernel whose place it takes; None if it is the one to stay.
    """

    kernel: LoadedKernel
    spec: KernelSpec
    config: KernelConfig
    awaits: Compilation | None = None


def entry_points(
    spec: Spec, where: Device, symbols: Iterable[str] = (KERNEL_SYMBOL,), *, compiling: bool = True
) -> Mapping[str, LoadedKernel]:
    """The kernels of ``spec``'s library called ``symbols``, loaded; from the cache, or compiled if need be.

    All of them at once: another shape's must not have to be loaded while a graph is captured.

    Args:
        spec: the library's specification.
        where: the device.
        symbols: its entry points.
        compiling: whether to compile what is not in the cache; if not, there is none.

    Raises:
        NotLoadedError: it is not loaded, and a CUDA graph is being captured.
        LookupError: it is not in the cache, and ``compiling`` is false.
        W8A8Error: it cannot be compiled or loaded.
    """
    found = _loaded.get((spec, where.index))
    if found is None:
        refuse_capture(spec.name, where)
        entry = pipeline.build(spec) if compiling else pipeline.find(spec, use=True)
        if entry is None:
            raise LookupError(spec.name)
        found = _loaded[spec, where.index] = {symbol: load(entry.library, where, symbol) for symbol in symbols}
    return found


def gemm(chosen: Explanation, where: Device, others: Callable[[], Iterable[Explanation]] | None) -> Acquired:
    """The kernel ``chosen`` on ``where``, or under ``CUTLASS_W8A8_JIT=background`` one that is at hand.

    Only the first kernel of a kind (types, epilogue, arch) is then waited for: for any other there is one that can take
    its place, unless that kernel cannot compute the problem at all.

    Args:
        chosen: the kernel that is to serve.
        where: the device.
        others: what can take its place, best first; None if nothing may.

    Raises:
        NotLoadedError: it is not loaded, and a CUDA graph is being captured.
        W8A8Error: it cannot be compiled or loaded.
    """
    if others is None or jit_policy() is not Jit.BACKGROUND:
        return Acquired(entry_points(chosen.spec, where)[KERNEL_SYMBOL], chosen.spec, chosen.config)
    if (served := _at_hand(chosen, where, others)) is not None:
        return served
    spec = chosen.spec
    with _first.setdefault((spec.arch, spec.operand, spec.out, spec.epilogue, where.index), threading.Lock()):
        # While this thread waited, another may have brought one in.
        if (served := _at_hand(chosen, where, others)) is not None:
            return served
        return Acquired(entry_points(spec, where)[KERNEL_SYMBOL], spec, chosen.config)


def _at_hand(chosen: Explanation, where: Device, others: Callable[[], Iterable[Explanation]]) -> Acquired | None:
    if (kernel := _cached(chosen.spec, where)) is not None:
        return Acquired(kernel, chosen.spec, chosen.config)
    for other in others():
        try:
            kernel = _cached(other.spec, where)
        except LaunchError:
            # A library that this driver refuses is no help; if all are like that, the chosen one's error will tell.
            continue
        if kernel is not None:
            # Here because under other policies nothing of it is needed.
            from cutlass_w8a8 import background

            return Acquired(kernel, other.spec, other.config, background.compile_behind(chosen.spec))
    return None


def _cached(spec: KernelSpec, where: Device) -> LoadedKernel | None:
    try:
        return entry_points(spec, where, compiling=False)[KERNEL_SYMBOL]
    except LookupError:
        return None


# In a child process nobody holds them.
os.register_at_fork(after_in_child=_first.clear)
