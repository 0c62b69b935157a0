"""What a call may get wrong: each mistake is refused before anything runs, with a message that helps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8 import ArgumentError
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.request import MAX_K_INT8, MAX_K_INT8_AZP, check, misaligned

M, N, K = 5, 24, 32


def operands(m: int = M, n: int = N, k: int = K, dtype: torch.dtype = torch.int8) -> dict[str, Any]:
    """A call that is right in every respect."""
    return {
        "a": torch.zeros(m, k).to(dtype),
        "b": torch.zeros(n, k).to(dtype).t(),
        "scale_a": torch.ones(m, 1),
        "scale_b": torch.ones(1, n),
        "out_dtype": torch.bfloat16,
        "bias": None,
        "azp_adj": None,
        "azp": None,
        "out": None,
    }


# (changed arguments, what the message must say: the argument, the offence, and the remedy)
MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({"a": torch.zeros(M, K)}, ["a has dtype torch.float32", "torch.int8", "quantise"]),
    ({"a": torch.zeros(M, K).to(torch.float8_e5m2)}, ["float8_e5m2", "float8_e4m3fn"]),
    ({"b": torch.zeros(N, K).to(torch.float8_e4m3fn).t()}, ["b has dtype", "alike"]),
    ({"a": torch.zeros(K, dtype=torch.int8)}, ["a has shape (32,)", "[..., M, K]"]),
    ({"b": torch.zeros(1, K, N, dtype=torch.int8)}, ["b has shape (1, 32, 24)", "[K, N]"]),
    ({"a": torch.zeros(M, K + 16, dtype=torch.int8)}, ["K=48 differs from", "K=32"]),
    ({"b": torch.zeros(K, N, dtype=torch.int8)}, ["b is not contiguous along K", "b.t().contiguous().t()"]),
    ({"a": torch.zeros(K, M, dtype=torch.int8).t()}, ["a is not contiguous along K", "a.contiguous()"]),
    ({"a": torch.zeros(1, K, dtype=torch.int8).expand(M, K)}, ["a has leading stride 0", "overlap"]),
    ({"a": torch.zeros(M, K + 8, dtype=torch.int8)[:, :K]}, ["a has leading stride 40", "multiple of 16"]),
    ({"b": torch.zeros(N, K + 4, dtype=torch.int8)[:, :K].t()}, ["b has leading stride 36", "multiple of 16"]),
    ({"a": torch.zeros(4, 3, K, dtype=torch.int8).transpose(0, 1)}, ["cannot be viewed", "a.contiguous()"]),
    ({"scale_a": torch.ones(M, 1, dtype=torch.float64)}, ["scale_a has dtype torch.float64", "float32"]),
    ({"scale_a": torch.ones(M - 1, 1)}, ["scale_a has shape (4, 1)", "M=5", "one for each row"]),
    ({"scale_a": torch.ones(1, M)}, ["scale_a has shape (1, 5)", "(M, 1)"]),
    ({"scale_a": torch.ones(2 * M)[::2]}, ["scale_a has strides (2,)", "contiguous"]),
    ({"scale_b": torch.ones(N + 1)}, ["scale_b has shape (25,)", "N=24", "one for each column"]),
    ({"scale_b": torch.ones(N).to(torch.bfloat16)}, ["scale_b has dtype torch.bfloat16"]),
    ({"bias": torch.ones(N)}, ["bias has dtype torch.float32", "torch.bfloat16"]),
    ({"bias": torch.ones(N + 1, dtype=torch.bfloat16)}, ["bias has shape (25,)", "(N,)"]),
    ({"bias": torch.ones(2 * N, dtype=torch.bfloat16)[::2]}, ["bias has strides (2,)"]),
    ({"azp": torch.ones(M, dtype=torch.int32)}, ["azp is given without azp_adj"]),
    ({"azp_adj": torch.ones(N)}, ["azp_adj has dtype torch.float32", "torch.int32"]),
    ({"azp_adj": torch.ones(N - 8, dtype=torch.int32)}, ["azp_adj has shape (16,)"]),
    (
        {"azp_adj": torch.ones(N, dtype=torch.int32), "azp": torch.ones(1, dtype=torch.int32)},
        ["azp has one value for M=5", "azp_adj = azp *"],
    ),
    (
        {"azp_adj": torch.ones(N, dtype=torch.int32), "azp": torch.ones(M, dtype=torch.int64)},
        ["azp has dtype torch.int64"],
    ),
    ({"out_dtype": torch.float64}, ["out_dtype is torch.float64", "torch.bfloat16"]),
    ({"out": torch.zeros(M, N)}, ["out has dtype torch.float32 but out_dtype is torch.bfloat16"]),
    ({"out": torch.zeros(M, N + 8, dtype=torch.bfloat16)}, ["out has shape (5, 32)", "(5, 24)"]),
    ({"out": torch.zeros(N, M, dtype=torch.bfloat16).t()}, ["out"]),
    ({"out": torch.zeros(M, N + 4, dtype=torch.bfloat16)[:, :N]}, ["out has leading stride 28", "16 bytes"]),
    ({"out": torch.zeros(1, N, dtype=torch.bfloat16).expand(M, N)}, ["out"]),
    ({"b": torch.zeros(N, K, dtype=torch.int8, device="meta").t()}, ["b is on meta but a is on cpu", "b.to("]),
    ({"scale_a": torch.ones(M, 1, device="meta")}, ["scale_a is on meta"]),
    ({"bias": torch.ones(N, dtype=torch.bfloat16, device="meta")}, ["bias is on meta"]),
]


@pytest.mark.parametrize(
    ("change", "says"), MISTAKES, ids=lambda value: str(value)[:40] if isinstance(value, list) else ""
)
def test_a_mistake_is_named(change: dict[str, Any], says: list[str]) -> None:
    arguments = operands() | change
    with pytest.raises(ArgumentError) as caught:
        check(**arguments)
    for words in says:
        assert words in str(caught.value)


@pytest.mark.parametrize(("n", "k", "says"), [(N, 40, r"K is 40.*pad.*to 48"), (20, K, r"N is 20.*pad.*to 24")])
def test_extents_that_kernels_cannot_take(n: int, k: int, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        check(**operands(n=n, k=k))


def test_fp8_with_a_zero_point_is_refused() -> None:
    arguments = operands(dtype=torch.float8_e4m3fn) | {"azp_adj": torch.ones(N, dtype=torch.int32)}
    with pytest.raises(ArgumentError, match="zero point needs int8"):
        check(**arguments)


@pytest.mark.parametrize(("azp", "limit"), [(False, MAX_K_INT8), (True, MAX_K_INT8_AZP)])
def test_int8_sums_that_could_overflow_are_refused(azp: bool, limit: int) -> None:
    def arguments(k: int) -> dict[str, Any]:
        # Shapes alone matter: meta tensors spend no memory.
        made = {
            "a": torch.empty(1, k, dtype=torch.int8, device="meta"),
            "b": torch.empty(8, k, dtype=torch.int8, device="meta").t(),
            "scale_a": torch.empty(1, device="meta"),
            "scale_b": torch.empty(1, device="meta"),
            "azp_adj": torch.empty(8, dtype=torch.int32, device="meta") if azp else None,
        }
        return operands() | made

    assert check(**arguments(limit // 16 * 16)).k == limit // 16 * 16
    with pytest.raises(ArgumentError, match=f"beyond K={limit}"):
        check(**arguments(limit // 16 * 16 + 16))


def test_the_overflow_limits_are_exact() -> None:
    assert MAX_K_INT8 * 128 * 128 <= 2**31 - 1 < (MAX_K_INT8 + 1) * 128 * 128
    assert MAX_K_INT8_AZP * 255 * 128 <= 2**31 - 1 < (MAX_K_INT8_AZP + 1) * 255 * 128


def test_strides_are_taken_as_they_are() -> None:
    arguments = operands()
    arguments["a"] = torch.zeros(M, K + 64, dtype=torch.int8)[:, 16 : 16 + K]
    arguments["b"] = torch.zeros(N, K + 128, dtype=torch.int8)[:, :K].t()
    arguments["out"] = torch.zeros(M, N + 40, dtype=torch.bfloat16)[:, :N]
    request = check(**arguments)
    assert (request.m, request.n, request.k) == (M, N, K)
    assert (request.lda, request.ldb, request.ldd) == (K + 64, K + 128, N + 40)


def test_leading_dimensions_are_flattened() -> None:
    arguments = operands(m=6)
    arguments["a"] = torch.zeros(2, 3, K, dtype=torch.int8)
    request = check(**arguments)
    assert (request.m, request.shape) == (6, (2, 3, N))


@pytest.mark.parametrize(
    ("m", "shape_a", "shape_b", "epilogue"),
    [
        (M, (), (), "scaled_tensor_tensor"),
        (M, (1,), (1,), "scaled_tensor_tensor"),
        (M, (1, 1), (1, 1), "scaled_tensor_tensor"),
        (M, (M,), (N,), "scaled_token_channel"),
        (M, (M, 1), (1, N), "scaled_token_channel"),
        (M, (M, 1), (N, 1), "scaled_token_channel"),
        (1, (1, 1), (), "scaled_token_tensor"),  # one row of a per-token scale
        (1, (1,), (), "scaled_tensor_tensor"),
    ],
)
def test_scale_shapes_decide_the_granularity(
    m: int, shape_a: tuple[int, ...], shape_b: tuple[int, ...], epilogue: str
) -> None:
    arguments = operands(m=m) | {"scale_a": torch.ones(shape_a), "scale_b": torch.ones(shape_b)}
    assert check(**arguments).epilogue == EpilogueSpec.parse(epilogue)


def test_misaligned_pointers_are_named() -> None:
    error = misaligned([("a", 32), ("b", 40)])
    assert "b starts at an address that is 8 bytes past" in str(error)


@pytest.mark.parametrize(("m", "n"), [(0, N), (M, 0), (0, 0)])
def test_an_empty_result_is_empty(m: int, n: int) -> None:
    arguments = operands(m=m, n=n)
    result = cutlass_w8a8.scaled_mm(
        arguments["a"], arguments["b"], torch.ones(()), torch.ones(()), bias=torch.ones(n, dtype=torch.bfloat16)
    )
    assert result.shape == (m, n)
    assert result.dtype is torch.bfloat16


def test_an_empty_k_gives_the_formula() -> None:
    bias = torch.arange(N, dtype=torch.bfloat16)
    result = cutlass_w8a8.scaled_mm(
        torch.empty(M, 0, dtype=torch.int8),
        torch.empty(0, N, dtype=torch.int8),
        torch.ones(M, 1),
        torch.ones(N),
        bias=bias,
    )
    assert torch.equal(result, bias.expand(M, N))


def test_batched_result_and_out() -> None:
    a = torch.randint(-128, 128, (2, 3, K), dtype=torch.int8)
    b = torch.randint(-128, 128, (N, K), dtype=torch.int8).t()
    expected = (a.double() @ b.double()).float()
    result = cutlass_w8a8.scaled_mm(a, b, torch.ones(()), torch.ones(()), torch.float32)
    assert torch.equal(result, expected)
    out = torch.full((2, 3, N), torch.nan)
    assert cutlass_w8a8.scaled_mm(a, b, torch.ones(()), torch.ones(()), torch.float32, out=out) is out
    assert torch.equal(out, expected)


# (positional arguments after a and b, keyword arguments, what the message must say)
NONSENSE: list[tuple[list[Any], dict[str, Any], str]] = [
    ([0.1, torch.ones(())], {}, r"scale_a is a float; pass torch.tensor\(0.1\)"),
    ([torch.ones(()), None], {}, "scale_b is a NoneType"),
    ([torch.ones(()), torch.ones(()), "bf16"], {}, "out_dtype is 'bf16'"),
    ([torch.ones(()), torch.ones(())], {"config": 3}, "config is a int"),
    ([torch.ones(()), torch.ones(())], {"config": {}}, "config is a dict"),
    ([torch.ones(N).to_sparse(), torch.ones(())], {}, "scale_a has layout torch.sparse_coo"),
    ([torch.ones(()), torch.ones(N, requires_grad=True)], {}, "requires a gradient"),
    ([torch.ones(()), torch._neg_view(torch.ones(N))], {}, "scale_b is a lazily negated view"),
]


@pytest.mark.parametrize(("arguments", "options", "says"), NONSENSE)
def test_nonsense_is_named(arguments: list[Any], options: dict[str, Any], says: str) -> None:
    good = operands()
    with pytest.raises(ArgumentError, match=says):
        cutlass_w8a8.scaled_mm(good["a"], good["b"], *arguments, **options)


def test_an_array_is_no_tensor() -> None:
    good = operands()
    with pytest.raises(ArgumentError, match="a is a ndarray"):
        cutlass_w8a8.scaled_mm(good["a"].numpy(), good["b"], torch.ones(()), torch.ones(()))  # type: ignore[arg-type]


def test_a_config_is_read_on_the_cpu_too() -> None:
    good = operands()
    with pytest.raises(cutlass_w8a8.ConfigError, match="pingpng"):
        cutlass_w8a8.scaled_mm(good["a"], good["b"], torch.ones(()), torch.ones(()), config="128x128x128_pingpng")


@pytest.mark.parametrize("capability", ["H100", 90, (9,), (9, "0")])
def test_a_capability_is_a_pair_of_integers(capability: Any) -> None:
    with pytest.raises(ArgumentError, match=r"pass \(major, minor\)"):
        cutlass_w8a8.is_supported(capability, torch.int8)


def test_gradients_may_be_off() -> None:
    good = operands()
    with torch.no_grad():
        result = cutlass_w8a8.scaled_mm(good["a"], good["b"], torch.ones(()), torch.ones(N, requires_grad=True))
    assert not result.requires_grad


def test_meta_tensors_give_shapes() -> None:
    good = operands()
    meta = [tensor.to("meta") for tensor in (good["a"], good["b"], good["scale_a"], good["scale_b"])]
    result = cutlass_w8a8.scaled_mm(*meta)
    assert (result.shape, result.device.type, result.dtype) == ((M, N), "meta", torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"out_dtype is torch.float64"):
        cutlass_w8a8.scaled_mm(*meta, torch.float64)
    bad = operands(n=20)
    with pytest.raises(ArgumentError, match="N is 20"):
        cutlass_w8a8.scaled_mm(*(bad[name].to("meta") for name in ("a", "b", "scale_a", "scale_b")))


def test_compiled_calls_refuse_what_eager_ones_do() -> None:
    compiled = torch.compile(cutlass_w8a8.scaled_mm, fullgraph=True, backend="aot_eager", dynamic=True)
    good = operands()
    first = good["a"], good["b"], good["scale_a"], good["scale_b"]
    assert compiled(*first).shape == (M, N)
    with pytest.raises(Exception, match="requires a gradient"):
        compiled(*first[:3], torch.ones(1, N, requires_grad=True))
    with pytest.raises(Exception, match=r"out has dtype torch.float16 but out_dtype is torch.bfloat16"):
        compiled(*first, out=torch.zeros(M, N, dtype=torch.float16))


def test_a_parameter_is_an_operand_like_any_other() -> None:
    good = operands()
    weight = torch.nn.Parameter(good["a"], requires_grad=False)
    with pytest.raises(ArgumentError, match="out has dtype"):
        cutlass_w8a8.scaled_mm(weight, good["b"], torch.ones(()), torch.ones(()), out=torch.zeros(M, N))
    assert cutlass_w8a8.scaled_mm(weight, good["b"], torch.ones(()), torch.ones(())).shape == (M, N)
