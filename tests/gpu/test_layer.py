"""Layers of a model on a GPU: what they launch, graphs, moves between devices."""

from __future__ import annotations

import copy

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8.bench.launched import launched
from cutlass_w8a8.nn import W8A8Config, W8A8Linear

E4M3 = torch.float8_e4m3fn


def layers(config: W8A8Config, k: int = 512, n: int = 256) -> tuple[W8A8Linear, W8A8Linear]:
    """The same layer on the CPU and on the GPU."""
    if not cutlass_w8a8.is_supported(torch.cuda.get_device_capability(), config.dtype):
        pytest.skip(f"no {config.dtype} kernels for this GPU")
    torch.manual_seed(0)
    cpu = W8A8Linear.from_linear(torch.nn.Linear(k, n, dtype=torch.bfloat16), config)
    return cpu, copy.deepcopy(cpu).cuda()


def inputs(m: int, k: int = 512) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
@pytest.mark.parametrize(("k", "n"), [(512, 256), (500, 250)])
def test_a_layer_computes_what_it_does_on_the_cpu(dtype: torch.dtype, k: int, n: int) -> None:
    cpu, gpu = layers(W8A8Config(dtype), k, n)
    for m in (1, 7, 100):
        x = inputs(m, k)
        got, expected = gpu(x.cuda()).cpu(), cpu(x)
        if dtype is torch.int8:
            assert torch.equal(got, expected)
        else:
            torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_a_call_is_two_kernels(dtype: torch.dtype) -> None:
    _, gpu = layers(W8A8Config(dtype))
    x = inputs(16).cuda()
    gpu(x)
    names = launched(lambda: gpu(x))
    # No copy, no fill, and nothing of torch's.
    assert len(names) == 2 and all(name.startswith("w8a8_") for name in names), names


@torch.no_grad()
@pytest.mark.parametrize("config", [W8A8Config(), W8A8Config(E4M3), W8A8Config(symmetric=False)], ids=str)
def test_a_layer_is_captured_in_a_graph(config: W8A8Config) -> None:
    _, gpu = layers(config)
    x = inputs(16).cuda()
    gpu(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gpu(x)
    x.copy_(inputs(16).flip(0))
    graph.replay()
    assert torch.equal(y, gpu(x))


@torch.no_grad()
def test_moves_and_states_find_their_kernels_again() -> None:
    cpu, gpu = layers(W8A8Config())
    x = inputs(16)
    before = gpu(x.cuda())
    assert torch.equal(gpu.cpu()(x), cpu(x))
    assert torch.equal(gpu.cuda()(x.cuda()), before)
    gpu.load_state_dict(layers(W8A8Config())[0].state_dict())
    assert torch.equal(gpu(x.cuda()), before)
    assert gpu.half()(x.cuda()).dtype is torch.float16
