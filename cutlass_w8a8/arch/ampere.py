"""Ampere and Ada: mma.sync m16n8k32, multistage main loops over cp.async; fp8 from Ada on."""

from __future__ import annotations

from dataclasses import replace

from cutlass_w8a8.arch.base import KB, Arch, Family, Mainloop
from cutlass_w8a8.dtypes import DType

INT8_MMA_SYNC = Mainloop(
    DType.INT8, Family.MULTISTAGE, "cutlass::arch::Sm80", sass="IMMA.16832", instruction=(16, 8, 32)
)
# On chips that have a main loop of their own, but not for integers.
INT8_STAND_IN = replace(
    INT8_MMA_SYNC, note="int8 runs main loops of an older kind here (mma.sync); fp8 has the chip's own: prefer it"
)
E4M3_MMA_SYNC = Mainloop(
    DType.E4M3,
    Family.MULTISTAGE,
    "cutlass::arch::Sm89",
    sass="QMMA.16832",
    instruction=(16, 8, 32),
    min_toolkit=(12, 4),
)

SM80 = Arch(
    name="sm80",
    capability=(8, 0),
    devices="A100, A30",
    target="80",
    smem_bytes=163 * KB,
    mainloops=(INT8_MMA_SYNC,),
)
SM86 = Arch(
    name="sm86",
    capability=(8, 6),
    devices="A10, A40, RTX 30",
    target="86",
    smem_bytes=99 * KB,
    mainloops=(INT8_MMA_SYNC,),
)
SM87 = Arch(
    name="sm87",
    capability=(8, 7),
    devices="Jetson Orin",
    target="87",
    smem_bytes=163 * KB,
    mainloops=(INT8_MMA_SYNC,),
)
SM89 = Arch(
    name="sm89",
    capability=(8, 9),
    devices="L4, L40S, RTX 40",
    target="89",
    smem_bytes=99 * KB,
    mainloops=(E4M3_MMA_SYNC, INT8_MMA_SYNC),
)
