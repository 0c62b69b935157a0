"""Clusters at the edges of a problem, where blocks have less to load than their neighbours and could get ahead."""

from __future__ import annotations

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8.arch import Family
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.runtime.device import arch_of, device

E4M3 = torch.float8_e4m3fn
# Many more tiles of k than a pipeline has stages.
K = 16384
CALLS = 300


@pytest.mark.parametrize("config", ["128x96x128_2x2_pingpong", "64x128x128_2x1_pingpong", "64x32x256_1x2_ws_swap"])
@pytest.mark.parametrize("m", [1, 32, 48, 64, 65, 128, 129, 200])
def test_blocks_of_a_cluster_keep_in_step(config: str, m: int) -> None:
    """The bits of an unclustered kernel, again and again: whatever the blocks' luck, none reads what is overwritten.

    In a cluster of two extents the far corner's blocks do not multicast to each other; where the tiles of some do not
    exist, nothing but the barriers' counts keeps them together.
    """
    if arch_of(device(0)).mainloop(DType.E4M3).family is not Family.HOPPER:
        pytest.skip("these clusters are Hopper's")
    torch.manual_seed(m)
    for n in (48, 96, 104, 288, 2976):
        a = torch.randn(m, K, device="cuda").to(E4M3)
        b = torch.randn(n, K, device="cuda").to(E4M3).t()
        scale_a, scale_b = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")
        expected = cutlass_w8a8.scaled_mm(a, b, scale_a, scale_b, config="128x128x128_2x1_pingpong")
        outs = torch.full((CALLS, m, n), torch.nan, dtype=torch.bfloat16, device="cuda")
        for out in outs:
            cutlass_w8a8.scaled_mm(a, b, scale_a, scale_b, out=out, config=config)
        assert torch.equal(outs, expected.expand_as(outs)), n
