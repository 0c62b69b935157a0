"""A GPU that is not there: CPU tensors that claim to be on it, and kernels that only say that they ran."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from cutlass_w8a8.background import Compilation
from cutlass_w8a8.errors import LaunchError
from cutlass_w8a8.runtime.device import Device
from cutlass_w8a8.runtime.loader import LoadedKernel
from cutlass_w8a8.spec import KernelSpec, Spec

WHERE = Device(0, (9, 0), 132, "a GPU that is not there")


class OnGpu(torch.Tensor):
    """A tensor that claims to be on device 0."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True

    def get_device(self) -> int:
        return 0


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnGpu)


class FakeGpu:
    """What is on disk, what was compiled and how, and what ran.

    Attributes:
        disk: kernels in the cache.
        blocking: kernels that calls were kept waiting for, in order.
        loaded: kernels loaded, in order.
        ran: kernels launched, in order.
        capturing: whether a graph is being captured.
        behind: compilations under way, which `finish` ends.
        failed: those that cannot be compiled.
        unloadable: kernels that the driver refuses.
        refused: kernels that CUTLASS refuses every problem for.
    """

    def __init__(self) -> None:
        self.disk: set[Spec] = set()
        self.blocking: list[Spec] = []
        self.loaded: list[Spec] = []
        self.ran: list[str] = []
        self.capturing = False
        self.behind: dict[Spec, Compilation] = {}
        self.failed: set[Spec] = set()
        self.unloadable: set[Spec] = set()
        self.refused: set[Spec] = set()

    def find(self, spec: Spec, **_: Any) -> Any:
        return SimpleNamespace(library=spec) if spec in self.disk else None

    def build(self, spec: Spec, **_: Any) -> Any:
        if spec not in self.disk:
            self.blocking.append(spec)
            self.disk.add(spec)
        return self.find(spec)

    def load(self, spec: Any, where: Device, symbol: str = "w8a8_kernel") -> LoadedKernel:
        if spec in self.unloadable:
            raise LaunchError("refused")
        self.loaded.append(spec)
        operands = 0
        if isinstance(spec, KernelSpec):
            operands = len(spec.epilogue.tree(spec.operand.accumulator, spec.out).loads)
        library: Any = SimpleNamespace(
            info=SimpleNamespace(operands=operands),
            workspace=lambda call: -1 if spec in self.refused else 0,
            launch=lambda *addresses: self.ran.append(spec.name) or 0,  # type: ignore[func-returns-value]
        )
        return LoadedKernel(library, 1, 1)

    def compile_behind(self, spec: Spec) -> Compilation | None:
        if spec in self.failed:
            return None
        return self.behind.setdefault(spec, Compilation(spec))

    def finish(self, spec: Spec, error: str = "") -> None:
        """A compilation behind has ended."""
        if error:
            self.failed.add(spec)
        else:
            self.disk.add(spec)
        self.behind.pop(spec).end(succeeded=not error)
