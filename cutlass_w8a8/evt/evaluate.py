"""The epilogue tree evaluated with torch: the CPU implementation, exact to the bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.tree import Accum, Broadcast, Compute, Expr, Load, Op, Tree

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.E4M3: torch.float8_e4m3fn,
    DType.INT8: torch.int8,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP32: torch.float32,
    DType.INT32: torch.int32,
}


def accumulate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A @ B in the accumulator type: int32 for int8 operands, float32 for float8_e4m3fn.

    ``a`` [M, K] and ``b`` [K, N] of the same type, any strides. The float64 product is exact for int8
    (K < 2**37) and, for fp8, within float64's rounding before the one rounding to float32.
    """
    product = a.to(torch.float64) @ b.to(torch.float64)
    return product.to(torch.int32 if a.dtype is torch.int8 else torch.float32)


def evaluate(tree: Tree, acc: torch.Tensor, operands: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """D [M, N] of the tree's output type, from the accumulator [M, N] and flat operands by name.

    Operands hold 1, N or M elements as their broadcast says. Follows the arithmetic contract of
    `cutlass_w8a8.evt.tree`.
    """
    values: dict[Expr, torch.Tensor] = {}
    for node in tree.postorder():
        if isinstance(node, Accum):
            values[node] = acc
        elif isinstance(node, Load):
            values[node] = _spread(operands[node.name], node.broadcast)
        elif isinstance(node, Compute):
            values[node] = _apply(node, [values[child] for child in node.args])
    return values[tree.root].to(torch.float32).to(TORCH_DTYPES[tree.out]).expand_as(acc).contiguous()


def _spread(operand: torch.Tensor, broadcast: Broadcast) -> torch.Tensor:
    shape = {Broadcast.SCALAR: (1, 1), Broadcast.ROW: (1, -1), Broadcast.COLUMN: (-1, 1)}[broadcast]
    return operand.reshape(shape)


def _apply(node: Compute, args: list[torch.Tensor]) -> torch.Tensor:
    args = [arg.to(TORCH_DTYPES[node.dtype]) for arg in args]
    if node.op is Op.ADD:
        return args[0] + args[1]
    if node.op is Op.SUB:
        return args[0] - args[1]
    if node.op is Op.MUL:
        return args[0] * args[1]
    if node.op is Op.MAX:
        return torch.maximum(args[0], args[1])
    if node.dtype is DType.INT32:
        return args[0] * args[1] + args[2]
    return fma(*args)


def fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x * y + z for float32 tensors, rounded once to float32.

    The product of two float32 is exact in float64. Its sum with z is rounded to odd there, which keeps
    enough of the discarded part for the final rounding to float32 to be the correct one
    (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    product = x.double() * y.double()
    z = z.double()
    total = product + z
    virtual = total - product
    error = (product - (total - virtual)) + (z - virtual)
    even = (total.view(torch.int64) & 1) == 0
    inexact = (error != 0) & torch.isfinite(error)
    toward = torch.where(error > 0, torch.inf, -torch.inf)
    odd = torch.where(inexact & even, torch.nextafter(total, toward), total)
    return odd.to(torch.float32)
