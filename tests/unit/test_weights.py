"""Preparation of weights: quantisation, fused shards, zero points, padding."""

from __future__ import annotations

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8 import ArgumentError
from cutlass_w8a8.weight_checks import check_extents, padded
from cutlass_w8a8.weights import (
    column_sums,
    expand_scales,
    merge_input_ranges,
    merge_input_scales,
    pack,
    quantize_weight,
    requantize,
)

E4M3 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, E4M3: 448.0}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_quantised_weights_reach_the_largest_value_and_are_half_a_step_off(
    dtype: torch.dtype, granularity: str
) -> None:
    w = normal(24, 40) * torch.logspace(-3, 3, 24).unsqueeze(1)
    q, scale = quantize_weight(w, dtype, granularity)
    assert q.dtype is dtype and q.shape == w.shape
    assert scale.dtype is torch.float32 and scale.shape == ((24,) if granularity == "channel" else (1,))
    largest = q.float().abs().amax(1)
    assert bool((largest == LARGEST[dtype]).all()) if granularity == "channel" else largest.max() == LARGEST[dtype]
    step = scale.double().view(-1, 1)
    error = (q.double() * step - w.double()).abs()
    bound = step / 2 if dtype is torch.int8 else torch.maximum(w.double().abs() / 16, step * 2**-10)
    assert bool((error <= bound * 1.00001).all())


def test_what_cannot_be_quantised_is_refused() -> None:
    bad = normal(4, 8)
    bad[2, 3] = float("inf")
    with pytest.raises(ArgumentError, match=r"1 of its 4 channels \(the first is 2\)"):
        quantize_weight(bad, torch.int8)
    with pytest.raises(ArgumentError, match="1 of its 4 channels"):
        quantize_weight(bad, torch.int8, "tensor")
    with pytest.raises(ArgumentError, match=r"shape \(8,\)"):
        quantize_weight(normal(8), torch.int8)
    with pytest.raises(ArgumentError, match="granularity is 'block'"):
        quantize_weight(normal(4, 8), torch.int8, "block")
    with pytest.raises(ArgumentError, match=r"dtype is torch\.int32"):
        quantize_weight(normal(4, 8), torch.int32)
    with pytest.raises(ArgumentError, match=r"weight\.float"):
        quantize_weight(normal(4, 8).double(), torch.int8)


def test_scales_of_shards_are_spread_over_their_channels() -> None:
    assert expand_scales(torch.tensor([[0.5], [2.0], [3.0]]), (2, 1, 3)).tolist() == [0.5, 0.5, 2.0, 3.0, 3.0, 3.0]
    with pytest.raises(ArgumentError, match="2 values and logical_widths 3"):
        expand_scales(torch.ones(2), (1, 2, 3))


@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_shards_are_brought_to_one_scale(dtype: torch.dtype) -> None:
    parts = [quantize_weight(normal(n, 32, seed=n) * n, dtype, "tensor") for n in (3, 8, 5)]
    q = torch.cat([part[0].view(torch.int8) for part in parts]).view(dtype)
    scales = torch.cat([part[1] for part in parts])
    merged, scale = requantize(q, scales, (3, 8, 5))
    assert scale.shape == (1,) and scale == scales.max()
    # The shard whose scale it is keeps its bits.
    assert torch.equal(merged[3:11].view(torch.int8), q[3:11].view(torch.int8))
    before = q.double() * expand_scales(scales, (3, 8, 5)).double().unsqueeze(1)
    error = (merged.double() * scale.double() - before).abs()
    bound = scale.double() / 2 if dtype is torch.int8 else torch.maximum(before.abs() / 16, scale.double() * 2**-10)
    assert bool((error <= bound * 1.00001).all())
    with pytest.raises(ArgumentError, match="add up to 15, but weight has 16"):
        requantize(q, scales, (3, 8, 4))
    with pytest.raises(ArgumentError, match=r"scales hold 0\.0"):
        requantize(q, scales * torch.tensor([1, 0, 1]), (3, 8, 5))


def test_symmetric_input_scales_merge_to_the_largest() -> None:
    assert merge_input_scales([torch.tensor(0.25), torch.tensor([[0.5]])]).tolist() == [0.5]
    for bad in ([], [torch.tensor(float("nan"))], [torch.tensor(-1.0)]):
        with pytest.raises(ArgumentError, match="input scales"):
            merge_input_scales(bad)


def test_a_range_merged_with_itself_or_a_part_of_it_stays() -> None:
    for azp in range(-128, 128):
        for scale in (1e-6, 0.013, 3.0):
            s, z = torch.tensor([scale]), torch.tensor([azp])
            assert merge_input_ranges([s, s], [z, z]) == (s, z.int())
            assert merge_input_ranges([s, s / 4], [z, z]) == (s, z.int())


def test_merged_ranges_hold_both_and_the_zero_point_is_rounded() -> None:
    scales, azps = torch.tensor([0.31, 0.77]), torch.tensor([25, -90])
    scale, azp = merge_input_ranges(scales, azps)
    low = min(0.31 * (-128 - 25), 0.77 * (-128 + 90))
    high = max(0.31 * (127 - 25), 0.77 * (127 + 90))
    assert scale.item() == pytest.approx((high - low) / 255, rel=1e-6)
    exact = -128 - low / ((high - low) / 255)
    assert azp.dtype is torch.int32 and azp.item() == round(exact)
    # Truncation towards zero, which vLLM does, gives the other neighbour here.
    assert int(exact) != azp.item()
    with pytest.raises(ArgumentError, match="zero point is 128"):
        merge_input_ranges(scales, torch.tensor([0, 128]))
    with pytest.raises(ArgumentError, match=r"zero point is 0\.5"):
        merge_input_ranges(scales, torch.tensor([0, 0.5]))
    with pytest.raises(ArgumentError, match="2 input scales but 1 zero points"):
        merge_input_ranges(scales, torch.tensor([0]))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (8, 16), (3, 17), (24, 48), (100, 200)])
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
@pytest.mark.parametrize("per_channel", [False, True])
def test_padding_changes_no_result(n: int, k: int, dtype: torch.dtype, per_channel: bool) -> None:
    q, scale = quantize_weight(normal(n, k), dtype, "channel" if per_channel else "tensor")
    bias = normal(n, seed=1).bfloat16()
    packed = pack(q, scale, bias)
    wide = padded(n, k)
    assert (packed.n, packed.k) == (n, k) and packed.weight.shape == wide
    assert wide[0] % 8 == 0 and wide[1] % 16 == 0 and wide[0] - n < 8 and wide[1] - k < 16
    assert packed.b.stride() == (1, wide[1])
    assert torch.equal(packed.weight[:n, :k].view(torch.int8), q.view(torch.int8))
    assert packed.weight.float().abs().sum() == q.float().abs().sum()
    a, scale_a = cutlass_w8a8.quantize_per_token(normal(5, k, seed=2), dtype)
    wide_a = torch.zeros(5, wide[1], dtype=torch.int8)
    wide_a[:, :k] = a.view(torch.int8)
    assert packed.bias is not None
    got = cutlass_w8a8.scaled_mm(wide_a.view(dtype), packed.b, scale_a, packed.scale, bias=packed.bias)
    product = (a.double() @ q.double().t()).float()
    expected = torch.addcmul(bias.double(), scale_a.double(), (scale * product).double()).float().bfloat16()
    assert torch.equal(got[:, :n], expected)
    assert not got[:, n:].any()


def test_zero_points_are_left_apart_per_token_and_multiplied_in_per_tensor() -> None:
    q = integers(13, 40)
    scale = torch.rand(13) + 0.5
    sums = q.long().sum(1)
    assert torch.equal(column_sums(q).long(), sums)
    token = pack(q, scale, zero_points=True)
    tensor = pack(q, scale, zero_points=True, azp=torch.tensor([-77], dtype=torch.int8))
    assert token.azp_adj is not None and tensor.azp_adj is not None
    assert torch.equal(token.azp_adj[:13].long(), sums) and torch.equal(tensor.azp_adj[:13].long(), sums * -77)
    assert token.azp_adj.shape == (16,) and not token.azp_adj[13:].any() and not tensor.azp_adj[13:].any()
    assert pack(q, scale).azp_adj is None


def test_the_largest_adjustment_fits_int32() -> None:
    k = 65792
    low = torch.full((1, k), -128, dtype=torch.int8)
    packed = pack(low, torch.ones(1), zero_points=True, azp=torch.tensor(-128))
    assert packed.azp_adj is not None and packed.azp_adj[0].item() == 128 * 128 * k


def test_what_does_not_fit_is_refused() -> None:
    q, scale = integers(8, 16), torch.ones(8)
    for match, call in {
        r"shape \(8,\)": lambda: pack(q[:, 0], scale),
        "3 values": lambda: pack(q, scale[:3]),
        r"dtype torch\.float64": lambda: pack(q, scale.double()),
        r"bias has shape \(4,\)": lambda: pack(q, scale, torch.ones(4)),
        "only int8 has zero points": lambda: pack(q.float().to(E4M3), scale, zero_points=True),
        "pass both or neither": lambda: pack(q, scale, azp=torch.tensor(3)),
        "zero point is 200": lambda: pack(q, scale, zero_points=True, azp=torch.tensor(200)),
        r"weight is torch\.float32": lambda: pack(q.float(), scale),
        "beyond K=131071": lambda: check_extents(8, 131072, torch.int8, False),
        "beyond K=65793": lambda: check_extents(8, 65800, torch.int8, True),
        "N=0": lambda: check_extents(0, 16, torch.int8, False),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            call()
