"""Configurations for compute capability 8.0 (164 KB of shared memory): int8 through m16n8k32 multistage main loops."""

from __future__ import annotations

from cutlass_w8a8.dispatch.table import Row, row
from cutlass_w8a8.dtypes import DType

# Small M is bound by the weights' bandwidth: narrow block tiles and deep pipelines keep more of them in flight.
# Wide N at M near 128 has tiles enough to fill the device with full-size tiles.
TABLES: dict[DType, tuple[Row, ...]] = {
    DType.INT8: (
        row("16x64x128_w16x64x64_multistage_s5", max_m=16),
        row("32x64x128_w32x64x64_multistage_s5", max_m=32),
        row("64x128x128_w64x64x64_multistage_s5", max_m=64),
        row("64x128x128_w64x64x64_multistage_s5", max_m=128, max_n=8191),
        row("128x128x64_w64x64x64_multistage_s5"),
    ),
}
