"""Launching a quantisation kernel: what does not change between calls of one signature is packed once."""

from __future__ import annotations

import torch

from cutlass_w8a8.errors import LaunchError
from cutlass_w8a8.runtime.abi import MEANINGS, QUANT_CALL
from cutlass_w8a8.runtime.device import Device
from cutlass_w8a8.runtime.launch import Buffer
from cutlass_w8a8.runtime.loader import LoadedKernel, check

# CUDA_ERROR_INVALID_CONTEXT: this thread has no current context yet.
_NO_CONTEXT = 201


_buffer = Buffer(QUANT_CALL.size)


class PreparedQuantize:
    """Launches one quantisation kernel for one set of extents on one device; pointers and stream come with each call.

    Args:
        kernel: the entry point that serves the extents.
        device: where.
        strides: leading strides of x and q, in elements.
        extents: m, k, and the 16-byte vectors that each row begins with.
        block: threads of a row, rows of a block.
        overlap: start while the kernel before is running, and let the next one do so; needs a kernel that waits.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        device: Device,
        *,
        strides: tuple[int, int],
        extents: tuple[int, int, int],
        block: tuple[int, int],
        overlap: bool,
    ) -> None:
        self._device = device
        self._function = kernel.function
        self._launch = kernel.library.launch
        self._tail = (*strides, *extents, int(overlap), *block, int(overlap), 0)

    def __call__(self, stream: int, x: int, q: int, scale: int) -> None:
        """Enqueue the kernel on ``stream``, a raw stream of this call's device, with these device addresses.

        Raises:
            LaunchError: the driver refused the launch.
        """
        buffer = _buffer
        QUANT_CALL.pack_into(buffer.bytes, 0, self._function, stream, x, q, scale, *self._tail)
        result = self._launch(buffer.address)
        if result:
            self._retry(buffer, result)

    def _retry(self, buffer: Buffer, result: int) -> None:
        if result == _NO_CONTEXT:
            # torch makes a context current on demand.
            torch.cuda.set_device(self._device.index)
            torch.cuda.current_stream().query()
            result = self._launch(buffer.address)
        if result < 0:
            raise LaunchError(f"launch failed: {MEANINGS.get(result, f'code {result}')}")
        if result:
            from cuda.bindings import driver

            check((driver.CUresult(result),), "launch a quantisation kernel")
