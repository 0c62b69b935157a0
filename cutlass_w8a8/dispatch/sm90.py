"""Configurations for compute capability 9.0: TMA warp-specialised main loops, fp8 and int8."""

from __future__ import annotations

from cutlass_w8a8.dispatch.table import Row, row
from cutlass_w8a8.dtypes import DType

# Up to M = 64 the problem is transposed, so that the 64-wide MMA extent runs along the weights' N and the narrow
# one covers M. Small N needs small tiles to occupy the device at all; large problems want tiles of 128x256.
_TABLE = (
    row("64x16x256_ws_swap", max_m=16),
    row("64x16x256_pingpong_swap", max_m=64, max_n=2048),
    row("64x32x256_pingpong_swap", max_m=32),
    row("64x64x256_pingpong_swap", max_m=64),
    row("64x32x256_pingpong_swap", max_m=128, max_n=2048),
    row("64x128x128_2x1_pingpong", max_m=128),
    row("64x64x256_pingpong_swap", max_m=256, max_n=2048),
    row("64x128x128_2x1_pingpong", max_m=256, max_n=6144),
    row("64x128x128_pingpong_swap", max_m=512, max_n=2048),
    row("128x128x128_2x1_pingpong"),
)

TABLES: dict[DType, tuple[Row, ...]] = {DType.E4M3: _TABLE, DType.INT8: _TABLE}
