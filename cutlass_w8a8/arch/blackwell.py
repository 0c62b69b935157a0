"""Blackwell: tcgen05 with accumulators in tensor memory, one or two multiprocessors to a tile.

The integer form of tcgen05 exists on 10.0 and 11.0 but not on 10.3. There CUTLASS's main loop compiles all the same, to
a trap; int8 takes the mma.sync main loop instead.
"""

from __future__ import annotations

from cutlass_w8a8.arch.ampere import INT8_STAND_IN
from cutlass_w8a8.arch.base import KB, Arch, Family, Mainloop
from cutlass_w8a8.dtypes import DType

_E4M3 = Mainloop(DType.E4M3, Family.BLACKWELL, "cutlass::arch::Sm100", sass="UTCQMMA", min_toolkit=(12, 8))
_INT8 = Mainloop(DType.INT8, Family.BLACKWELL, "cutlass::arch::Sm100", sass="UTCIMMA", min_toolkit=(12, 8))

SM100 = Arch(
    name="sm100",
    capability=(10, 0),
    devices="B200, GB200",
    target="100a",
    smem_bytes=227 * KB,
    mainloops=(_E4M3, _INT8),
    min_toolkit=(12, 8),
)
SM103 = Arch(
    name="sm103",
    capability=(10, 3),
    devices="B300, GB300",
    target="103a",
    smem_bytes=227 * KB,
    mainloops=(_E4M3, INT8_STAND_IN),
    min_toolkit=(12, 9),
)
SM110 = Arch(
    name="sm110",
    capability=(11, 0),
    devices="Jetson Thor",
    target="110a",
    smem_bytes=227 * KB,
    mainloops=(_E4M3, _INT8),
    min_toolkit=(13, 0),
)
