"""Configurations for 12.0 and 12.1: fp8 through mma.sync on operands that TMA brings.

Rates per clock from data sheets (RTX 5090, whose fp8 is half as fast with float32 sums; GB10). Nothing here has run:
the model stands on the chips' rates alone.
"""

from __future__ import annotations

from cutlass_w8a8.dispatch.table import Roofline, Tables, rows
from cutlass_w8a8.dtypes import DType

_CONFIGS = (
    "16x64x128_pingpong",
    "32x64x128_pingpong",
    "64x64x128_pingpong",
    "128x32x128_cooperative_swap",
    "128x64x128_cooperative_swap",
    "128x128x128_cooperative",
)

TABLES: Tables = {
    "sm120": {DType.E4M3: rows(_CONFIGS, Roofline(sms=170, macs=512, dram_bytes=744))},
    "sm121": {DType.E4M3: rows(_CONFIGS, Roofline(sms=48, macs=1024, dram_bytes=109))},
}
