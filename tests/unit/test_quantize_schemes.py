"""Quantisation with zero points, of tensors, by given scales, without a GPU: bits, launches, tracing, every error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8 import emit
from cutlass_w8a8.arch import SM90
from cutlass_w8a8.dispatch import quant_symbols, whole_launch
from cutlass_w8a8.dispatch.quantize import ANY_ROW, SCAN
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ArgumentError, UnsupportedError
from cutlass_w8a8.spec import QUANT_HELD, QUANT_MAX_THREADS, QuantSpec, Scheme, spec_from_json
from tests import quant_cases
from tests.harness import Check

E4M3, INT8 = quant_cases.TARGETS
X = torch.ones(4, 32, dtype=torch.bfloat16)
ONE = torch.ones(1)
ZERO = torch.zeros(1, dtype=torch.int32)
NAN, INF = float("nan"), float("inf")


def test_bits_are_those_of_the_closed_form() -> None:
    check = Check("quantize", "CPU")
    for number, case in enumerate(quant_cases.cases(1 << 13, step=5)):
        quant_cases.compare_ways(check, number, case, "cpu")
    assert check.failures == [] and check.passed > 1000


def test_zero_points_fit_and_give_the_values_back() -> None:
    x = torch.stack([torch.linspace(a, b, 511) for a, b in ((-1, 1), (0, 5), (-5, 0), (1000, 1001), (7, 7), (-3, -3))])
    q, scale, azp = cutlass_w8a8.quantize(x, INT8, symmetric=False)
    assert azp.dtype is torch.int32 and azp.shape == scale.shape == (6, 1)
    # Of -1 and 1 the middle would be a tie; the quotient of rounded numbers is beside it.
    assert azp.flatten().tolist() == [-1, -128, 127, -128, -128, 127]
    # Half a step for a code, and half of one for the zero point where the range ends.
    assert ((scale * (q - azp) - x).abs() <= 1.001 * scale).all()
    q, scale, azp = cutlass_w8a8.quantize(torch.zeros(2, 8), INT8, symmetric=False)
    assert (scale == 2.0**-126).all() and (azp == -128).all() and (q == -128).all()


def test_the_widest_range_does_not_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    q, scale, azp = cutlass_w8a8.quantize(torch.tensor([[largest, -largest, 0.0]]), INT8, symmetric=False)
    assert scale.isfinite().all() and q.tolist() == [[127, -128, 0]] and azp.tolist() == [[0]]


@pytest.mark.parametrize("granularity", ["token", "tensor"])
def test_products_with_zero_points_are_those_of_the_values(granularity: str) -> None:
    x, w = torch.randn(8, 64) + 3, torch.randn(16, 64)
    a, scale_a, azp = cutlass_w8a8.quantize(x, INT8, granularity=granularity, symmetric=False)
    b, scale_b = cutlass_w8a8.quantize_per_token(w, INT8)
    sums = b.sum(1, dtype=torch.int32)
    zero = {"azp": azp} if granularity == "token" else {}
    azp_adj = sums if zero else azp * sums
    y = cutlass_w8a8.scaled_mm_azp(a, b.t(), scale_a, scale_b, torch.float32, azp_adj, **zero)
    exact = (scale_a * (a - azp).float()) @ (scale_b * b.float()).t()
    assert torch.allclose(y, exact, rtol=1e-5, atol=1e-4) and (y - x @ w.t()).norm() < 0.02 * y.norm()


@pytest.mark.parametrize(("scheme", "target"), quant_cases.WAYS)
def test_faults_reach_the_product_where_scales_are_found(scheme: str, target: torch.dtype) -> None:
    """A NaN makes all products NaN of what shares its scale, and so does an infinity; given scales have no room."""
    for fault in (NAN, INF, -INF):
        x = torch.ones(3, 16)
        x[1, 3] = fault
        q, scale, *azp = quant_cases.quantize(x, target, scheme, **quant_cases.given(scheme, 0))
        shift = azp[0].double() if azp else 0
        product = (scale.double() * (q.double() - shift)).sum(1)
        if scheme.startswith("static"):
            finite = target is INT8 or abs(fault) == INF
            assert product.isfinite().tolist() == [True, finite, True]
        else:
            whole = scheme.startswith("tensor")
            assert product.isnan().tolist() == [whole, True, whole]


def test_given_scales_saturate_and_round_to_even() -> None:
    x = torch.tensor([[0.25, 0.75, -1.25, 1e30, -1e30, INF, -INF, NAN, -0.0]])
    scale = torch.tensor([0.5])
    q, same = cutlass_w8a8.quantize(x, INT8, scale)
    assert same is scale and q.tolist() == [[0, 2, -2, 127, -128, 127, -128, 0, 0]]
    azp = torch.tensor([3], dtype=torch.int32)
    q, same, zero = cutlass_w8a8.quantize(x, INT8, scale, azp, symmetric=False, granularity="tensor")
    assert same is scale and zero is azp and q.tolist() == [[3, 5, 1, 127, -128, 127, -128, 3, 3]]
    q, _ = cutlass_w8a8.quantize(x, E4M3, scale)
    assert q.view(torch.uint8).tolist() == [[0x30, 0x3C, 0xC2, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0x80]]


def test_a_row_is_a_tensor_of_one_row() -> None:
    x = torch.randn(1, 100)
    for target in quant_cases.TARGETS:
        row, whole = cutlass_w8a8.quantize(x, target), cutlass_w8a8.quantize(x, target, granularity="tensor")
        assert torch.equal(row[0].view(torch.uint8), whole[0].view(torch.uint8)) and row[1].item() == whole[1].item()
        same = cutlass_w8a8.quantize_per_token(x, target)
        assert torch.equal(same[0].view(torch.uint8), row[0].view(torch.uint8)) and torch.equal(same[1], row[1])


@pytest.mark.parametrize(("scheme", "target"), quant_cases.WAYS)
@pytest.mark.parametrize("shape", [(7,), (2, 3, 24), (0, 16), (3, 0), (2, 0, 8)])
def test_every_shape_has_its_scales(shape: tuple[int, ...], scheme: str, target: torch.dtype) -> None:
    found = quant_cases.quantize(torch.randn(shape), target, scheme, **quant_cases.given(scheme, 0))
    m = torch.empty(shape[:-1]).numel()
    assert found[0].shape == shape and len(found) == 2 + ("azp" in scheme)
    assert all(each.shape == ((m, 1) if scheme.startswith("token") else (1,)) for each in found[1:])
    if scheme.startswith("tensor") and 0 in shape:
        assert found[1].item() == pytest.approx(1 / (448 * 512) if target is E4M3 else 2.0**-126)


# Errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"granularity": "row"}, "granularity is 'row'; accepted: 'token' or 'tensor'"),
        ({"symmetric": 1}, "symmetric is 1; accepted: True, False or None"),
        ({"azp": ZERO}, "azp is given but scale is not"),
        ({"azp_out": ZERO}, "azp_out is given but there is no zero point; pass symmetric=False"),
        ({"scale": ONE, "scale_out": ONE}, "scale_out is for a scale that is found, but scale is given"),
        ({"scale": ONE, "azp": ZERO, "azp_out": ZERO}, "azp_out is for a scale that is found"),
        ({"scale": ONE, "granularity": "token"}, "scale is given, which is for the whole tensor"),
        ({"scale": ONE, "symmetric": False}, "symmetric is False and azp is not given; pass azp too"),
        ({"scale": ONE, "azp": ZERO, "symmetric": True}, "symmetric is True and azp is given; leave azp out"),
        ({"dtype": E4M3, "symmetric": False}, "dtype is torch.float8_e4m3fn, which has no zero point"),
        ({"dtype": E4M3, "scale": ONE, "azp": ZERO}, "dtype is torch.float8_e4m3fn, which has no zero point"),
        ({"scale": 0.5}, "scale is a float; pass a torch.Tensor"),
        ({"scale": ONE, "azp": 3}, "azp is a int; pass a torch.Tensor"),
        ({"scale": ONE.half()}, "scale has dtype torch.float16; it must be torch.float32"),
        ({"scale": torch.ones(4, 1)}, "scale has shape (4, 1); it must be one value for the whole of x"),
        ({"scale": torch.ones(1, device="meta")}, "scale is on meta but x is on cpu"),
        ({"scale": ONE, "azp": ZERO.long()}, "azp has dtype torch.int64; it must be torch.int32"),
        ({"scale": torch.complex(ONE, ONE).conj().imag}, "scale is a lazily negated view"),
        ({"scale": ONE.clone().requires_grad_()}, "requires a gradient"),
        ({"scale_out": torch.empty(1)}, "scale_out has shape (1,); it must be (4, 1)"),
        ({"scale_out": torch.empty(4, 1), "granularity": "tensor"}, "it must be (1,): one value for the whole of x"),
        ({"azp_out": torch.empty(4, 1), "symmetric": False}, "azp_out has dtype torch.float32; it must be torch.int32"),
        ({"x": X.double(), "scale": ONE}, "x has dtype torch.float64"),
        ({"out": torch.empty(4, 16, dtype=INT8), "scale": ONE}, "out has shape (4, 16)"),
    ],
)
def test_errors_say_what_and_what_instead(arguments: dict[str, Any], says: str) -> None:
    call: dict[str, Any] = {"x": X, "dtype": INT8} | arguments
    with pytest.raises(ArgumentError) as caught:
        cutlass_w8a8.quantize(call.pop("x"), call.pop("dtype"), **call)
    assert says in str(caught.value)


def test_memory_is_not_shared() -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8)
    out = buffer[:128].view(INT8).view(4, 32)
    inside, after = buffer[64:80].view(torch.float32).view(4, 1), buffer[128:144].view(torch.float32).view(4, 1)
    with pytest.raises(ArgumentError, match="scale_out shares memory with out"):
        cutlass_w8a8.quantize(X, INT8, out=out, scale_out=inside)
    with pytest.raises(ArgumentError, match="azp_out shares memory with out"):
        cutlass_w8a8.quantize(X, INT8, out=out, symmetric=False, azp_out=inside.view(torch.int32))
    with pytest.raises(ArgumentError, match="azp_out shares memory with scale_out"):
        cutlass_w8a8.quantize(X, INT8, symmetric=False, scale_out=after, azp_out=after.view(torch.int32))
    for given in ({"scale": inside[:1]}, {"scale": ONE, "azp": inside[:1].view(torch.int32)}):
        with pytest.raises(ArgumentError, match=f"{list(given)[-1]} shares memory with out"):
            cutlass_w8a8.quantize(X, INT8, out=out, **given)
    # What is only read may lie anywhere.
    whole = torch.ones(4, 32)
    assert (cutlass_w8a8.quantize(whole, INT8, whole[0, :1])[0] == 1).all()


# Tracing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", quant_cases.TARGETS)
def test_operators_are_well_formed(target: torch.dtype) -> None:
    ops = torch.ops.cutlass_w8a8
    x, out = torch.randn(2, 3, 40), torch.zeros(2, 3, 40, dtype=INT8).to(target)
    # The other checks multiply results, which torch cannot for fp8.
    every = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    checks = every if target is INT8 else every[1:3]
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.quantize_static, (x, target, ONE)),
        (ops.quantize_static_out, (out, x, ONE)),
    ]
    for granularity, shape in (("token", (6, 1)), ("tensor", (1,))):
        calls.append((ops.quantize, (x, target, granularity, "launch")))
        calls.append((ops.quantize_out, (out, torch.zeros(shape), None, x, granularity)))
        if target is INT8:
            zero = torch.zeros(shape, dtype=torch.int32)
            calls.append((ops.quantize_azp, (x, target, granularity)))
            calls.append((ops.quantize_out, (out, torch.zeros(shape), zero, x, granularity)))
    if target is INT8:
        calls += [(ops.quantize_static, (x, target, ONE, ZERO)), (ops.quantize_static_out, (out, x, ONE, ZERO))]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=checks)


@pytest.mark.parametrize(("scheme", "target"), quant_cases.WAYS)
def test_compiled_calls_give_the_same(scheme: str, target: torch.dtype) -> None:
    given = quant_cases.given(scheme, 1)
    # Every scheme compiles the same code again, which has a limit.
    torch._dynamo.reset()

    def call(x: torch.Tensor, given: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> Any:
        return quant_cases.quantize(x * 2, target, scheme, **given, **buffers)

    compiled: Callable[..., Any] = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (3, 5):
        x = torch.randn(m, 48)
        expected = call(x, given, {})
        buffers = {"out": torch.empty(m, 48, dtype=INT8).to(target)}
        if not given:
            buffers["scale_out"] = torch.empty_like(expected[1])
        for into in ({}, buffers):
            got = compiled(x, given, into)
            assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))
            assert all(torch.equal(a, b) for a, b in zip(got[1:], expected[1:], strict=True))
        assert torch.equal(buffers["out"].view(torch.uint8), expected[0].view(torch.uint8))


def test_tracing_refuses_what_eager_calls_refuse() -> None:
    meta = torch.empty(2, 8, device="meta")
    with pytest.raises(ArgumentError, match="scale has shape"):
        cutlass_w8a8.quantize(meta, INT8, torch.ones(2, 1))
    with pytest.raises(ArgumentError, match="granularity is 'row'"):
        torch.ops.cutlass_w8a8.quantize(torch.ones(2, 8), INT8, "row")
    with pytest.raises(ArgumentError, match="has no zero point"):
        torch.ops.cutlass_w8a8.quantize_azp(torch.ones(2, 8), E4M3, "token")
    q, scale, azp = cutlass_w8a8.quantize(meta, INT8, granularity="tensor", symmetric=False)
    assert q.is_meta and q.shape == (2, 8) and scale.shape == azp.shape == (1,) and azp.dtype is torch.int32


# Launches -----------------------------------------------------------------------------------------------------------


def test_launches_cover_a_tensor() -> None:
    for m in quant_cases.MS:
        for k in quant_cases.KS:
            for size, aligned, packed, scans in ((2, True, True, True), (4, True, True, False), (2, False, True, True),
                                                 (4, True, False, True), (2, False, False, True)):  # fmt: skip
                scan, launch = whole_launch(m, k, size, aligned=aligned, packed=packed, scans=scans, sm_count=132)
                assert scans or scan is None
                for plan in (scan, launch):
                    if plan is None:
                        continue
                    threads, per_vector = plan.launch.threads, 16 // size
                    assert threads % 32 == 0 and 32 <= threads * plan.launch.rows <= QUANT_MAX_THREADS
                    assert (plan.m - 1) * plan.k + plan.last == m * k and 0 < plan.last <= plan.k
                    assert packed or (plan.m, plan.k) == (m, k)
                    assert not packed or aligned or not plan.launch.vectors
                    held = plan.launch.symbol.rpartition("_")[2]
                    if held.isdecimal():
                        # A whole row in registers, the rest of one that is not all vectors one element a thread.
                        vectors = min(plan.launch.vectors, plan.k // per_vector)
                        assert vectors <= int(held) * threads and plan.k - vectors * per_vector <= threads
                    assert (plan.launch.symbol == SCAN) == (plan is scan)
                if scan is not None:
                    assert 0 < scan.blocks <= 2 * 132 and (scan.blocks - 1) * scan.launch.rows < scan.m
                elif scans:
                    # One block, that sees everything itself.
                    assert launch.m == 1 and launch.launch.rows == 1


@pytest.mark.parametrize(
    ("m", "k", "aligned", "scan", "symbol", "threads", "rows"),
    [
        (1, 4096, True, None, "w8a8_held_1", 512, 1),
        (16, 4096, True, None, "w8a8_held_8", 1024, 1),
        (17, 4096, True, 17, "w8a8_held_1", 256, 34),
        (4096, 4096, True, 256, "w8a8_held_4", 256, 2048),
        (16384, 8192, True, 256, "w8a8_held_4", 256, 16384),
        (33, 4097, True, 34, "w8a8_held_1", 256, 67),
        (33, 4097, False, 34, ANY_ROW, 256, 67),
        (1, 1, True, None, "w8a8_held_1", 32, 1),
        (1, 1, False, None, ANY_ROW, 32, 1),
    ],
)
def test_tensors_are_cut_to_fill_the_device(
    m: int, k: int, aligned: bool, scan: int | None, symbol: str, threads: int, rows: int
) -> None:
    first, plan = whole_launch(m, k, 2, aligned=aligned, packed=True, scans=True, sm_count=132)
    assert (first and first.blocks) == scan
    assert (plan.launch.symbol, plan.launch.threads, plan.m) == (symbol, threads, rows)


# Specification and emission -----------------------------------------------------------------------------------------


def test_zero_points_are_for_int8() -> None:
    for scheme in Scheme:
        assert scheme.targets == ((DType.INT8,) if "azp" in scheme.value else (DType.E4M3, DType.INT8))
        if scheme.azp:
            with pytest.raises(UnsupportedError, match=f"leave out the zero point: {scheme.value[:-4]}"):
                QuantSpec(SM90, DType.BF16, DType.E4M3, scheme)
    with pytest.raises(ValueError, match="median"):
        spec_from_json('{"kernel":"quantize","arch":"sm90","source":"bf16","target":"int8","scheme":"median"}')


@pytest.mark.parametrize("scheme", Scheme)
def test_nothing_global_is_touched_before_the_wait(scheme: Scheme) -> None:
    """All kernels wait first, and in a launch that may overlap the trigger comes before the wait."""
    text = emit.render(QuantSpec(SM90, DType.BF16, DType.INT8, scheme))["kernel.cu"]
    bodies = [text.split(f" {symbol}(")[1] for symbol in quant_symbols(scheme) if "held" not in symbol]
    for body in (text.split("void quantize_held(")[1], *bodies):
        waits = body.index("begin(params);")
        for access in ("magnitude(", "*params.", "params.scale[", "scanned(", "convert(", "partial)["):
            assert access not in body.split("\n}\n")[0] or waits < body.index(access), access
    assert text.count("begin(params);") == 2 + scheme.scans
    assert all(f"w8a8_held_{held}(" in text for held in QUANT_HELD)
