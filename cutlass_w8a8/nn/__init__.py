"""Linear layers with 8-bit weights and activations, for whole models.

from cutlass_w8a8.nn import W8A8Config, quantize_

quantize_(model, W8A8Config(torch.int8))
"""

from cutlass_w8a8.nn.calibrate import Calibration, calibrate
from cutlass_w8a8.nn.config import W8A8Config
from cutlass_w8a8.nn.convert import quantize_
from cutlass_w8a8.nn.linear import W8A8Linear
from cutlass_w8a8.nn.parallel import ColumnParallelW8A8, RowParallelW8A8, shard

__all__ = [
    "Calibration",
    "ColumnParallelW8A8",
    "RowParallelW8A8",
    "W8A8Config",
    "W8A8Linear",
    "calibrate",
    "quantize_",
    "shard",
]
