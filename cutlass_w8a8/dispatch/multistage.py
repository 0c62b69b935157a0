"""Configurations of the multistage families, for the chips that have nothing newer or nothing newer for the type.

Small M is bound by the weights' bandwidth: narrow block tiles and deep pipelines keep more of them in flight, and two
warps that share a tile along k where it has too few rows for more. Rates per clock are those of the chips' data sheets,
for one product of each row (T4, A100 80 GB, A10, AGX Orin, L40S; B300; for 12.0 and 12.1 mma.sync at the rate of 8.9).
On an H200, where these kernels run too, sm80's choice loses 0.9 % to the best measured (benchmarks/README.md).
"""

from __future__ import annotations

from cutlass_w8a8.dispatch.table import Roofline, Tables, rows
from cutlass_w8a8.dtypes import DType

_TURING = (
    "32x128x64_w32x64x64_multistage_s2",
    "64x128x128_w64x64x64_multistage_s2",
    "128x128x64_w64x64x64_multistage_s2",
)
_LARGE_SMEM = (
    "16x64x128_w16x64x64_multistage_s5",
    "32x64x128_w32x64x64_multistage_s5",
    "64x64x128_w32x64x64_multistage_s5",
    "64x128x128_w64x64x64_multistage_s5",
    "128x128x64_w64x64x64_multistage_s5",
    "256x128x64_w64x64x64_multistage_s4",
)
# 99 KB: the same tiles with as many stages as fit.
_SMALL_SMEM = (
    "16x64x128_w16x64x64_multistage_s5",
    "32x64x128_w16x64x64_multistage_s5",
    "64x64x128_w32x64x64_multistage_s5",
    "64x128x128_w64x64x64_multistage_s3",
    "128x128x64_w64x64x64_multistage_s5",
    "256x128x64_w64x64x64_multistage_s3",
)

# fp8: warps divide the tile along n rather than along k, and every tile has the same k, with what K leaves over a
# multiple of it first: sums are added in one order, and bits do not depend on M.
_FP8 = (
    "16x64x128_w16x32x128_multistage_s5",
    "32x64x128_w16x32x128_multistage_s5",
    "64x64x128_w32x32x128_multistage_s5",
    "64x128x128_w32x64x128_multistage_s3",
    "128x128x128_w64x64x128_multistage_s3",
)

_A100 = Roofline(sms=108, macs=2048, dram_bytes=1446)
_ADA = Roofline(sms=142, macs=1024, dram_bytes=343)

TABLES: Tables = {
    "sm75": {DType.INT8: rows(_TURING, Roofline(sms=40, macs=1024, dram_bytes=201))},
    "sm80": {DType.INT8: rows(_LARGE_SMEM, _A100)},
    "sm86": {DType.INT8: rows(_SMALL_SMEM, Roofline(sms=72, macs=1024, dram_bytes=354))},
    "sm87": {DType.INT8: rows(_LARGE_SMEM, Roofline(sms=16, macs=2048, dram_bytes=158))},
    "sm89": {DType.E4M3: rows(_FP8, _ADA), DType.INT8: rows(_SMALL_SMEM, _ADA)},
    "sm103": {DType.INT8: rows(_LARGE_SMEM, Roofline(sms=148, macs=512, dram_bytes=4324))},
    "sm120": {DType.INT8: rows(_SMALL_SMEM, Roofline(sms=170, macs=1024, dram_bytes=744))},
    "sm121": {DType.INT8: rows(_SMALL_SMEM, Roofline(sms=48, macs=1024, dram_bytes=109))},
}
