"""Settings of the process: contexts that change how every call is served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cutlass_w8a8 import calls
from cutlass_w8a8.arch import arch_named
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.runtime.device import force_arch
from cutlass_w8a8.support import Config, invariance, parse_batch_invariant, parse_config, parse_overlap


def options(config: Config, overlap: str, batch_invariant: bool | None) -> calls.Options:
    """The options a caller names, and the settings of the process where none is named.

    Raises:
        ArgumentError: one of them is of a wrong type or value.
        ConfigError: ``config`` is not understood.
    """
    invariant = parse_batch_invariant(batch_invariant)
    return calls.Options(parse_config(config), parse_overlap(overlap), invariant)


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Within this context, the bits of a row do not depend on the rows it is computed together with.

    The same as ``batch_invariant=True`` in every call that does not say otherwise. Only fp8 kernels that divide K among
    blocks are left out: all others give a row the same bits whatever the M, the tile and the overlap, as far as they
    have run on a GPU (int8 sums are exact anyhow). Holds for the whole process; do not enter or leave it while other
    threads make calls.
    """
    invariance.append(None)
    calls.forget()
    try:
        yield
    finally:
        invariance.pop()
        calls.forget()


@contextmanager
def use_arch(name: str, device: int | torch.device | str | None = None) -> Iterator[None]:
    """Within this context, serve calls with the kernels of another architecture than the GPU's own.

    For tests and comparisons: kernels of sm75 to sm89 carry PTX, so any newer GPU runs them. Holds for the whole
    process; do not enter or leave it while other threads make calls. Of nested contexts that concern a device the
    innermost holds. ``CUTLASS_W8A8_ARCH`` does the same from outside.

    Args:
        name: the architecture, such as ``"sm80"``.
        device: the CUDA device it is for: index, torch.device, or text such as ``"cuda:1"``; all of them if None.

    Raises:
        ArgumentError: ``device`` is none of these, or not a CUDA device of this machine.
        UnsupportedError: there is no such architecture. Calls raise it if the device cannot run its kernels.
    """
    end = force_arch(device_index(device), arch_named(name))
    try:
        yield
    finally:
        end()


def device_index(device: int | torch.device | str | None) -> int | None:
    """The index of a CUDA device of this machine, or None for None.

    Raises:
        ArgumentError: ``device`` is something else.
    """
    if device is None:
        return None
    try:
        index = device if isinstance(device, int) else torch.device(device).index
        cuda = isinstance(device, int) or torch.device(device).type == "cuda"
    except (TypeError, RuntimeError):
        index, cuda = None, False
    if isinstance(device, bool) or not cuda or index is None or not 0 <= index < torch.cuda.device_count():
        raise ArgumentError(
            f"device is {device!r}; pass the index of a CUDA device, a torch.device or text like 'cuda:0', or None for "
            f"all; this machine has {torch.cuda.device_count()}"
        )
    return index
