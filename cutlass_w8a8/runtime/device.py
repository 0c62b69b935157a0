"""Facts about a CUDA device, asked once, and which architecture's kernels serve it."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import cache

import torch

from cutlass_w8a8.arch import ARCHS, Arch, Capability, arch_named, match, runs_on, spell
from cutlass_w8a8.errors import UnsupportedError

ARCH_VARIABLE = "CUTLASS_W8A8_ARCH"

# Archs that serve instead of the devices' own, by device index; None stands for all devices.
_forced: dict[int | None, Arch] = {}


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


@cache
def arch_of(where: Device) -> Arch:
    """The arch whose kernels serve a device: a forced one, else the one made for it. Warns once if none is.

    Raises:
        UnsupportedError: no kernels run on this device, or the forced arch's do not.
    """
    forced = _forced.get(where.index, _forced.get(None))
    origin = "use_arch"
    if forced is None and (name := os.environ.get(ARCH_VARIABLE)):
        forced, origin = arch_named(name), f"{ARCH_VARIABLE}={name}"
    if forced is None:
        found = match(where.capability)
        if found.note:
            warnings.warn(f"{where.name}: {found.note}", stacklevel=2)
        return found.arch
    if not runs_on(forced, where.capability):
        able = ", ".join(arch.name for arch in ARCHS.values() if runs_on(arch, where.capability)) or "none"
        raise UnsupportedError(
            f"{origin}: kernels of {forced.name} do not run on device {where.index} ({where.name}, compute capability "
            f"{spell(where.capability)}); those that do: {able}"
        )
    return forced


def force_arch(index: int | None, arch: Arch | None) -> Arch | None:
    """Have ``arch`` serve device ``index`` (None: all devices); None ends that. Returns what was forced before."""
    previous = _forced.pop(index, None)
    if arch is not None:
        _forced[index] = arch
    arch_of.cache_clear()
    return previous
