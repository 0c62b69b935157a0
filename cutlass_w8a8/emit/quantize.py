"""The values the quantisation template fills in."""

from __future__ import annotations

from typing import Any

from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.spec import QUANT_FLOOR, QUANT_HELD, QUANT_LARGEST, QUANT_MAX_THREADS, QuantSpec


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
        "largest": _literal(QUANT_LARGEST[spec.target]),
        "floor": _literal(QUANT_FLOOR[spec.target]),
        "held": QUANT_HELD,
        "max_threads": QUANT_MAX_THREADS,
    }


def _literal(value: float) -> str:
    """A float32 as a C++ literal, exactly."""
    return f"{value.hex()}f"
