"""Facts about a CUDA device, asked once, and which architecture's kernels serve it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from cutlass_w8a8.arch import ARCHS, Arch, Capability, arch_named, match, runs_on, spell
from cutlass_w8a8.errors import UnsupportedError

ARCH_VARIABLE = "CUTLASS_W8A8_ARCH"

# The current stream of a device as an address, and the current device's index; torch has them in CUDA builds only.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None)  # type: ignore[assignment]

# Archs that serve instead of the devices' own: (device index, or None for all; arch), the latest last.
_forced: list[tuple[int | None, Arch]] = []
_warned: set[Capability] = set()
# Called when another arch may serve a device than before, for those who remember what followed from it.
on_change: list[Callable[[], None]] = []


@dataclass(frozen=True)
class Device:
    """One CUDA device.

    Attributes:
        index: torch's device index.
        capability: compute capability (major, minor).
        sm_count: streaming multiprocessors.
        name: the product's name.
    """

    index: int
    capability: Capability
    sm_count: int
    name: str


@cache
def device(index: int) -> Device:
    """The facts of device ``index``."""
    properties = torch.cuda.get_device_properties(index)
    return Device(index, (properties.major, properties.minor), properties.multi_processor_count, properties.name)


def capturing(index: int) -> bool:
    """Whether the current stream of device ``index`` is being captured into a CUDA graph."""
    if current_device is None or current_device() == index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(index):
        return torch.cuda.is_current_stream_capturing()


@cache
def arch_of(where: Device) -> Arch:
    """The arch whose kernels serve a device: the one forced last, else the one made for it. Warns once if none is.

    Remembered: ``CUTLASS_W8A8_ARCH`` is read when a device is first used.

    Raises:
        UnsupportedError: no kernels run on this device, or the forced arch's do not.
    """
    forced = next((arch for index, arch in reversed(_forced) if index in (None, where.index)), None)
    origin = "use_arch"
    if forced is None and (forced := arch_from_environment()) is not None:
        origin = f"{ARCH_VARIABLE}={forced.name}"
    if forced is None:
        found = match(where.capability)
        if found.note and where.capability not in _warned:
            _warned.add(where.capability)
            warnings.warn(f"{where.name}: {found.note}", stacklevel=2)
        return found.arch
    if not runs_on(forced, where.capability):
        able = ", ".join(arch.name for arch in ARCHS.values() if runs_on(arch, where.capability)) or "none"
        raise UnsupportedError(
            f"{origin}: kernels of {forced.name} do not run on device {where.index} ({where.name}, compute capability "
            f"{spell(where.capability)}); those that do: {able}"
        )
    return forced


def arch_from_environment() -> Arch | None:
    """The arch that ``CUTLASS_W8A8_ARCH`` names, if it is set.

    Raises:
        UnsupportedError: there is no such arch.
    """
    name = os.environ.get(ARCH_VARIABLE)
    if not name:
        return None
    try:
        return arch_named(name)
    except UnsupportedError as error:
        raise UnsupportedError(f"{ARCH_VARIABLE}={name}: {error}; set it to one of them, or unset it") from None


def force_arch(index: int | None, arch: Arch) -> Callable[[], None]:
    """Have ``arch`` serve device ``index`` (None: all devices), ahead of what was forced before; returns the undo."""
    entry = (index, arch)
    _forced.append(entry)
    _changed()

    def end() -> None:
        # The latest of equal ones: contexts end in the reverse order of their beginning.
        del _forced[len(_forced) - 1 - _forced[::-1].index(entry)]
        _changed()

    return end


def _changed() -> None:
    arch_of.cache_clear()
    for forget in on_change:
        forget()
