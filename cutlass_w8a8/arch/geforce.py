"""Blackwell without tensor memory: fp8 through warp-specialised mma.sync on TMA's operands, int8 through multistage."""

from __future__ import annotations

from cutlass_w8a8.arch.ampere import INT8_STAND_IN
from cutlass_w8a8.arch.base import KB, Arch, Family, Mainloop
from cutlass_w8a8.dtypes import DType

_E4M3 = Mainloop(DType.E4M3, Family.GEFORCE, "cutlass::arch::Sm120", sass="QMMA", min_toolkit=(12, 8))

SM120 = Arch(
    name="sm120",
    capability=(12, 0),
    devices="RTX 50, RTX PRO Blackwell",
    target="120a",
    smem_bytes=99 * KB,
    mainloops=(_E4M3, INT8_STAND_IN),
    min_toolkit=(12, 8),
)
SM121 = Arch(
    name="sm121",
    capability=(12, 1),
    devices="GB10 (DGX Spark)",
    target="121a",
    smem_bytes=99 * KB,
    mainloops=(_E4M3, INT8_STAND_IN),
    min_toolkit=(12, 9),
)
