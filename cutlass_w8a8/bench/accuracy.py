"""Whether what was timed is right: a sample of each result against float64.

This sees a kernel that is wrong, not the last bit of one that is right: that is ``scripts/prove.py``'s.
"""

from __future__ import annotations

import math

import torch

from cutlass_w8a8.bench.providers import Operands, pick

ROWS, COLUMNS = 64, 256
NOT_A_NUMBER = 1e300
"""The error of a result that is none."""
_BF16 = 2.0**-8
_TENSOR_CORE = 2.0**-13
_GROUP = 32
_QUANTISATION = {torch.int8: 0.51 / 127, torch.float8_e4m3fn: 16.1 / 448}
"""Half the distance of the largest codes, and a little for the rounding of the scale, over the largest code."""


def allowed_accumulation(k: int) -> float:
    """What fp8 accumulation may lose, relative to |result| + |a| |b| / sqrt(K), as large as random results are.

    A tensor core adds groups of 32 products, keeping 13 fraction bits of the largest term: it cuts the accumulator
    once a group, by half a unit on average, and the products at random. By a model of it a right kernel reaches 0.15
    to 0.5 of this, and one that leaves out 32 of 28672 k more than 1.
    """
    groups = k / _GROUP
    return _TENSOR_CORE * (0.5 * groups + 1.5 * math.sqrt(_GROUP * groups))


def check(x: Operands, i: int) -> dict[str, float]:
    """Compare what call ``i`` wrote with float64 on evenly spaced rows and columns, the last among them.

    In a chain the GEMM is judged by the operand that quantisation wrote, and quantisation by itself.

    Returns:
        ``largest error``, relative to |a| |b| / sqrt(K), norms of the row of a and the column of b;
        ``error / allowed``, the largest quotient of an error and what rounding to bf16 and, for fp8, accumulation
        allow, so that more than 1 is wrong; in a chain ``quantisation error / allowed`` too.
    """
    a, b = pick(x, i)
    m, n = x.out.shape
    rows, columns = sample(m, ROWS, a.device), sample(n, COLUMNS, a.device)
    left, right = _take(a, rows), _take(b.t(), columns)
    scale_a, scale_b = x.scale_a[rows].double(), x.scale_b[:, columns].double()
    exact = scale_a * scale_b * (left @ right.t())
    k = left.shape[1]
    usual = (scale_a * left.norm(dim=1, keepdim=True)) * (scale_b * right.norm(dim=1)) / math.sqrt(k)
    error = (x.out[rows][:, columns].double() - exact).abs()
    slack = 0.0 if a.dtype is torch.int8 else allowed_accumulation(k)
    # int8's three roundings to float32 are the last term of the first factor.
    allowed = (_BF16 + 2.0**-22) * exact.abs() + slack * (exact.abs() + usual)
    found = {
        "largest error": _largest(error / usual.clamp(min=1e-300)),
        "error / allowed": _largest(error / allowed.clamp(min=1e-300)),
    }
    if x.tokens:
        tokens = x.tokens[i % 2][rows].double()
        lost = (left * scale_a - tokens).abs() / tokens.abs().amax(dim=1, keepdim=True).clamp(min=1e-300)
        found["quantisation error / allowed"] = _largest(lost) / _QUANTISATION[a.dtype]
    return found


def wrong(found: dict[str, float]) -> bool:
    """Whether `check` found more than is allowed."""
    return any(value > 1 for name, value in found.items() if name.endswith("/ allowed"))


def sample(extent: int, count: int, device: torch.device) -> torch.Tensor:
    """At most ``count`` indices below ``extent``, evenly spaced, first and last included."""
    return torch.linspace(0, extent - 1, min(extent, count), device=device).round().long()


def _take(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    # As bytes: fp8 tensors cannot be indexed everywhere.
    return matrix.view(torch.uint8)[rows].view(matrix.dtype).double()


def _largest(ratio: torch.Tensor) -> float:
    # A result that was not written is not a number, and must not pass as small. JSON has no infinity.
    return float(ratio.nan_to_num(nan=NOT_A_NUMBER, posinf=NOT_A_NUMBER).max())
