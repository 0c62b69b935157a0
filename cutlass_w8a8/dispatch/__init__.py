"""Which configuration serves a problem, and which configurations are possible at all."""

from cutlass_w8a8.dispatch.quantize import QuantLaunch, WholeLaunch, quant_launch, quant_symbols, whole_launch
from cutlass_w8a8.dispatch.rules import problems, schedules, smem_bytes, validate
from cutlass_w8a8.dispatch.select import configs_of, ranked, refusal, rows_of, select
from cutlass_w8a8.dispatch.table import in_grid

__all__ = [
    "QuantLaunch",
    "WholeLaunch",
    "configs_of",
    "in_grid",
    "problems",
    "quant_launch",
    "quant_symbols",
    "ranked",
    "refusal",
    "rows_of",
    "schedules",
    "select",
    "smem_bytes",
    "validate",
    "whole_launch",
]
