"""Facts about a CUDA device, asked once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from cutlass_w8a8.arch import Capability


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
