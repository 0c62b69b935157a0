"""Closed formulas for what the kernels must return. Imports nothing of the package, so that it cannot agree by descent.

The contract::

    t   = round_f32(scale_b * float32(acc - azp * azp_adj))
    out = round_out(fma(scale_a, t, bias))        with a bias: one float32 rounding of scale_a * t + bias
    out = round_out(round_f32(scale_a * t))       without

int8: ``acc`` is an integer, so the output is determined to the last bit (`int8_expected`).

fp8: the products and their exact sum are determined (all are multiples of 2**-18 below 2**53 * 2**-18, so float64
sums them without error), but Hopper's tensor core adds them with fewer bits. Two independent statements follow:

* `fp8_error` bounds the accumulation error of each element. Derivation. One instruction adds the products of a group
  of 32 consecutive k to the accumulator. It takes the largest exponent ``e`` among the group's products (a product's
  exponent is the sum of its factors' exponents; subnormal factors count as -6) and the accumulator's, shifts every
  term to it and drops what lies below ``q = 2**(e - 13)``, adds exactly, and keeps 13 fraction bits of the sum.
  Hence, writing S_g for the exact sum of the first g groups and E_g for the error bound of the accumulator after them,
  with n_g <= 32 terms in group g (zeros that pad the last group are exact):

      e_g  = max(floor(log2(|S_(g-1)| + E_(g-1))), max exponent of a in the group + max exponent of b in the group)
      E_g  = E_(g-1) + (n_g + [g > 1]) * 2**(e_g - 13) + 2**(floor(log2(|S_g| + E')) - 13)

  where [g > 1] is the accumulator's own shift, and the last term is the truncation of the sum whose magnitude is at
  most |S_g| + E' with E' = E_g without that term. It holds whether dropping means rounding to zero or down, since
  either loses less than q.
  Everything after the accumulator is monotone (multiplication by a scale, fma, roundings), so the output must lie
  between the contract evaluated at acc - E and at acc + E: no further slack is granted (`fp8_interval`).
* `hopper_fp8_accumulate` computes the accumulator by that recipe with rounding to zero, the published bit-accurate
  model of the instruction (Xie et al., "MMA-Sim", arXiv 2511.10909), and so predicts every bit.

Shapes throughout: ``a`` [M, K], ``b`` [K, N], accumulators [M, N], any strides and device. Scales hold 1 or M (``a``)
and 1 or N (``b``) elements in any shape; bias [N]; azp [M] and azp_adj [N] int32, in any shape.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

GROUP = 32
"""Consecutive k one fp8 tensor-core instruction sums."""
FRACTION_BITS = 13
"""Bits kept below the leading one of the largest term."""
PROMOTION = 128
"""Consecutive k after which an accurate (not fast) fp8 kernel adds its partial sum to float32 registers."""
_MIN_EXPONENT = -6
_ZERO_EXPONENT = -126


def exact_accumulator(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A @ B exactly: int64 for int8 operands, float64 for float8_e4m3fn."""
    product = a.double() @ b.double()
    return product.to(torch.int64) if a.dtype is torch.int8 else product


def subtract_zero_point(acc: torch.Tensor, azp: torch.Tensor | None, azp_adj: torch.Tensor) -> torch.Tensor:
    """acc - azp * azp_adj in int64; ``azp`` None means that ``azp_adj`` already holds the product.

    Raises:
        ValueError: a result or product does not fit int32, where kernels may wrap: the case is not a fair one.
    """
    row = azp_adj.reshape(1, -1).to(torch.int64)
    product = row if azp is None else azp.reshape(-1, 1).to(torch.int64) * row
    result = acc - product
    for what, value in (("azp * azp_adj", product), ("acc - azp * azp_adj", result)):
        if value.numel() and int(value.abs().max()) >= 2**31:
            raise ValueError(f"{what} reaches {int(value.abs().max())}, beyond int32")
    return result


def fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x * y + z of float32 tensors with a single rounding to float32.

    The product is exact in float64. The sum is rounded to odd there: of the two float64 neighbours of an inexact
    sum take the one with an odd last bit. It then never lies on a float32 tie that the exact sum does not lie on,
    and 53 >= 24 + 2 bits suffice for the second rounding to give the correctly rounded result.
    """
    product, addend = x.double() * y.double(), z.double()
    product, addend = torch.broadcast_tensors(product, addend)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    # Stepping the bit pattern steps the magnitude, so the direction depends on the sign of the sum.
    step = torch.where((error > 0) == (total > 0), 1, -1)
    inexact_even = (error != 0) & torch.isfinite(total) & (bits & 1 == 0)
    return torch.where(inexact_even, bits + step, bits).view(torch.float64).float()


def contract(
    acc: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The output [M, N] for an accumulator (int64 or float64; zero point already subtracted)."""
    scale_a, scale_b = scale_a.reshape(-1, 1), scale_b.reshape(1, -1)
    inner = scale_b * acc.float()
    outer = scale_a * inner if bias is None else fma(scale_a, inner, bias.reshape(1, -1).float())
    return outer.to(out_dtype)


def int8_expected(
    acc: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    azp: torch.Tensor | None = None,
    azp_adj: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The only correct output, bit for bit, from `exact_accumulator`'s int64 result."""
    if azp_adj is not None:
        acc = subtract_zero_point(acc, azp, azp_adj)
    if acc.numel() and int(acc.abs().max()) >= 2**31:
        raise ValueError(f"the accumulator reaches {int(acc.abs().max())}, beyond int32")
    return contract(acc, scale_a, scale_b, bias, out_dtype)


def _exponent(x: torch.Tensor) -> torch.Tensor:
    """floor(log2(|x|)) as int32, at least `_MIN_EXPONENT` for fp8 (subnormals); `_ZERO_EXPONENT` for zero."""
    value = x.float()
    exponent = (value.view(torch.int32) >> 23 & 0xFF) - 127
    if x.dtype is torch.float8_e4m3fn:
        exponent = exponent.clamp_min(_MIN_EXPONENT)
    return torch.where(value == 0, _ZERO_EXPONENT, exponent)


# Powers of two are put together from bits: exp2, pow and ldexp need not be exact on every device.
def _power32(exponent: torch.Tensor) -> torch.Tensor:
    return (exponent.to(torch.int32) + 127 << 23).view(torch.float32)


def _power64(exponent: torch.Tensor) -> torch.Tensor:
    return (exponent.to(torch.int64) + 1023 << 52).view(torch.float64)


def _below(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two not above x > 0; 0 for 0 (float64)."""
    return (x.view(torch.int64) & 0x7FF << 52).view(torch.float64)


def _groups(k: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + GROUP, k)) for start in range(0, k, GROUP))


def fp8_error(a: torch.Tensor, b: torch.Tensor, *, promotion: int | None = None, split: bool = False) -> torch.Tensor:
    """A bound [M, N] float64 on |kernel accumulator - exact accumulator|; see the module's docstring.

    Args:
        promotion: the kernel restarts its accumulator every so many k, adding partial sums in float32.
        split: K is divided among blocks at unknown boundaries and the partial sums are added in float32. A partial
            accumulator is a difference of two prefix sums; its magnitude is bounded with the largest one seen.
    """
    wide_a, wide_b = a.double(), b.double()
    exponent_a, exponent_b = _exponent(a), _exponent(b)
    prefix = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    start, largest, error, total_error = (torch.zeros_like(prefix) for _ in range(4))
    ulp32 = 2.0**-24
    additions = 0
    for first, last in _groups(a.shape[1]):
        if promotion is not None and first and first % promotion == 0:
            additions += 1
            total_error += error + ulp32 * (prefix.abs() + error + total_error)
            start, error = prefix.clone(), torch.zeros_like(error)
        restart = first == 0 or (promotion is not None and first % promotion == 0)
        reach = largest if split else torch.zeros_like(largest)
        accumulator = (prefix - start).abs() + reach + error
        group_a = exponent_a[:, first:last].amax(1, keepdim=True)
        group_b = exponent_b[first:last].amax(0, keepdim=True)
        quantum = torch.maximum(_below(accumulator), _power64(group_a + group_b)) * 2.0**-FRACTION_BITS
        error += quantum * (last - first + (0 if restart else 1))
        prefix = prefix + wide_a[:, first:last] @ wide_b[first:last]
        largest = torch.maximum(largest, prefix.abs())
        error += _below((prefix - start).abs() + reach + error) * 2.0**-FRACTION_BITS
    total_error += error
    if promotion is not None:
        total_error += ulp32 * (prefix.abs() + total_error)
    if split:
        # At most one addition per group, each rounding a sum of partial sums.
        total_error += ulp32 * len(list(_groups(a.shape[1]))) * (2 * largest + total_error)
    # The bound itself was computed in float64, within a few thousand roundings of 2**-53.
    return total_error * (1 + 2.0**-36)


def fp8_interval(
    acc: torch.Tensor,
    error: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(lowest, expected, highest) acceptable output, from the exact accumulator and `fp8_error`'s bound."""
    ends = [contract(acc + sign * error, scale_a, scale_b, bias, out_dtype) for sign in (-1, 1)]
    return torch.minimum(*ends), contract(acc, scale_a, scale_b, bias, out_dtype), torch.maximum(*ends)


def fp8_error_of_slices(a: torch.Tensor, b: torch.Tensor, slices: int) -> torch.Tensor:
    """As `fp8_error`, for a kernel that sums equal slices of K each by itself, then adds them in float32, in order."""
    ulp32 = 2.0**-24
    total = error = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    for number, (part_a, part_b) in enumerate(_slices(a, b, slices)):
        total = total + part_a.double() @ part_b.double()
        error = error + fp8_error(part_a, part_b)
        if number:
            error = error + ulp32 * (total.abs() + error)
    return error


def hopper_fp8_accumulate_slices(a: torch.Tensor, b: torch.Tensor, slices: int) -> torch.Tensor:
    """As `hopper_fp8_accumulate`, for a kernel that sums equal slices of K and adds them in float32, in order."""
    parts = [hopper_fp8_accumulate(*part) for part in _slices(a, b, slices)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _slices(a: torch.Tensor, b: torch.Tensor, slices: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    width = a.shape[1] // slices
    return [(a[:, k : k + width], b[k : k + width]) for k in range(0, slices * width, width)]


def hopper_fp8_accumulate(
    a: torch.Tensor, b: torch.Tensor, *, promotion: int | None = None, cells: int = 1 << 27
) -> torch.Tensor:
    """The accumulator [M, N] float32 as Hopper's fp8 tensor core is published to compute it.

    Costs M * N * K elementwise steps; ``cells`` limits the elements of a temporary.
    """
    rows = max(1, cells // (GROUP * b.shape[1]))
    return torch.cat([_accumulate_rows(part, b, promotion) for part in a.split(rows)])


def _accumulate_rows(a: torch.Tensor, b: torch.Tensor, promotion: int | None) -> torch.Tensor:
    wide_a, wide_b = a.float(), b.float()
    exponent_a, exponent_b = _exponent(a).to(torch.int16), _exponent(b).to(torch.int16)
    register = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    promoted = torch.zeros_like(register)
    for first, last in _groups(a.shape[1]):
        if promotion is not None and first and first % promotion == 0:
            promoted, register = promoted + register, torch.zeros_like(register)
        exponents = exponent_a[:, first:last, None] + exponent_b[None, first:last]
        # Zero factors carry an exponent far below any other, so they never decide the alignment.
        top = torch.maximum(exponents.amax(1).to(torch.int32), _exponent(register)).clamp_min(-100)
        scale = _power32(FRACTION_BITS - top)
        terms = wide_a[:, first:last, None] * wide_b[None, first:last]
        terms *= scale[:, None]
        # Counted in quanta every term is an integer below 2**15, so float32 adds them exactly.
        total = terms.trunc_().sum(1) + (register * scale).trunc()
        value = total * _power32(top - FRACTION_BITS)
        unit = _power32(_exponent(value).clamp_min(-100) - FRACTION_BITS)
        register = torch.where(value == 0, 0.0, (value / unit).trunc() * unit)
    return register if promotion is None else promoted + register
