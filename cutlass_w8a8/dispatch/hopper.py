"""Configurations for compute capability 9.0: TMA warp-specialised main loops, fp8 and int8."""

from __future__ import annotations

from cutlass_w8a8.dispatch.table import Cost, Tables, row
from cutlass_w8a8.dtypes import DType

# Costs are fitted to times on an H200 (benchmarks/README.md says how): 20 weight shapes, M from 1 to 1024, each
# configuration within the M it is meant for here; the last four rows' to 8 weight shapes, M up to 8192.
# Rows that a tile lacks cost next to nothing. So at any small M tiles of 64 rows compete, with the width that gives
# nearly every multiprocessor one tile of the weights; and the transposed problem, whose 64-wide MMA extent runs along
# N, where narrow tiles along M save multiplications. While there is one tile a block (ws), pingpong's second warp group
# finds no work. From M = 8192 on, a swizzled tile order keeps more of both operands in L2; with few tiles along N its
# rounding leaves blocks idle.
# Left out, since on 2026-11-29 never more than 2 % ahead at any measured point: cooperative 256x128 beside 128x256,
# pingpong 64x16 beside ws, cluster 1x2 beside 2x1 for pingpong, stream-K.
_FP8 = (
    row("64x16x256_ws_swap", Cost(0.64, 1.30, 0.19, 2.89, 4.18), max_m=16),
    row("64x32x256_ws_swap", Cost(0.75, 0.90, 0.22, 2.81, 4.11), min_m=17, max_m=32),
    row("64x32x256_pingpong_swap", Cost(0.69, 1.14, 0.28, 3.63, 4.11), min_m=17, max_m=128),
    row("64x64x256_ws_swap", Cost(0.85, 1.40, 1.77, 2.38, 3.74), min_m=33, max_m=64),
    row("64x64x256_pingpong_swap", Cost(0.97, 1.28, 0.13, 3.64, 3.98), min_m=33, max_m=256),
    row("64x32x256_ws", Cost(0.62, 1.40, 2.30, 1.18, 3.77), max_m=256),
    row("64x48x256_ws", Cost(0.72, 1.40, 2.65, 1.45, 3.54), max_m=256),
    row("64x64x256_ws", Cost(0.85, 1.40, 2.78, 1.49, 3.59), max_m=512),
    row("64x80x256_ws", Cost(1.00, 1.40, 3.10, 1.19, 3.81), max_m=512),
    row("64x96x256_ws", Cost(1.19, 1.40, 1.60, 2.56, 3.81), max_m=512),
    row("64x112x128_ws", Cost(1.16, 1.40, 3.65, 0.93, 3.70), max_m=512),
    row("64x128x128_ws", Cost(1.33, 1.31, 3.39, 0.89, 3.85), max_m=512),
    row("64x160x128_ws", Cost(1.69, 1.06, 4.33, 0.00, 3.71), max_m=512),
    row("64x192x128_ws", Cost(1.98, 1.08, 3.99, 0.38, 3.48), max_m=512),
    row("64x224x128_ws", Cost(2.34, 1.19, 2.98, 1.41, 3.69), max_m=512),
    row("128x128x128_ws", Cost(2.64, 0.99, 4.02, 0.00, 3.42), min_m=65, max_m=512),
    row("128x160x128_2x1_ws", Cost(3.23, 0.99, 4.73, 0.00, 2.78), min_m=65, max_m=512),
    row("64x224x128_2x1_pingpong", Cost(2.29, 1.18, 0.79, 4.20, 4.02), min_m=65, max_m=512),
    row("64x128x128_pingpong_swap", Cost(1.36, 1.26, 0.46, 3.52, 3.76), min_m=65, max_m=512),
    row("64x128x128_2x1_pingpong", Cost(1.44, 1.25, 0.39, 3.78, 4.03), min_m=65, max_m=512),
    row("64x192x128_2x1_pingpong", Cost(2.10, 1.12, 0.91, 3.75, 3.77), min_m=65, max_m=512),
    row("128x128x128_2x1_pingpong_swizzle8", Cost(2.67, 1.09, 0.37, 3.39, 2.92), min_m=8192, min_n=4096),
    row("128x128x128_2x1_pingpong", Cost(2.67, 1.09, 0.37, 3.39, 2.92), min_m=129),
    row("128x192x128_2x1_cooperative", Cost(3.66, 1.24, 1.24, 3.85, 2.78), min_m=129),
    row("128x256x128_2x1_cooperative", Cost(5.62, 1.07, 1.73, 1.63, 1.87), min_m=257),
)
_INT8 = (
    row("64x16x256_ws_swap", Cost(0.60, 1.35, 0.00, 2.94, 4.17), max_m=16),
    row("64x32x256_ws_swap", Cost(0.51, 1.12, 1.07, 2.76, 4.07), min_m=17, max_m=32),
    row("64x32x256_pingpong_swap", Cost(0.67, 1.06, 0.27, 3.56, 4.02), min_m=17, max_m=128),
    row("64x64x256_ws_swap", Cost(0.82, 1.40, 1.76, 2.45, 3.79), min_m=33, max_m=64),
    row("64x64x256_pingpong_swap", Cost(0.97, 1.28, 0.08, 3.70, 4.01), min_m=33, max_m=256),
    row("64x32x256_ws", Cost(0.61, 1.40, 2.23, 1.37, 3.85), max_m=256),
    row("64x48x256_ws", Cost(0.72, 1.40, 2.63, 1.44, 3.52), max_m=256),
    row("64x64x256_ws", Cost(0.85, 1.40, 2.52, 1.68, 3.61), max_m=512),
    row("64x80x256_ws", Cost(0.99, 1.40, 3.04, 1.26, 3.75), max_m=512),
    row("64x96x256_ws", Cost(1.17, 1.40, 1.68, 2.50, 3.81), max_m=512),
    row("64x112x128_ws", Cost(1.13, 1.40, 3.81, 0.74, 3.67), max_m=512),
    row("64x128x128_ws", Cost(1.28, 1.40, 3.26, 1.08, 3.84), max_m=512),
    row("64x160x128_ws", Cost(1.60, 1.11, 4.19, 0.26, 3.60), max_m=512),
    row("64x192x128_ws", Cost(1.89, 1.11, 4.00, 0.47, 3.46), max_m=512),
    row("64x224x128_ws", Cost(2.12, 1.22, 3.84, 0.78, 3.52), max_m=512),
    row("128x128x128_ws", Cost(2.45, 1.03, 3.58, 0.94, 3.54), min_m=65, max_m=512),
    row("64x224x128_2x1_pingpong", Cost(2.23, 1.21, 0.40, 4.77, 4.24), min_m=65, max_m=512),
    row("64x128x128_pingpong_swap", Cost(1.31, 1.34, 0.30, 3.76, 3.92), min_m=65, max_m=512),
    row("64x128x128_2x1_pingpong", Cost(1.41, 1.28, 0.32, 3.98, 4.19), min_m=65, max_m=512),
    row("64x192x128_2x1_pingpong", Cost(1.83, 0.93, 1.58, 4.24, 4.32), min_m=65, max_m=512),
    row("128x128x128_2x1_pingpong_swizzle8", Cost(2.44, 1.09, 0.44, 4.20, 3.19), min_m=8192, min_n=4096),
    row("128x128x128_2x1_pingpong", Cost(2.44, 1.09, 0.44, 4.20, 3.19), min_m=129),
    row("128x192x128_2x1_cooperative", Cost(3.38, 1.18, 1.80, 4.04, 2.95), min_m=129),
    row("128x256x128_2x1_cooperative", Cost(4.76, 1.11, 1.89, 3.87, 2.39), min_m=257),
)

TABLES: Tables = {"sm90": {DType.E4M3: _FP8, DType.INT8: _INT8}}
