"""The values the quantisation template fills in."""

from __future__ import annotations

from typing import Any

from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.spec import QUANT_HELD, QUANT_MAX_THREADS, QuantSpec

_LARGEST = {DType.E4M3: "448.f", DType.INT8: "127.f"}
# 1 / (448 * 512), rounded to float32, and the least normal float32, whose reciprocal is finite.
_FLOOR = {DType.E4M3: "0x1.24924ap-18f", DType.INT8: "0x1p-126f"}


def context(spec: QuantSpec) -> dict[str, Any]:
    """All names the template uses, from ``spec`` alone."""
    wide = spec.source is DType.FP32
    return {
        "spec": spec,
        "formula": spec.formula,
        "command": spec.command("show"),
        "source": spec.source.value,
        "target": spec.target.value,
        "bits": "uint32_t" if wide else "uint16_t",
        "abs_mask": "0x7fffffffu" if wide else "0x7fffu",
        "largest": _LARGEST[spec.target],
        "floor": _FLOOR[spec.target],
        "held": QUANT_HELD,
        "max_threads": QUANT_MAX_THREADS,
    }
