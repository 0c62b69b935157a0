"""Which configuration serves a problem, and which configurations are possible at all."""

from cutlass_w8a8.dispatch.quantize import QUANT_SYMBOLS, QuantLaunch, quant_launch
from cutlass_w8a8.dispatch.rules import problems, schedules, smem_bytes, validate
from cutlass_w8a8.dispatch.select import configs_of, ranked, refusal, rows_of, select
from cutlass_w8a8.dispatch.table import in_grid

__all__ = [
    "QUANT_SYMBOLS",
    "QuantLaunch",
    "configs_of",
    "in_grid",
    "problems",
    "quant_launch",
    "ranked",
    "refusal",
    "rows_of",
    "schedules",
    "select",
    "smem_bytes",
    "validate",
]
