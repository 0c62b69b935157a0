"""The expression tree an epilogue is written in.

Formulas are built with ordinary operators, so that the code reads like the mathematics::

    scale_a * (scale_b * (acc - azp * azp_adj))

Arithmetic contract, obeyed by every walker: a node whose children are all int32 computes in int32 (wrapping,
hence exact whenever the true result fits); any other node converts its children to float32 (round to nearest
even), computes one correctly rounded float32 operation, and hands on float32. The root's value is finally
rounded to the output type. Children keep the order of the formula, whatever the kernel does to A and B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from cutlass_w8a8.dtypes import DType


class Broadcast(str, Enum):
    """How an operand is spread over D[m, n]."""

    SCALAR = "scalar"
    ROW = "row"
    """One value per column n: a row vector [N]."""
    COLUMN = "column"
    """One value per row m: a column vector [M]."""

    @property
    def transposed(self) -> Broadcast:
        """The broadcast as seen by a kernel that computes D^T."""
        return {Broadcast.ROW: Broadcast.COLUMN, Broadcast.COLUMN: Broadcast.ROW}.get(self, self)


class Op(str, Enum):
    """An operation of a compute node; values are used in node names."""

    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    FMA = "fma"
    """fma(x, y, z) = x * y + z, rounded once."""
    MAX = "max"


@dataclass(frozen=True)
class Expr:
    """A node. Arithmetic operators build compute nodes; equality is structural."""

    @property
    def dtype(self) -> DType:
        """The type of the node's value."""
        raise NotImplementedError

    @property
    def children(self) -> tuple[Expr, ...]:
        """Operands, in formula order."""
        return ()

    def __add__(self, other: Expr) -> Expr:
        return Compute(Op.ADD, (self, other))

    def __sub__(self, other: Expr) -> Expr:
        return Compute(Op.SUB, (self, other))

    def __mul__(self, other: Expr) -> Expr:
        return Compute(Op.MUL, (self, other))


@dataclass(frozen=True)
class Accum(Expr):
    """The accumulator tile: A_q @ B_q."""

    element: DType

    @property
    def dtype(self) -> DType:
        return self.element


@dataclass(frozen=True)
class Load(Expr):
    """An operand read from device memory and broadcast over D."""

    name: str
    element: DType
    broadcast: Broadcast

    @property
    def dtype(self) -> DType:
        return self.element


@dataclass(frozen=True)
class Compute(Expr):
    """One arithmetic operation."""

    op: Op
    args: tuple[Expr, ...]

    @property
    def dtype(self) -> DType:
        return DType.INT32 if all(arg.dtype is DType.INT32 for arg in self.args) else DType.FP32

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.args

    @property
    def label(self) -> str:
        """A short name telling the operation and the operand it brings in: ``mul_scale_b``."""
        loads = [arg.name for arg in self.args if isinstance(arg, Load)]
        computes = [arg.label for arg in self.args if isinstance(arg, Compute)]
        return "_".join([self.op.value, *(loads[:1] or computes[:1])])


def fma(x: Expr, y: Expr, z: Expr) -> Expr:
    """x * y + z with one rounding."""
    return Compute(Op.FMA, (x, y, z))


def maximum(x: Expr, y: Expr) -> Expr:
    """The larger of x and y."""
    return Compute(Op.MAX, (x, y))


@dataclass(frozen=True)
class Tree:
    """A whole epilogue: D = round_to(out, root)."""

    root: Expr
    out: DType

    def postorder(self) -> Iterator[Expr]:
        """All nodes, children before parents, operands in formula order; a shared node appears once."""
        seen: set[Expr] = set()

        def visit(node: Expr) -> Iterator[Expr]:
            if node in seen:
                return
            for child in node.children:
                yield from visit(child)
            seen.add(node)
            yield node

        yield from visit(self.root)

    @property
    def loads(self) -> tuple[Load, ...]:
        """Operands in the order every walker counts them: the order in which the formula first names them."""
        return tuple(node for node in self.postorder() if isinstance(node, Load))
