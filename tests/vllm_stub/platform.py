"""What vLLM's tests ask its platform."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch


class DeviceCapability(NamedTuple):
    """A compute capability."""

    major: int
    minor: int

    def to_int(self) -> int:
        return self.major * 10 + self.minor


class Platform:
    """CUDA as torch sees it; with ``pretended`` a capability that is not there, for runs on the CPU."""

    pretended: DeviceCapability | None = None

    def is_cuda(self) -> bool:
        return self.pretended is not None or torch.cuda.is_available()

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

    def is_rocm(self) -> bool:
        return False

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        if self.pretended is not None or not torch.cuda.is_available():
            return self.pretended
        return DeviceCapability(*torch.cuda.get_device_capability(device_id))

    def has_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        found = self.get_device_capability(device_id)
        least = capability if isinstance(capability, int) else capability[0] * 10 + capability[1]
        return found is not None and found.to_int() >= least

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def seed_everything(self, seed: int) -> None:
        random.seed(seed)
        torch.manual_seed(seed)


current_platform = Platform()
