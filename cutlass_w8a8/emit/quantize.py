"""The values the quantisation template fills in."""

from __future__ import annotations

from typing import Any

from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.spec import (
    QUANT_FLOOR,
    QUANT_HELD,
    QUANT_LARGEST,
    QUANT_MAX_THREADS,
    QUANT_RANGE,
    QUANT_SCAN_VECTORS,
    QuantSpec,
)

# A longer formula takes a line for each of its parts.
_LINE = 110


def context(spec: QuantSpec) -> dict[str, Any]:
    """All names the template uses, from ``spec`` alone."""
    wide = spec.source is DType.FP32
    extremes = spec.scheme.azp and not spec.scheme.static
    return {
        "spec": spec,
        "formula": [spec.formula] if len(spec.formula) <= _LINE else spec.formula.split("; "),
        "command": spec.command("show"),
        "source": spec.source.value,
        "target": spec.target.value,
        "azp": spec.scheme.azp,
        "whole": spec.scheme.whole,
        "scans": spec.scheme.scans,
        "bits": "uint32_t" if wide else "uint16_t",
        "abs_mask": "0x7fffffffu" if wide else "0x7fffu",
        "sign": "0x80000000u" if wide else "0x8000u",
        # What is known of elements that were looked at, and what is of none.
        "seen": "Extremes" if extremes else "unsigned",
        "nothing": "nothing()" if extremes else "",
        # With zero points it is compared with half the range.
        "largest": _literal(QUANT_RANGE / 2 if extremes else QUANT_LARGEST[spec.target]),
        "floor": _literal(QUANT_FLOOR[spec.target]),
        "held": QUANT_HELD,
        "scan_vectors": QUANT_SCAN_VECTORS,
        "max_threads": QUANT_MAX_THREADS,
    }


def _literal(value: float) -> str:
    """A float32 as a C++ literal, exactly."""
    return f"{value.hex()}f"
