"""Loading: a kernel library onto a device, once."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cutlass_w8a8.errors import LaunchError
from cutlass_w8a8.runtime.abi import Library
from cutlass_w8a8.runtime.device import Device, capturing

KERNEL_SYMBOL = "w8a8_kernel"

_lock = threading.Lock()
_libraries: dict[Path, tuple[Library, Any]] = {}
_kernels: dict[tuple[Path, int, str], LoadedKernel] = {}


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel ready to launch on one device.

    Attributes:
        library: the host half.
        function: the driver's kernel handle.
        blocks_per_sm: blocks of it that fit one multiprocessor.
    """

    library: Library
    function: int
    blocks_per_sm: int


def check(result: tuple[Any, ...], action: str) -> Any:
    """The value of a cuda-python driver call.

    Raises:
        LaunchError: the driver reported an error; names ``action`` and the error.
    """
    from cuda.bindings import driver

    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(error)
        _, text = driver.cuGetErrorString(error)
        raise LaunchError(f"cannot {action}: {(name or b'?').decode()} ({(text or b'no description').decode()})")
    return values[0] if len(values) == 1 else tuple(values)


class NotLoadedError(LaunchError):
    """A kernel is not loaded, and cannot be now: a CUDA graph is being captured."""


def refuse_capture(name: str, device: Device) -> None:
    """Refuse to go on to compile or load the kernel called ``name`` while ``device``'s stream is being captured.

    Raises:
        NotLoadedError: it is.
    """
    if capturing(device.index):
        raise NotLoadedError(
            f"kernel {name} is not loaded yet, and a CUDA graph is being captured, during which kernels can be neither "
            "compiled nor loaded; before the capture, make the same call once, or name it to cutlass_w8a8.warmup"
        )


def load(path: Path, device: Device, symbol: str = KERNEL_SYMBOL) -> LoadedKernel:
    """The kernel called ``symbol`` in the library at ``path``, on ``device``; loaded once per process and device.

    Raises:
        LaunchError: the driver refuses the image, for example because it is older than the toolkit that made it,
            or (`NotLoadedError`) the stream is being captured, when modules cannot be loaded.
    """
    with _lock:
        found = _kernels.get((path, device.index, symbol))
        if found is None:
            refuse_capture(f"{symbol} of {path}", device)
            with torch.cuda.device(device.index):
                found = _kernels[path, device.index, symbol] = _load(path, device, symbol)
        return found


def _load(path: Path, device: Device, symbol: str) -> LoadedKernel:
    """Load, with ``device`` current."""
    from cuda.bindings import driver

    # Makes the primary context current in this thread, which the driver calls below need.
    torch.cuda.current_stream().synchronize()
    if path not in _libraries:
        try:
            library = Library(str(path))
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot load {path}: {error}; delete its folder to have it rebuilt") from error
        image = check(
            driver.cuLibraryLoadData(bytes(library.image), None, None, 0, None, None, 0),
            f"load the image of {path} (if the driver is older than its toolkit, cutlass-w8a8 doctor says so)",
        )
        _libraries[path] = library, image
    library, image = _libraries[path]
    kernel = check(driver.cuLibraryGetKernel(image, symbol.encode()), f"find the kernel {symbol} in {path}")
    handle = check(driver.cuDeviceGet(device.index), f"open device {device.index}")
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    smem = library.info.smem_bytes
    check(
        driver.cuKernelSetAttribute(attribute, smem, kernel, handle),
        f"reserve {smem} bytes of shared memory for {path} on {device.name}",
    )
    function = check(driver.cuKernelGetFunction(kernel), f"bind {path} to the current context")
    blocks = check(
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, library.info.threads, smem),
        f"query the occupancy of {path}",
    )
    return LoadedKernel(library, int(kernel), int(blocks))
