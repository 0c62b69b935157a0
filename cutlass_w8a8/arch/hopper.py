"""Hopper: wgmma on operands that TMA brings, warp-specialised."""

from __future__ import annotations

from cutlass_w8a8.arch.base import KB, Arch, Family, Mainloop
from cutlass_w8a8.dtypes import DType

SM90 = Arch(
    name="sm90",
    capability=(9, 0),
    devices="H100, H200, GH200",
    target="90a",
    smem_bytes=227 * KB,
    mainloops=(
        Mainloop(DType.E4M3, Family.HOPPER, "cutlass::arch::Sm90", sass="QGMMA"),
        Mainloop(DType.INT8, Family.HOPPER, "cutlass::arch::Sm90", sass="IGMMA"),
    ),
)
