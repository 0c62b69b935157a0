"""Configurations for compute capability 9.0: TMA warp-specialised main loops, fp8 and int8."""

from __future__ import annotations

from cutlass_w8a8.dispatch.table import Cost, Tables, row
from cutlass_w8a8.dtypes import DType

# Costs are fitted to times on an H200 (benchmarks/README.md says how): 8 weight shapes, M from 1 to 8192, each
# configuration within the M it is meant for here.
# Up to M = 64 the transposed problem lets the 64-wide MMA extent run along the weights' N. There one tile a block
# (ws) beats pingpong, whose second warp group finds no work, until blocks get several tiles. A cluster along M
# shares the weights when N is too small to occupy the device. From M = 8192 on, a swizzled tile order keeps more of
# both operands in L2; with few tiles along N its rounding leaves blocks idle.
# Left out as never more than 2 % ahead at any measured point: cooperative 256x128 beside 128x256,
# pingpong 64x16 beside ws, cluster 1x2 beside 2x1 for pingpong, stream-K.
_FP8 = (
    row("64x16x256_ws_swap", Cost(0.66, 0.56, 0.67, 2.89, 3.87), max_m=16),
    row("64x16x256_1x4_ws_swap", Cost(0.53, 1.40, 2.87, 0.65, 4.00), min_m=17, max_m=64),
    row("64x32x256_ws_swap", Cost(0.58, 0.40, 1.18, 2.79, 3.84), min_m=17, max_m=32),
    row("64x32x256_pingpong_swap", Cost(0.60, 1.19, 0.25, 3.89, 4.05), min_m=17, max_m=128),
    row("64x32x256_1x2_ws_swap", Cost(0.69, 1.40, 2.05, 2.39, 3.90), min_m=33, max_m=64),
    row("64x64x256_ws_swap", Cost(0.80, 1.02, 1.84, 2.60, 3.59), min_m=33, max_m=64),
    row("64x64x256_pingpong_swap", Cost(0.94, 1.25, 0.14, 3.42, 3.61), min_m=33, max_m=256),
    row("64x128x128_pingpong_swap", Cost(1.37, 1.21, 0.28, 3.69, 3.75), min_m=65, max_m=512),
    row("64x128x128_2x1_pingpong", Cost(1.51, 1.17, 0.28, 3.86, 3.97), min_m=65, max_m=512),
    row("64x192x128_2x1_pingpong", Cost(2.04, 1.16, 0.32, 4.46, 3.63), min_m=65, max_m=512),
    row("128x128x128_2x1_pingpong_swizzle8", Cost(2.67, 1.09, 0.37, 3.39, 2.92), min_m=8192, min_n=4096),
    row("128x128x128_2x1_pingpong", Cost(2.67, 1.09, 0.37, 3.39, 2.92), min_m=129),
    row("128x192x128_2x1_cooperative", Cost(3.66, 1.24, 1.24, 3.85, 2.78), min_m=129),
    row("128x256x128_2x1_cooperative", Cost(5.62, 1.07, 1.73, 1.63, 1.87), min_m=257),
)
_INT8 = (
    row("64x16x256_ws_swap", Cost(0.53, 1.02, 1.24, 2.90, 3.91), max_m=16),
    row("64x16x256_1x4_ws_swap", Cost(0.52, 1.40, 2.77, 0.80, 4.00), min_m=17, max_m=64),
    row("64x32x256_ws_swap", Cost(0.52, 1.24, 1.60, 2.84, 3.94), min_m=17, max_m=32),
    row("64x32x256_pingpong_swap", Cost(0.60, 1.17, 0.26, 3.90, 4.11), min_m=17, max_m=128),
    row("64x32x256_1x2_ws_swap", Cost(0.68, 1.40, 2.12, 2.19, 3.88), min_m=33, max_m=64),
    row("64x64x256_ws_swap", Cost(0.74, 0.88, 2.25, 2.33, 3.58), min_m=33, max_m=64),
    row("64x64x256_pingpong_swap", Cost(0.94, 1.21, 0.21, 3.51, 3.66), min_m=33, max_m=256),
    row("64x128x128_pingpong_swap", Cost(1.34, 1.16, 0.37, 3.92, 3.79), min_m=65, max_m=512),
    row("64x128x128_2x1_pingpong", Cost(1.48, 1.14, 0.36, 4.06, 4.01), min_m=65, max_m=512),
    row("64x192x128_2x1_pingpong", Cost(1.97, 1.11, 0.58, 4.52, 3.67), min_m=65, max_m=512),
    row("128x128x128_2x1_pingpong_swizzle8", Cost(2.44, 1.09, 0.44, 4.20, 3.19), min_m=8192, min_n=4096),
    row("128x128x128_2x1_pingpong", Cost(2.44, 1.09, 0.44, 4.20, 3.19), min_m=129),
    row("128x192x128_2x1_cooperative", Cost(3.38, 1.18, 1.80, 4.04, 2.95), min_m=129),
    row("128x256x128_2x1_cooperative", Cost(4.76, 1.11, 1.89, 3.87, 2.39), min_m=257),
)

TABLES: Tables = {"sm90": {DType.E4M3: _FP8, DType.INT8: _INT8}}
