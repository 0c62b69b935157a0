"""Element types: the one map between our names, sizes and CUTLASS's C++ types."""

from __future__ import annotations

from enum import Enum


class DType(str, Enum):
    """An element type, named as on the command line."""

    E4M3 = "e4m3"
    INT8 = "int8"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    INT32 = "int32"

    @property
    def bytes(self) -> int:
        """Size of one element in bytes."""
        return _BYTES[self]

    @property
    def cpp(self) -> str:
        """The C++ type CUTLASS uses for this element."""
        return _CPP[self]

    @property
    def accumulator(self) -> DType:
        """The type in which products of this operand type are accumulated."""
        return _ACCUMULATOR[self]


_BYTES = {DType.E4M3: 1, DType.INT8: 1, DType.BF16: 2, DType.FP16: 2, DType.FP32: 4, DType.INT32: 4}
_CPP = {
    DType.E4M3: "cutlass::float_e4m3_t",
    DType.INT8: "int8_t",
    DType.BF16: "cutlass::bfloat16_t",
    DType.FP16: "cutlass::half_t",
    DType.FP32: "float",
    DType.INT32: "int32_t",
}
_ACCUMULATOR = {DType.E4M3: DType.FP32, DType.INT8: DType.INT32}

OPERAND_DTYPES = tuple(_ACCUMULATOR)
OUTPUT_DTYPES = (DType.BF16, DType.FP16, DType.FP32)
