"""Configurations for 10.0, 10.3 and 11.0: tcgen05, transposed for small M.

Rates per clock from data sheets (B200, B300, Jetson Thor). Nothing here has run: the model stands on the chips' rates
alone.
"""

from __future__ import annotations

from cutlass_w8a8.dispatch.table import Roofline, Tables, rows
from cutlass_w8a8.dtypes import DType

_CONFIGS = (
    "128x32x128_4x1_2sm_swap",
    "128x64x256_4x1_2sm_swap",
    "128x128x128_2x1_2sm",
    "256x128x128_2x1_2sm",
    "256x128x128_2x2_2sm",
    "256x256x128_2x1_2sm",
)
_B200 = Roofline(sms=148, macs=8192, dram_bytes=4324)
_THOR = Roofline(sms=20, macs=8192, dram_bytes=174)

TABLES: Tables = {
    "sm100": {DType.E4M3: rows(_CONFIGS, _B200), DType.INT8: rows(_CONFIGS, _B200)},
    "sm103": {DType.E4M3: rows(_CONFIGS, _B200)},
    "sm110": {DType.E4M3: rows(_CONFIGS, _THOR), DType.INT8: rows(_CONFIGS, _THOR)},
}
