"""Turing: int8 through mma.sync m8n8k16, two-stage main loops without asynchronous copies."""

from __future__ import annotations

from cutlass_w8a8.arch.base import KB, Arch, Family, Mainloop
from cutlass_w8a8.dtypes import DType

SM75 = Arch(
    name="sm75",
    capability=(7, 5),
    devices="T4, RTX 20",
    target="75",
    smem_bytes=64 * KB,
    mainloops=(
        Mainloop(DType.INT8, Family.MULTISTAGE, "cutlass::arch::Sm75", sass="IMMA.8816", instruction=(8, 8, 16)),
    ),
)
