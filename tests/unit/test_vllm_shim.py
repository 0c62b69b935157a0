"""vLLM's functions by ours: a part of vLLM's published grid on the CPU, the forms vLLM takes, what is refused."""

from __future__ import annotations

import inspect

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8.vllm import custom_ops as ops
from tests import vllm_grid
from tests.vllm_grid import FP8, INT8, Case

SMALL = ((1, 256, 128), (16, 256, 496), (16, 100, 200), (33, 255, 513))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])
def test_gemm(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    for out_dtype in (torch.bfloat16, torch.float16):
        for case in vllm_grid.combinations(shape, dtype, out_dtype):
            vllm_grid.run(case, "cpu")


@pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])
def test_many_m(dtype: torch.dtype) -> None:
    for number, case in enumerate(vllm_grid.combinations((1, 32, 32), dtype)):
        for each in list(vllm_grid.sweep(case))[number::32]:
            vllm_grid.run(each, "cpu")


def test_azp() -> None:
    for case in vllm_grid.azp_cases():
        vllm_grid.run_azp(case, "cpu")


def test_the_grid_is_whole() -> None:
    assert len(vllm_grid.gemms()) == 2 * (19 + 6 + 1) * 8 and len(vllm_grid.azp_cases()) == 216
    assert len(list(vllm_grid.sweep(vllm_grid.gemms()[0]))) == 3 * 127
    kernels = vllm_grid.plan((9, 0), 132, None)
    assert len(kernels) == len(set(kernels)) > 16


def test_signatures_are_vllms() -> None:
    told = {
        "cutlass_scaled_mm": "a b scale_a scale_b out_dtype bias=None",
        "cutlass_scaled_mm_azp": "a b scale_a scale_b out_dtype azp_adj azp=None bias=None",
        "cutlass_scaled_mm_supports_fp8": "cuda_device_capability",
        "cutlass_scaled_mm_supports_block_fp8": "cuda_device_capability",
        "cutlass_group_gemm_supported": "cuda_device_capability",
        "scaled_int8_quant": "input scale=None azp=None symmetric=True",
        "scaled_fp8_quant": "input scale=None num_token_padding=None scale_ub=None use_per_token_if_dynamic=False "
        "output=None group_shape=None",
    }
    for name, words in told.items():
        parameters = inspect.signature(getattr(ops, name)).parameters.values()
        found = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
        assert found == words.split()
    assert set(ops.__all__) == set(told)
    assert cutlass_w8a8.cutlass_scaled_mm is ops.cutlass_scaled_mm
    assert cutlass_w8a8.cutlass_scaled_mm_azp is ops.cutlass_scaled_mm_azp


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    return vllm_grid.inputs(Case(m, n, k, INT8, token=True, channel=True, bias=True), "cpu")


@pytest.mark.parametrize("n", [32, 20, 1], ids="N{}".format)
@pytest.mark.parametrize("k", [64, 24], ids="K{}".format)
def test_forms_that_vllm_takes(n: int, k: int) -> None:
    a, b, scale_a, scale_b, bias = operands(6, n, k)
    expected = ops.cutlass_scaled_mm(a, b, scale_a, scale_b, torch.bfloat16, bias)
    forms = (a.view(2, 3, k), b, scale_a.view(2, 3, 1), scale_b.view(n, 1), torch.bfloat16, bias.view(1, n))
    assert torch.equal(ops.cutlass_scaled_mm(*forms), expected.view(2, 3, n))
    one = ops.cutlass_scaled_mm(a[0], b, scale_a[0], scale_b, torch.bfloat16, bias)
    assert one.shape == (n,) and torch.equal(one, expected[0])
    azp = torch.arange(6, dtype=torch.int32)
    column_sums = b.sum(0, dtype=torch.int32)
    with_azp = ops.cutlass_scaled_mm_azp(a, b, scale_a, scale_b, torch.float16, column_sums, azp)
    assert torch.equal(with_azp[0], ops.cutlass_scaled_mm(a, b, scale_a, scale_b, torch.float16)[0])
    again = ops.cutlass_scaled_mm_azp(
        a.view(2, 3, k), b, scale_a, scale_b, torch.float16, column_sums.view(1, n), azp.view(2, 3, 1)
    )
    assert torch.equal(again.view(6, n), with_azp)


@pytest.mark.parametrize("n", [32, 20], ids="N{}".format)
def test_compiled_in_one_graph_for_every_m(n: int) -> None:
    compiled = torch.compile(ops.cutlass_scaled_mm, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (6, 9):
        call = operands(m, n, 48)
        arguments = (*call[:4], torch.bfloat16, call[4])
        assert torch.equal(compiled(*arguments), ops.cutlass_scaled_mm(*arguments))


def test_what_is_refused() -> None:
    a, b, scale_a, scale_b, bias = operands(6, 256, 256)
    for blocks in ({"scale_a": torch.ones(6, 2)}, {"scale_b": torch.ones(2, 2)}):
        scales = {"scale_a": scale_a, "scale_b": scale_b} | blocks
        with pytest.raises(cutlass_w8a8.UnsupportedError, match=f"{next(iter(blocks))} .* each block of 128"):
            ops.cutlass_scaled_mm(a, b, **scales, out_dtype=torch.bfloat16)
    for wrong, message in (
        ((3, b, scale_a, scale_b, torch.bfloat16), "a is a int"),
        ((a, b, scale_a[:3], scale_b, torch.bfloat16), "scale_a has shape"),
        ((a, b, scale_a, scale_b, torch.bfloat16, bias[:8]), "bias has shape"),
        ((a, b, scale_a, scale_b, torch.bfloat16, bias.half()), "bias has dtype"),
        ((a, b[:16], scale_a, scale_b, torch.bfloat16), "differs from b's"),
        ((a, b.t().contiguous().t().contiguous(), scale_a, scale_b, torch.bfloat16), "b is not contiguous along K"),
        ((a.float(), b, scale_a, scale_b, torch.bfloat16), "a has dtype"),
        ((torch.tensor(1, dtype=INT8), b, scale_a, scale_b, torch.bfloat16), "a has shape"),
    ):
        with pytest.raises(cutlass_w8a8.ArgumentError, match=message):
            ops.cutlass_scaled_mm(*wrong)
    with pytest.raises(cutlass_w8a8.ArgumentError, match="azp_adj is None"):
        ops.cutlass_scaled_mm_azp(a, b, scale_a, scale_b, torch.bfloat16, None)


def test_gates_tell_what_there_is() -> None:
    served = {capability for capability in range(-1, 140) if ops.cutlass_scaled_mm_supports_fp8(capability)}
    assert {89, 90, 100, 103, 110, 120, 121} <= served and not served & {-1, 0, 70, 75, 80, 86, 87}
    assert not any(ops.cutlass_scaled_mm_supports_block_fp8(x) or ops.cutlass_group_gemm_supported(x) for x in served)


def test_a_gate_is_asked_in_words_it_knows() -> None:
    with pytest.raises(cutlass_w8a8.ArgumentError, match="such as 90 for"):
        ops.cutlass_scaled_mm_supports_fp8((9, 0))


def test_empty() -> None:
    a, b, scale_a, scale_b, _ = operands(0, 16, 32)
    assert ops.cutlass_scaled_mm(a, b, scale_a, scale_b, torch.bfloat16).shape == (0, 16)
    assert ops.cutlass_scaled_mm(a[:, :0], b[:0], scale_a, scale_b, torch.bfloat16).shape == (0, 16)
