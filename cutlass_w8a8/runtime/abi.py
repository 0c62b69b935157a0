"""The binary interface of a compiled kernel: ``Pointers``, ``Call`` and ``Info`` of templates/host_prelude.h.

``quant_call`` mirrors ``QuantCall`` of templates/quantize.cu.j2.
"""

from __future__ import annotations

import ctypes
import struct

ABI_VERSION = 2
MAX_OPERANDS = 8

# stream, a, b, d, workspace, operands.
POINTERS = struct.Struct(f"={5 + MAX_OPERANDS}Q")
# The pointers; function; lda, ldb, ldd; m, n, k, sm_count, blocks_per_sm, splits, swizzle, raster, overlap, wide; bytes
# of a, b, d and the operands.
CALL = struct.Struct(f"={5 + MAX_OPERANDS}Q1Q3q10i{3 + MAX_OPERANDS}q")


def quant_call(pointers: int, whole: bool) -> struct.Struct:
    """The structure of a quantisation kernel with so many ``pointers``, that takes a tensor as a ``whole`` or by rows.

    function, stream; x, q, scale[, azp][, partial]; ldx, ldq; m, k, vectors, early[, last, partials]; threads, rows,
    programmatic, blocks.
    """
    return struct.Struct(f"={2 + pointers}Q2q{10 if whole else 8}i")


CANNOT_IMPLEMENT = -1
MISALIGNED = -4
OVERLAPPING = -5
MEANINGS = {
    CANNOT_IMPLEMENT: "CUTLASS cannot implement this problem",
    -2: "libcuda.so.1 cannot be loaded",
    -3: "the kernel's workspace could not be initialised",
}


class Info(ctypes.Structure):
    """Static facts a kernel library exports as ``w8a8_info``."""

    _fields_ = (
        ("abi_version", ctypes.c_int32),
        ("smem_bytes", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("params_bytes", ctypes.c_int32),
        ("operands", ctypes.c_int32),
    )
    abi_version: int
    smem_bytes: int
    threads: int
    params_bytes: int
    operands: int


class Library:
    """A kernel's shared library, loaded into this process; needs neither a GPU nor a driver.

    Raises:
        OSError: the file cannot be loaded.
        ValueError: the file is of another ABI version.
    """

    def __init__(self, path: str) -> None:
        handle = ctypes.CDLL(path)
        self.info = Info.in_dll(handle, "w8a8_info")
        if self.info.abi_version != ABI_VERSION:
            raise ValueError(f"{path} has ABI version {self.info.abi_version}, this package speaks {ABI_VERSION}")
        begin = ctypes.addressof(ctypes.c_char.in_dll(handle, "w8a8_image"))
        end = ctypes.addressof(ctypes.c_char.in_dll(handle, "w8a8_image_end"))
        self.image = (ctypes.c_char * (end - begin)).from_address(begin)
        self.launch = handle.w8a8_launch
        # Addresses: of a `CALL` and `POINTERS`, or of a `quant_call` alone.
        self.launch.argtypes = (ctypes.c_void_p,) * (2 if self.info.operands else 1)
        self.launch.restype = ctypes.c_int
        self.workspace = handle.w8a8_workspace
        self.workspace.argtypes = (ctypes.c_void_p,)
        self.workspace.restype = ctypes.c_int64
        self._handle = handle
