"""How a layer is quantised."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.problem import CONSTANT_OVERLAP, OVERLAPS
from cutlass_w8a8.weight_checks import operand_of
from cutlass_w8a8.weights import GRANULARITIES


@dataclass(frozen=True)
class W8A8Config:
    """How a layer's weight and its activations are quantised.

    Attributes:
        dtype: torch.int8 or torch.float8_e4m3fn, of both.
        weight: ``"channel"``, a scale for each output channel, or ``"tensor"``, one.
        dynamic: whether activations are scaled by what they are at each call, or by a calibrated constant.
        granularity: of activations: ``"token"``, a scale for each row, which only dynamic ones can have, or
            ``"tensor"``. None, the default, becomes the one, if ``dynamic``, or the other.
        symmetric: whether activations are without a zero point; int8 ones can have one.
        overlap: how kernels may overlap on Hopper, as `scaled_mm` says.

    Raises:
        ArgumentError: a value is not one of these, or they do not go together.
    """

    dtype: torch.dtype = torch.int8
    weight: str = "channel"
    dynamic: bool = True
    granularity: str | None = None
    symmetric: bool = True
    overlap: str = CONSTANT_OVERLAP

    def __post_init__(self) -> None:
        operand = operand_of("dtype", self.dtype)
        if self.granularity is None:
            object.__setattr__(self, "granularity", "token" if self.dynamic else "tensor")
        for name, accepted in (("weight", GRANULARITIES), ("granularity", ("token", "tensor")), ("overlap", OVERLAPS)):
            if getattr(self, name) not in accepted:
                raise ArgumentError(
                    f"{name} is {getattr(self, name)!r}; accepted: {', '.join(repr(each) for each in accepted)}"
                )
        for name in ("dynamic", "symmetric"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; pass True or False")
        if not self.dynamic and self.granularity == "token":
            raise ArgumentError(
                "granularity is 'token' but dynamic is False: tokens are not known beforehand; pass "
                "granularity='tensor', or dynamic=True"
            )
        if not self.symmetric and operand is not DType.INT8:
            raise ArgumentError("symmetric is False but dtype is float8_e4m3fn; only int8 has zero points")

    @property
    def per_token(self) -> bool:
        """Whether each row of activations has a scale of its own."""
        return self.granularity == "token"

    @property
    def folds(self) -> bool:
        """Whether the zero point is a constant, which is multiplied into ``azp_adj`` at load."""
        return not self.symmetric and not self.dynamic
