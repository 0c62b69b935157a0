"""Which configuration serves a problem, and which configurations are possible at all."""

from cutlass_w8a8.dispatch.rules import problems, smem_bytes, validate
from cutlass_w8a8.dispatch.select import select

__all__ = ["problems", "select", "smem_bytes", "validate"]
