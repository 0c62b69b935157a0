"""The grid of vLLM's published tests of ``cutlass_scaled_mm``, asked of `cutlass_w8a8.vllm.custom_ops`.

Shapes, granularities, data and tolerances are those of vLLM's ``tests/kernels/quantization/test_cutlass_scaled_mm.py``;
int8 results must equal the closed formula of `tests.reference` besides, bit for bit. Without block-scaled and grouped
kernels, which this package does not have.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from cutlass_w8a8.arch import Capability, match
from cutlass_w8a8.request import check
from cutlass_w8a8.support import choose
from cutlass_w8a8.vllm import custom_ops as ops
from tests.reference import exact_accumulator, int8_expected

FP8, INT8 = torch.float8_e4m3fn, torch.int8
BF16, FP16 = torch.bfloat16, torch.float16

SHAPES = (
    (1, 256, 128),
    (1, 16384, 1024),
    (1, 24576, 496),
    (16, 256, 496),
    (16, 16384, 128),
    (16, 24576, 4096),
    (32, 8192, 4096),
    (32, 16384, 4096),
    (33, 1024, 1024),
    (33, 8192, 128),
    (64, 2048, 496),
    (64, 16384, 1024),
    (100, 8192, 496),
    (128, 32768, 4096),
    (256, 4096, 4096),
    (512, 256, 1024),
    (512, 8192, 4096),
    (512, 16384, 128),
    (512, 24576, 128),
)
"""(M, N, K)."""
UNALIGNED = ((32, 3420, 1280), (32, 1280, 6840), (1, 3420, 1280), (64, 6840, 1280), (16, 100, 200), (33, 255, 513))
SQUARE = (512, 512, 512)
SWEEP_EXTENTS = (32, 64, 96)
"""N and K of the sweep over M from 1 to 127."""
# dtype: relative and absolute tolerance.
_TOLERANCES = {FP8: (5e-1, 1.5e-1), INT8: (1e-1, 1.0)}


@dataclass(frozen=True)
class Case:
    """One call of ``cutlass_scaled_mm``.

    Attributes:
        m, n, k: extents.
        dtype: of the operands.
        token: a scale for each row of a, else one.
        channel: a scale for each column of b, else one.
        bias: whether there is one.
        out_dtype: of the result.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    token: bool
    channel: bool
    bias: bool
    out_dtype: torch.dtype = BF16

    def __str__(self) -> str:
        names = ["fp8" if self.dtype is FP8 else "int8", str(self.out_dtype)[6:], f"{self.m}x{self.n}x{self.k}"]
        return "-".join(names + [name for name in ("token", "channel", "bias") if getattr(self, name)])


@dataclass(frozen=True)
class AzpCase:
    """One call of ``cutlass_scaled_mm_azp``, with a zero point for each row or one of all."""

    m: int
    n: int
    k: int
    out_dtype: torch.dtype
    bias: bool
    token: bool

    def __str__(self) -> str:
        names = [str(self.out_dtype)[6:], f"{self.m}x{self.n}x{self.k}"]
        return "-".join(names + [name for name in ("token", "bias") if getattr(self, name)])


def combinations(shape: tuple[int, int, int], dtype: torch.dtype, out_dtype: torch.dtype = BF16) -> list[Case]:
    """All granularities of one shape, with and without a bias."""
    return [Case(*shape, dtype, *flags, out_dtype) for flags in itertools.product((True, False), repeat=3)]


def gemms() -> list[Case]:
    """One call for each point of the grid of shapes, those that need padding and other result types included."""
    cases = [case for dtype in (FP8, INT8) for shape in SHAPES for case in combinations(shape, dtype)]
    cases += [case for dtype in (FP8, INT8) for shape in UNALIGNED for case in combinations(shape, dtype)]
    return cases + [case for dtype in (FP8, INT8) for case in combinations(SQUARE, dtype, FP16)]


def sweep(case: Case) -> Iterator[Case]:
    """``case`` with every M from 1 to 127 at each of the sweep's extents."""
    for extent in SWEEP_EXTENTS:
        for m in range(1, 128):
            yield replace(case, m=m, n=extent, k=extent)


def azp_cases() -> list[AzpCase]:
    """The grid of calls with zero points."""
    extents = itertools.product((32, 64, 128), (16, 32, 64), (64, 128, 256))
    flags = list(itertools.product((BF16, FP16), (True, False), (True, False)))
    return [AzpCase(*mnk, *rest) for mnk in extents for rest in flags]


def inputs(case: Case, device: str) -> tuple[torch.Tensor, ...]:
    """a, b, scale_a, scale_b, and a bias if there is one."""
    a, b = torch.randn(case.m, case.k, device=device), torch.randn(case.n, case.k, device=device)
    if case.dtype is FP8:
        a, b = (x.clamp(-448, 448).round().to(FP8) for x in (a, b))
    else:
        a, b = ((x * 5).round().clamp(-128, 127).to(INT8) for x in (a, b))
    scale_a = torch.randn(case.m if case.token else 1, 1, device=device)
    scale_b = torch.randn(1, case.n if case.channel else 1, device=device)
    bias = (torch.rand(case.n, device=device) * 10).to(case.out_dtype)
    return (a, b.t(), scale_a, scale_b, *((bias,) if case.bias else ()))


def run(case: Case, device: str) -> None:
    """Make the call and compare.

    Raises:
        AssertionError: the result is not what it must be.
    """
    a, b, scale_a, scale_b, *rest = inputs(case, device)
    bias = rest[0] if rest else None
    found = ops.cutlass_scaled_mm(a, b, scale_a, scale_b, case.out_dtype, bias)
    assert found.shape == (case.m, case.n) and found.dtype is case.out_dtype and found.is_contiguous()
    expected = ((scale_a * a.float()) @ (scale_b * b.float())).to(case.out_dtype)
    expected = expected if bias is None else expected + bias
    rtol, atol = _TOLERANCES[case.dtype]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    if case.dtype is INT8:
        exact = int8_expected(exact_accumulator(a, b), scale_a, scale_b, case.out_dtype, bias=bias)
        assert torch.equal(found, exact), f"{int((found != exact).sum())} elements differ from the exact result"


def run_azp(case: AzpCase, device: str) -> None:
    """Make the call and compare.

    Raises:
        AssertionError: the result is not what it must be.
    """
    rows = case.m if case.token else 1
    scale_a, scale_b = torch.randn(rows, 1, device=device) / 10, torch.randn(1, case.n, device=device) / 10
    a, b = ((torch.rand(extent, case.k, device=device) * 255 - 128).round() for extent in (case.m, case.n))
    a, b = a.clamp(-128, 127).to(INT8), b.clamp(-128, 127).to(INT8).t()
    zero_point = (torch.rand(rows, 1, device=device) * 10 + 1.5) / scale_a
    # What does not fit int8 is as undefined there as here; any zero point will do.
    azp = zero_point.nan_to_num(0).clamp(-(2.0**20), 2.0**20).to(torch.int32).to(INT8).to(torch.int32)
    bias = (torch.rand(1, case.n, device=device) * 10 + 2.5).to(case.out_dtype)
    column_sums = b.sum(0, keepdim=True, dtype=torch.int32)
    given = (column_sums, azp) if case.token else (azp * column_sums, None)
    found = ops.cutlass_scaled_mm_azp(a, b, scale_a, scale_b, case.out_dtype, *given, bias if case.bias else None)
    plain = bias if case.bias else torch.zeros_like(bias)
    tolerance = {"rtol": 1e-2 if case.out_dtype is BF16 else 1e-3, "atol": 1e-3}
    in_float = (scale_a * (a.int() - azp).float()) @ (scale_b * b.float()) + plain
    torch.testing.assert_close(found, in_float.to(case.out_dtype), **tolerance)
    products = exact_accumulator((a.int() - azp).float(), b.float()).float()
    torch.testing.assert_close(found, (scale_a * scale_b * products + plain).to(case.out_dtype), **tolerance)
    exact = int8_expected(
        exact_accumulator(a, b),
        scale_a,
        scale_b,
        case.out_dtype,
        azp=given[1],
        azp_adj=given[0],
        bias=bias if case.bias else None,
    )
    assert torch.equal(found, exact), f"{int((found != exact).sum())} elements differ from the exact result"


def plan(capability: Capability, sm_count: int | None, device: str | None) -> list[str]:
    """The kernels that vLLM's tests use on a device, as text for ``cutlass-w8a8 build --plan``."""
    found: dict[str, None] = {}
    arch = match(capability).arch
    shapes = {(m, -(-n // 8) * 8, -(-k // 16) * 16) for m, n, k in (*SHAPES, *UNALIGNED, SQUARE)}
    shapes |= {(m, extent, extent) for extent in SWEEP_EXTENTS for m in range(1, 128)}
    calls: list[tuple[Case, bool | None]] = []
    for dtype in (FP8, INT8):
        calls += [(case, None) for shape in sorted(shapes) for case in combinations(shape, dtype)]
        calls += [(case, None) for case in combinations(SQUARE, dtype, FP16)]
    for azp in azp_cases():
        calls.append((Case(azp.m, azp.n, azp.k, INT8, azp.token, True, azp.bias, azp.out_dtype), azp.token))
    for case, azp_token in calls:
        a = torch.empty(case.m, case.k, dtype=case.dtype, device="meta")
        b = torch.empty(case.n, case.k, dtype=case.dtype, device="meta").t()
        scale_a = torch.empty(case.m if case.token else 1, 1, device="meta")
        scale_b = torch.empty(1, case.n if case.channel else 1, device="meta")
        bias = torch.empty(case.n, dtype=case.out_dtype, device="meta") if case.bias else None
        azp_adj = None if azp_token is None else torch.empty(case.n, dtype=torch.int32, device="meta")
        azp_vector = torch.empty(case.m, dtype=torch.int32, device="meta") if azp_token else None
        request = check(a, b, scale_a, scale_b, case.out_dtype, bias, azp_adj, azp_vector, None)
        spec = choose(request, arch, None, sm_count=sm_count, device=device).spec
        found[json.dumps(json.loads(spec.to_json()), sort_keys=True)] = None
    return list(found)
