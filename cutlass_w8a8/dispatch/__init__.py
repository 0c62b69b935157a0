"""Which configuration serves a problem, and which configurations are possible at all."""

from cutlass_w8a8.dispatch.rules import problems, schedules, smem_bytes, validate
from cutlass_w8a8.dispatch.select import configs_of, rows_of, select

__all__ = ["configs_of", "problems", "rows_of", "schedules", "select", "smem_bytes", "validate"]
