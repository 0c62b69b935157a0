"""Launching: a prepared call holds all that does not change between calls of one signature."""

from __future__ import annotations

import ctypes
import struct
import threading
from dataclasses import dataclass

import torch

from cutlass_w8a8.config import KernelConfig, Raster
from cutlass_w8a8.errors import ConfigError, LaunchError
from cutlass_w8a8.problem import Overlap
from cutlass_w8a8.runtime.abi import CALL, CANNOT_IMPLEMENT, MAX_OPERANDS, MEANINGS, MISALIGNED, OVERLAPPING, POINTERS
from cutlass_w8a8.runtime.device import Device
from cutlass_w8a8.runtime.loader import LoadedKernel

_OVERLAP = {Overlap.NONE: 0, Overlap.LAUNCH: 1, Overlap.WEIGHTS: 2}
_RASTER = {Raster.HEURISTIC: 0, Raster.ALONG_M: 1, Raster.ALONG_N: 2}
# What a launch returns in a thread without a current context: the driver's error, or a failed workspace memset.
_NO_CONTEXT = (201, -3)


class Buffer(threading.local):
    """Bytes that each thread packs for itself: ctypes lets other threads run during a launch."""

    def __init__(self, size: int) -> None:
        self.bytes = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.bytes)


_pointers = Buffer(POINTERS.size)


@dataclass(frozen=True)
class Extents:
    """Sizes of one call.

    Attributes:
        m, n, k: extents, in elements.
        lda, ldb, ldd: leading strides, in elements.
        bytes_a, bytes_b, bytes_d: from the first to the last of each matrix, in bytes.
        bytes_operands: of each operand of the kernel, in bytes.
        wide: for each operand, whether the kernel reads it 16 bytes at a time.
    """

    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldd: int
    bytes_a: int
    bytes_b: int
    bytes_d: int
    bytes_operands: tuple[int, ...]
    wide: tuple[bool, ...]


class PreparedCall:
    """Launches one kernel for one set of extents on one device; pointers and stream come with each call.

    Attributes:
        workspace_bytes: workspace each launch needs, in bytes.

    Raises:
        ConfigError: CUTLASS refuses the problem.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        device: Device,
        extents: Extents,
        config: KernelConfig,
        overlap: Overlap,
    ) -> None:
        self._kernel = kernel
        self._device = device
        self._launch = kernel.library.launch
        operands = kernel.library.info.operands
        none = (0,) * (MAX_OPERANDS - operands)
        # Addresses are needed only for their alignment here.
        anything = (0, 16, 16, 16, 0, *(16,) * operands, *none)
        self._kept = ctypes.create_string_buffer(
            CALL.pack(
                *anything,
                kernel.function,
                extents.lda,
                extents.ldb,
                extents.ldd,
                extents.m,
                extents.n,
                extents.k,
                device.sm_count,
                kernel.blocks_per_sm,
                config.splits,
                config.swizzle,
                _RASTER[config.raster],
                _OVERLAP[overlap],
                sum(wide << i for i, wide in enumerate(extents.wide)),
                extents.bytes_a,
                extents.bytes_b,
                extents.bytes_d,
                *extents.bytes_operands,
                *none,
            )
        )
        self._address = ctypes.addressof(self._kept)
        self._pack = struct.Struct(f"={5 + operands}Q").pack_into
        self.workspace_bytes = int(kernel.library.workspace(self._address))
        if self.workspace_bytes == CANNOT_IMPLEMENT:
            raise ConfigError(f"config {config.name!r} cannot run m={extents.m} n={extents.n} k={extents.k}")

    def __call__(self, stream: int, a: int, b: int, d: int, *operands: int) -> int:
        """Enqueue the kernel on ``stream``, a raw stream of this call's device, with these device addresses.

        Returns:
            0; or, if nothing was enqueued because of the addresses, MISALIGNED or OVERLAPPING.

        Raises:
            LaunchError: the driver refused the launch.
        """
        workspace = 0
        if self.workspace_bytes:
            # Freed on return: the caching allocator hands it to later work of the same stream only.
            scratch = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=f"cuda:{self._device.index}")
            workspace = scratch.data_ptr()
        pointers = _pointers
        self._pack(pointers.bytes, 0, stream, a, b, d, workspace, *operands)
        result: int = self._launch(self._address, pointers.address)
        return self._failed(pointers.address, result) if result else 0

    def _failed(self, pointers: int, result: int) -> int:
        if result in _NO_CONTEXT:
            # A thread that has not used CUDA yet has no current context; torch makes one current on demand.
            torch.cuda.set_device(self._device.index)
            torch.cuda.current_stream().query()
            result = self._launch(self._address, pointers)
        if result in (0, MISALIGNED, OVERLAPPING):
            return result
        raise LaunchError(f"launch failed: {_describe(result)}")


def _describe(result: int) -> str:
    if result < 0:
        return MEANINGS.get(result, f"code {result}")
    from cuda.bindings import driver

    _, name = driver.cuGetErrorName(driver.CUresult(result))
    _, text = driver.cuGetErrorString(driver.CUresult(result))
    return f"{(name or b'?').decode()} ({(text or b'no description').decode()})"
