"""Launching a quantisation kernel: what does not change between calls of one signature is packed once."""

from __future__ import annotations

import torch

from cutlass_w8a8.errors import LaunchError
from cutlass_w8a8.runtime.abi import MEANINGS, quant_call
from cutlass_w8a8.runtime.device import Device
from cutlass_w8a8.runtime.launch import Buffer
from cutlass_w8a8.runtime.loader import LoadedKernel, check

# CUDA_ERROR_INVALID_CONTEXT: this thread has no current context yet.
_NO_CONTEXT = 201
# x, q, scale, azp, partial.
_MOST_POINTERS = 5


_buffer = Buffer(quant_call(_MOST_POINTERS, True).size)


class PreparedQuantize:
    """Launches one quantisation kernel for one set of extents on one device; pointers and stream come with each call.

    Args:
        kernel: the entry point that serves the extents.
        device: where.
        strides: leading strides of x and q, in elements.
        extents: m, k, and the 16-byte vectors that each row begins with.
        block: threads of a row, rows of a block.
        overlap: start while the kernel before is running, and let the next one do so; needs a kernel that waits.
        pointers: how many the kernel has.
        whole: of a kernel that takes a tensor as a whole, elements of the last row, and values to be put together.
        blocks: of the grid; 0 for as many as there are rows for.
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
        pointers: int = 3,
        whole: tuple[int, int] | None = None,
        blocks: int = 0,
    ) -> None:
        self._device = device
        self._function = kernel.function
        self._launch = kernel.library.launch
        self._pack_into = quant_call(pointers, whole is not None).pack_into
        self._tail = (*strides, *extents, int(overlap), *(whole or ()), *block, int(overlap), blocks)

    def __call__(self, stream: int, *pointers: int) -> None:
        """Enqueue the kernel on ``stream``, a raw stream of this call's device, with these device addresses.

        Raises:
            LaunchError: the driver refused the launch.
        """
        buffer = _buffer
        self._pack_into(buffer.bytes, 0, self._function, stream, *pointers, *self._tail)
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
