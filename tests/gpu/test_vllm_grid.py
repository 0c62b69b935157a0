"""The grid of vLLM's published tests, on the GPU at hand: each as one test, for kernels take long to compile."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8.vllm import custom_ops as ops
from tests import vllm_grid
from tests.vllm_grid import FP8, INT8, Case

GROUPS: dict[str, list[Case]] = defaultdict(list)
for _case in vllm_grid.gemms():
    # The type, the result's type and the shape.
    GROUPS["-".join(str(_case).split("-")[:3])].append(_case)
SWEPT = [case for dtype in (FP8, INT8) for case in vllm_grid.combinations((1, 32, 32), dtype)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def served(dtype: torch.dtype) -> None:
    support = cutlass_w8a8.is_supported(torch.cuda.get_device_capability(), dtype)
    if not support:
        pytest.skip(support.reason)


@pytest.mark.parametrize("name", GROUPS)
def test_gemm(name: str) -> None:
    served(GROUPS[name][0].dtype)
    for case in GROUPS[name]:
        vllm_grid.run(case, "cuda")


@pytest.mark.parametrize("case", SWEPT, ids=str)
def test_every_m(case: Case) -> None:
    served(case.dtype)
    for each in vllm_grid.sweep(case):
        vllm_grid.run(each, "cuda")


@pytest.mark.parametrize("case", vllm_grid.azp_cases(), ids=str)
def test_azp(case: vllm_grid.AzpCase) -> None:
    vllm_grid.run_azp(case, "cuda")


@pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])
def test_every_device(dtype: torch.dtype) -> None:
    served(dtype)
    for index in range(min(2, torch.cuda.device_count())):
        for case in vllm_grid.combinations(vllm_grid.SQUARE, dtype):
            vllm_grid.run(case, f"cuda:{index}")


def test_operands_that_are_slices() -> None:
    whole_a, whole_b = ((torch.randn(1024, 1024, device="cuda") * 5).round().to(INT8) for _ in range(2))
    a, b = whole_a[:512, :512], whole_b.t()[:512, :512]
    scale = torch.randn(1, 1, device="cuda") / 10
    found = ops.cutlass_scaled_mm(a, b, scale, scale, torch.bfloat16)
    packed = ops.cutlass_scaled_mm(a.contiguous(), b.t().contiguous().t(), scale, scale, torch.bfloat16)
    assert torch.equal(found, packed)
    expected = (scale * a.float()) @ (scale * b.float())
    torch.testing.assert_close(found, expected.bfloat16(), rtol=1e-1, atol=1.0)


@pytest.mark.parametrize(("token", "channel"), [(True, True), (True, False), (False, True), (False, False)])
def test_graph(token: bool, channel: bool) -> None:
    case = Case(*vllm_grid.SQUARE, INT8, token, channel, bias=False)
    a, b, scale_a, scale_b = vllm_grid.inputs(case, "cuda")
    expected = ops.cutlass_scaled_mm(a, b, scale_a, scale_b, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.graph(graph):
        found = ops.cutlass_scaled_mm(a, b, scale_a, scale_b, torch.bfloat16)
    found.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
