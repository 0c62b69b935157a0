"""Quantisation by rows without a GPU: bits against the closed form, launches, emission, and every error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8 import emit, pipeline, quant_calls
from cutlass_w8a8.arch import ARCHS, SM75, SM90
from cutlass_w8a8.dispatch import quant_launch
from cutlass_w8a8.dispatch.quantize import ANY_ROW
from cutlass_w8a8.dtypes import OUTPUT_DTYPES, DType
from cutlass_w8a8.errors import ArgumentError, UnsupportedError
from cutlass_w8a8.runtime import abi
from cutlass_w8a8.runtime.device import force_arch
from cutlass_w8a8.runtime.quantize import PreparedQuantize
from cutlass_w8a8.spec import QUANT_HELD, QUANT_MAX_THREADS, KernelSpec, QuantSpec, Scheme, spec_from_json
from tests import quant_cases, quant_reference
from tests.harness import Check

E4M3, INT8 = quant_cases.TARGETS
SPEC = QuantSpec(SM90, DType.BF16, DType.E4M3)


def test_bits_are_those_of_the_closed_form() -> None:
    check = Check("quantize", "CPU")
    for case in quant_cases.cases(1 << 14, step=3):
        quant_cases.compare(check, *case, "cpu")
    assert check.failures == [] and check.passed > 1000


def test_reference_agrees_with_torch_on_every_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(E4M3).double()
    finite = ~values.isnan()
    assert torch.equal(quant_reference.e4m3_code(values)[finite], codes[finite])
    between = torch.linspace(-448, 448, 100_001, dtype=torch.float64).float()
    assert torch.equal(quant_reference.e4m3_code(between.double()), between.to(E4M3).view(torch.uint8))


def test_special_rows_are_as_documented() -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[0.0, -0.0, 0.0], [1.0, nan, -2.0], [1.0, -inf, -2.0], [3e38, 1.0, -3e38], [1e-44, 0.0, -1e-45]])
    q, scale = cutlass_w8a8.quantize_per_token(x, E4M3)
    assert q.view(torch.uint8).tolist() == [
        [0, 128, 0], [127] * 3, [0, 127, 128], [126, 0, 254], [0, 0, 128],
    ]  # fmt: skip
    floor = torch.tensor(1 / (448 * 512)).item()
    assert scale[0].item() == floor and scale[1].isnan() and scale[2].item() == inf and scale[4].item() == floor
    q, scale = cutlass_w8a8.quantize_per_token(x, INT8)
    assert q.tolist() == [[0] * 3, [0] * 3, [0] * 3, [127, 0, -127], [0] * 3]
    assert scale[0].item() == 2.0**-126 and scale[1].isnan() and scale[2].item() == inf


@pytest.mark.parametrize("target", quant_cases.TARGETS)
def test_faults_reach_the_product(target: torch.dtype) -> None:
    x = torch.zeros(4, 16)
    x[1, 3], x[2, 5], x[3, 0] = float("nan"), float("inf"), 1.0
    q, scale = cutlass_w8a8.quantize_per_token(x, target)
    weight = torch.ones(16, 8).to(target).t().contiguous().t()
    product = cutlass_w8a8.scaled_mm(q, weight, scale, torch.ones(1), torch.float32)
    assert product.isnan().all(1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("target", quant_cases.TARGETS)
@pytest.mark.parametrize("shape", [(7,), (2, 3, 24), (0, 16), (3, 0), (2, 0, 8)])
def test_leading_dimensions_are_flattened_for_the_scales(shape: tuple[int, ...], target: torch.dtype) -> None:
    x = torch.randn(shape)
    q, scale = cutlass_w8a8.quantize_per_token(x, target)
    m = x[..., 0].numel() if shape[-1] else shape[0]
    assert q.shape == x.shape and q.dtype is target and scale.shape == (m, 1) and scale.dtype is torch.float32
    if x.numel():
        flat, scales = cutlass_w8a8.quantize_per_token(x.view(m, shape[-1]), target)
        assert torch.equal(flat.view(torch.uint8), q.view(m, -1).view(torch.uint8)) and torch.equal(scale, scales)


def test_expanded_rows_may_be_read() -> None:
    q, _ = cutlass_w8a8.quantize_per_token(torch.arange(16.0).expand(5, 16), INT8)
    assert (q == q[0]).all() and q[0, -1] == 127


# Errors -------------------------------------------------------------------------------------------------------------

X = torch.ones(4, 32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"x": [1.0]}, "x is a list"),
        ({"x": X.to_sparse()}, "x has layout torch.sparse_coo"),
        ({"x": X.int()}, "x has dtype torch.int32; accepted: torch.bfloat16, torch.float16, torch.float32"),
        ({"x": X.double()}, "x has dtype torch.float64"),
        ({"x": X[0, 0]}, "x has shape ()"),
        ({"x": X.t()}, "contiguous along its last dimension; pass x.contiguous()"),
        ({"x": torch.ones(4, 3, 32).transpose(0, 1)}, "cannot be viewed as [M, K]; pass x.contiguous()"),
        ({"x": torch.complex(torch.ones(1, 8), torch.ones(1, 8)).conj().imag}, "x is a lazily negated view"),
        ({"dtype": torch.uint8}, "dtype is torch.uint8; accepted: torch.float8_e4m3fn or torch.int8"),
        ({"dtype": "int8"}, "dtype is 'int8'; pass torch.float8_e4m3fn or torch.int8"),
        ({"overlap": "always"}, "overlap is 'always'; accepted: 'launch' or 'none'"),
        ({"overlap": []}, "overlap is []"),
        ({"out": 3}, "out is a int"),
        ({"out": torch.empty(4, 32)}, "out has dtype torch.float32 but dtype is torch.int8"),
        ({"out": torch.empty(4, 16, dtype=INT8)}, "out has shape (4, 16); it must be x's, (4, 32)"),
        ({"out": torch.empty(1, 32, dtype=INT8).expand(4, 32)}, "its rows overlap"),
        ({"out": torch.empty(32, 4, dtype=INT8).t()}, "contiguous along its last dimension"),
        ({"out": torch.empty(4, 32, dtype=INT8, device="meta")}, "out is on meta but x is on cpu"),
        ({"scale": torch.empty(4, 1).half()}, "scale has dtype torch.float16"),
        ({"scale": torch.empty(4)}, "scale has shape (4,); it must be (4, 1)"),
        ({"scale": torch.empty(4, 2)[:, :1]}, "scale has strides (2, 1); it must be contiguous"),
        ({"x": X.clone().requires_grad_()}, "requires a gradient"),
        ({"out": X.view(INT8)[:, :32]}, "out shares memory with x"),
        ({"scale": X.view(-1).view(torch.float32)[:4].view(4, 1)}, "scale shares memory with x"),
    ],
)
def test_errors_say_what_and_what_instead(arguments: dict[str, Any], says: str) -> None:
    call: dict[str, Any] = {"x": X, "dtype": INT8} | arguments
    with pytest.raises(ArgumentError) as caught:
        cutlass_w8a8.quantize_per_token(call.pop("x"), call.pop("dtype"), **call)
    assert says in str(caught.value)


def test_gradients_are_ignored_where_none_are_recorded() -> None:
    x = X.float().requires_grad_()
    with torch.no_grad():
        assert not cutlass_w8a8.quantize_per_token(x, INT8)[1].requires_grad


# Tracing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", quant_cases.TARGETS)
def test_operators_are_well_formed(target: torch.dtype) -> None:
    ops = torch.ops.cutlass_w8a8
    x = torch.randn(2, 3, 40)
    out, scale = torch.zeros(x.shape, dtype=INT8).to(target), torch.zeros(6, 1)
    # The other checks multiply results, which torch cannot for fp8.
    every = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    checks = every if target is INT8 else every[1:3]
    torch.library.opcheck(ops.quantize_per_token, (x, target, "launch"), test_utils=checks)
    torch.library.opcheck(ops.quantize_per_token_out, (out, scale, x), test_utils=checks)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_give_the_same(dynamic: bool) -> None:
    def both(x: torch.Tensor, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return cutlass_w8a8.quantize_per_token(x * 2, INT8, out=out)

    compiled: Callable[..., Any] = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (3, 5):
        x = torch.randn(m, 48)
        for out in (None, torch.empty(m, 48, dtype=INT8)):
            got, expected = compiled(x, out), both(x, None)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            assert out is None or torch.equal(out, expected[0])


def test_meta_tensors_give_shapes() -> None:
    q, scale = cutlass_w8a8.quantize_per_token(torch.empty(2, 3, 8, device="meta"), E4M3)
    assert q.is_meta and q.shape == (2, 3, 8) and q.dtype is E4M3 and scale.shape == (6, 1)


# Launches -----------------------------------------------------------------------------------------------------------


def test_launches_cover_every_row() -> None:
    for m in quant_cases.MS:
        for k in quant_cases.KS:
            for size in (2, 4):
                for aligned in (False, True):
                    plan = quant_launch(m, k, size, aligned, 132)
                    assert plan.threads % 32 == 0 and 32 <= plan.threads * plan.rows <= QUANT_MAX_THREADS
                    assert plan.rows == 1 or plan.threads * plan.rows <= 128
                    assert plan.vectors == (k * size // 16 if aligned else 0)
                    if plan.symbol != ANY_ROW:
                        held = int(plan.symbol.rpartition("_")[2])
                        assert plan.vectors * 16 == k * size and plan.vectors <= held * plan.threads
                    else:
                        assert plan.vectors * 16 != k * size or plan.vectors > QUANT_MAX_THREADS * QUANT_HELD[-1]


@pytest.mark.parametrize(
    ("m", "k", "symbol", "threads", "rows"),
    [
        (1, 4096, "w8a8_held_1", 512, 1),
        (1, 8192, "w8a8_held_1", 1024, 1),
        (1, 16384, "w8a8_held_2", 1024, 1),
        (4096, 4096, "w8a8_held_4", 128, 1),
        (4096, 16384, "w8a8_held_4", 512, 1),
        (4096, 1024, "w8a8_held_2", 64, 2),
        (8192, 1024, "w8a8_held_4", 32, 4),
        (4096, 256, "w8a8_held_1", 32, 4),
        (4096, 28672, "w8a8_held_4", 896, 1),
        (4096, 65536, "w8a8_held_8", 1024, 1),
        (16, 65544, ANY_ROW, 1024, 1),
        (16, 4097, ANY_ROW, 544, 1),
        (16, 1, ANY_ROW, 32, 4),
    ],
)
def test_few_rows_get_many_threads_and_many_rows_get_few(m: int, k: int, symbol: str, threads: int, rows: int) -> None:
    plan = quant_launch(m, k, 2, True, 132)
    assert (plan.symbol, plan.threads, plan.rows) == (symbol, threads, rows)


def test_call_structure_is_packed_in_the_kernels_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    class Kernel:
        function = 11

        class library:  # noqa: N801 - stands for an attribute
            @staticmethod
            def launch(address: int) -> int:
                layout = abi.quant_call(pointers, whole is not None)
                seen.append(layout.unpack((abi.ctypes.c_char * layout.size).from_address(address).raw))
                return 0

    pointers, whole = 3, None
    block: dict[str, Any] = {"strides": (1, 2), "extents": (3, 4, 5), "block": (6, 7), "overlap": True}
    PreparedQuantize(Kernel, None, **block)(21, 22, 23, 24)  # type: ignore[arg-type]
    assert seen.pop() == (11, 21, 22, 23, 24, 1, 2, 3, 4, 5, 1, 6, 7, 1, 0)
    pointers, whole = 5, (8, 9)
    block |= {"pointers": 5, "whole": (8, 9), "blocks": 10}
    PreparedQuantize(Kernel, None, **block)(21, 22, 23, 24, 25, 26)  # type: ignore[arg-type]
    assert seen == [(11, 21, 22, 23, 24, 25, 26, 1, 2, 3, 4, 5, 1, 8, 9, 6, 7, 1, 10)]


def test_another_arch_is_another_kernel() -> None:
    quant_calls._prepared["stale",] = None  # type: ignore[assignment]
    end = force_arch(None, SM75)
    assert not quant_calls._prepared
    end()


# Specification and emission -----------------------------------------------------------------------------------------

EVERY = [
    QuantSpec(arch, x, q, scheme)
    for arch in ARCHS.values()
    for x in OUTPUT_DTYPES
    for scheme in Scheme
    for q in scheme.targets
]


def test_specs_are_read_back_and_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [spec_from_json(spec.to_json()) for spec in EVERY] == EVERY
    assert json.loads(SPEC.to_json()) == {"kernel": "quantize", "arch": "sm90", "source": "bf16", "target": "e4m3"}
    assert len({pipeline.kernel_key(spec) for spec in EVERY}) == len({spec.name for spec in EVERY}) == len(EVERY)


def test_specs_of_other_kinds_are_told_apart() -> None:
    gemm = (
        '{"arch":"sm90","operand":"e4m3","out":"bf16","epilogue":"scaled_token_channel","config":"64x128x128_pingpong"}'
    )
    assert isinstance(spec_from_json(gemm), KernelSpec)
    with pytest.raises(ValueError, match="kernel is 'sort'"):
        spec_from_json('{"kernel":"sort"}')
    for types in ((DType.INT8, DType.INT8), (DType.BF16, DType.BF16)):
        with pytest.raises(UnsupportedError, match="no kernels quantise"):
            QuantSpec(SM90, *types)


@pytest.mark.parametrize("spec", EVERY, ids=lambda spec: spec.name)
def test_text_is_whole(spec: QuantSpec) -> None:
    files = emit.render(spec)
    text = files["kernel.cu"]
    assert f"// {spec.name}\n" in text and spec.command("show") in text
    assert all(part in text for part in spec.formula.split("; "))
    assert all(f"w8a8_held_{held}(" in text for held in QUANT_HELD) and " w8a8_kernel(" in text
    assert (" w8a8_scan(" in text) == spec.scheme.scans
    assert "\t" not in text and "\n\n\n" not in text and "{%" not in text and max(map(len, text.splitlines())) <= 125
    assert ("__nv_cvt_float2_to_fp8x2" in text) == (spec.target is DType.E4M3)


def test_nothing_global_is_touched_before_the_wait() -> None:
    """Both kernels wait first, and in a launch that may overlap the trigger comes before the wait."""
    text = emit.render(SPEC)["kernel.cu"]
    begin = text.split("void begin(")[1].split("}\n")[0]
    assert begin.index("griddepcontrol.launch_dependents") < begin.index("griddepcontrol.wait")
    for body in (text.split("void quantize_held(")[1], text.split(" w8a8_kernel(")[1]):
        waits = body.index("begin(params);")
        assert waits < body.index("magnitude(") and waits < body.index("params.scale[")
