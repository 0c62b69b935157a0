"""The named epilogues. Each is one formula; everything else is derived from the tree it builds.

To add an epilogue, write one more function below and decorate it with its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import UnsupportedError
from cutlass_w8a8.evt.tree import Accum, Broadcast, Expr, Load, Tree, fma


class ScaleA(str, Enum):
    """Granularity of ``scale_a``: one value, or one per row of A."""

    TENSOR = "tensor"
    TOKEN = "token"


class ScaleB(str, Enum):
    """Granularity of ``scale_b``: one value, or one per column of B."""

    TENSOR = "tensor"
    CHANNEL = "channel"


class Azp(str, Enum):
    """Zero point of A: none, one value (folded into ``azp_adj``), or one per row of A."""

    NONE = "none"
    TENSOR = "tensor"
    TOKEN = "token"


@dataclass(frozen=True)
class Operands:
    """The leaves a formula may use."""

    acc: Accum
    scale_a: Load
    scale_b: Load
    azp: Load
    azp_adj: Load
    bias: Load


Formula = Callable[[Operands], Expr]
FORMULAS: dict[str, Formula] = {}


def formula(name: str) -> Callable[[Formula], Formula]:
    """Register a formula under ``name`` (letters, digits and ``-``)."""

    def register(function: Formula) -> Formula:
        FORMULAS[name] = function
        return function

    return register


@formula("scaled")
def _scaled(x: Operands) -> Expr:
    return x.scale_a * (x.scale_b * x.acc)


@formula("scaled-bias")
def _scaled_bias(x: Operands) -> Expr:
    return fma(x.scale_a, x.scale_b * x.acc, x.bias)


@formula("azp")
def _azp(x: Operands) -> Expr:
    return x.scale_a * (x.scale_b * (x.acc - x.azp_adj))


@formula("azp-bias")
def _azp_bias(x: Operands) -> Expr:
    return fma(x.scale_a, x.scale_b * (x.acc - x.azp_adj), x.bias)


@formula("azp-token")
def _azp_token(x: Operands) -> Expr:
    return x.scale_a * (x.scale_b * (x.acc - x.azp * x.azp_adj))


@formula("azp-token-bias")
def _azp_token_bias(x: Operands) -> Expr:
    return fma(x.scale_a, x.scale_b * (x.acc - x.azp * x.azp_adj), x.bias)


@dataclass(frozen=True)
class EpilogueSpec:
    """Which formula, and the granularity of its scales.

    Attributes:
        formula: a name in `FORMULAS`.
        scale_a: granularity of ``scale_a``.
        scale_b: granularity of ``scale_b``.
    """

    formula: str
    scale_a: ScaleA
    scale_b: ScaleB

    def __post_init__(self) -> None:
        if self.formula not in FORMULAS:
            raise UnsupportedError(f"epilogue {self.formula!r} is not defined; known: {', '.join(FORMULAS)}")

    @classmethod
    def of(
        cls,
        scale_a: ScaleA | str = ScaleA.TOKEN,
        scale_b: ScaleB | str = ScaleB.CHANNEL,
        azp: Azp | str = Azp.NONE,
        bias: bool = False,
    ) -> EpilogueSpec:
        """The W8A8 epilogue with this zero point and bias."""
        base = {Azp.NONE: "scaled", Azp.TENSOR: "azp", Azp.TOKEN: "azp-token"}[Azp(azp)]
        return cls(base + ("-bias" if bias else ""), ScaleA(scale_a), ScaleB(scale_b))

    @property
    def name(self) -> str:
        """``<formula>_<scale_a>_<scale_b>``; `parse` reads it back."""
        return f"{self.formula}_{self.scale_a.value}_{self.scale_b.value}"

    @classmethod
    def parse(cls, name: str) -> EpilogueSpec:
        """The spec whose `name` this is.

        Raises:
            UnsupportedError: ``name`` is no epilogue's name.
        """
        try:
            formula_name, scale_a, scale_b = name.rsplit("_", 2)
            return cls(formula_name, ScaleA(scale_a), ScaleB(scale_b))
        except ValueError:
            raise UnsupportedError(
                f"epilogue {name!r} is not <formula>_<scale_a>_<scale_b>; write it like azp-token-bias_token_channel, "
                f"with one of {', '.join(FORMULAS)}, then tensor or token, then tensor or channel"
            ) from None

    def tree(self, accumulator: DType, out: DType) -> Tree:
        """The expression tree of this epilogue over an ``accumulator`` tile, storing ``out``.

        Raises:
            UnsupportedError: the formula subtracts integers from a floating accumulator (azp with fp8).
        """
        root = FORMULAS[self.formula](
            Operands(
                acc=Accum(accumulator),
                scale_a=Load(
                    "scale_a", DType.FP32, Broadcast.COLUMN if self.scale_a is ScaleA.TOKEN else Broadcast.SCALAR
                ),
                scale_b=Load(
                    "scale_b", DType.FP32, Broadcast.ROW if self.scale_b is ScaleB.CHANNEL else Broadcast.SCALAR
                ),
                azp=Load("azp", DType.INT32, Broadcast.COLUMN),
                azp_adj=Load("azp_adj", DType.INT32, Broadcast.ROW),
                bias=Load("bias", out, Broadcast.ROW),
            )
        )
        tree = Tree(root, out)
        if accumulator is not DType.INT32 and any(load.element is DType.INT32 for load in tree.loads):
            raise UnsupportedError(
                f"epilogue {self.formula!r} does exact int32 zero-point arithmetic; it needs int8 operands, "
                f"whose accumulator is int32, not {accumulator.value}"
            )
        return tree
