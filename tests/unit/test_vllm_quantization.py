"""vLLM's quantisation functions by ours: its formulas, its references within its tests' tolerances, the extremes."""

from __future__ import annotations

import math

import pytest
import torch

from cutlass_w8a8 import ArgumentError
from cutlass_w8a8.vllm.custom_ops import scaled_fp8_quant, scaled_int8_quant

FP8 = torch.float8_e4m3fn
TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda t: str(t)[6:])
SHAPES = pytest.mark.parametrize("shape", [(1, 17), (7, 1024), (7, 1026), (64, 1025)], ids=str)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(FP8).float()


@TYPES
@SHAPES
def test_int8_by_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.rand(shape) * 1000).to(dtype)
    values, scales, azp = scaled_int8_quant(x)
    expected = x.float().abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(scales, expected)
    assert azp is None and values.dtype is torch.int8
    torch.testing.assert_close(values, (x / expected).round().clamp(-128, 127).to(torch.int8), atol=1, rtol=0)


@TYPES
@SHAPES
def test_int8_by_rows_with_zero_points(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.rand(shape) * 1000 - 300).to(dtype)
    values, scales, azp = scaled_int8_quant(x, symmetric=False)
    low, high = x.float().amin(1, keepdim=True), x.float().amax(1, keepdim=True)
    expected = (high - low) / 255
    points = (-128 - low / expected).round().to(torch.int32)
    torch.testing.assert_close(scales, expected)
    assert torch.equal(azp, points)
    whole = ((x.float() * (1 / expected)).round() + points).clamp(-128, 127).to(torch.int8)
    assert torch.equal(values, whole)
    assert ((values.float() - points) * scales - x.float()).abs().max() < 0.51 * scales.max()


@TYPES
@pytest.mark.parametrize("azp", [None, -255, 54])
@pytest.mark.parametrize("scale", [0.1, 2.1])
def test_int8_by_a_given_scale(dtype: torch.dtype, azp: int | None, scale: float) -> None:
    x = (torch.rand(3, 5, 33) * 1000 - 300).to(dtype)
    given = torch.tensor([scale])
    point = None if azp is None else torch.tensor([azp], dtype=torch.int32)
    values, found, found_azp = scaled_int8_quant(x, given, point, symmetric=azp is None)
    assert found is given and found_azp is point and values.shape == x.shape
    rounded = (x.float() * (1 / given)).round() + (azp or 0)
    assert torch.equal(values, rounded.clamp(-128, 127).to(torch.int8))
    divided = (x / scale).round() + (azp or 0)
    torch.testing.assert_close(values, divided.clamp(-128, 127).to(torch.int8), atol=1, rtol=0)


def test_int8_saturates_at_the_ends_of_int32() -> None:
    for end, expected in ((2.0**31, 127), (-(2.0**31), -128)):
        x = torch.tensor([[math.nextafter(end, math.inf), end, end * 2, end * math.inf]], dtype=torch.float32)
        values, _, _ = scaled_int8_quant(x, torch.tensor(1.0), torch.tensor(0, dtype=torch.int32), symmetric=False)
        assert values.tolist() == [[expected] * 4]


@pytest.mark.parametrize("row", [[5.0] * 64, [0.0] * 64, [1000.0, 1000.25] * 32, [-1000.0, -1000.5] * 32], ids=str)
def test_zero_points_never_overflow_products(row: list[float]) -> None:
    x = torch.tensor([row])
    k = 65793 // 64
    values, scales, azp = scaled_int8_quant(x.repeat(1, k), symmetric=False)
    assert int(azp.abs().max()) * 128 * values.shape[1] < 2**31
    assert ((values.float() - azp) * scales - x.repeat(1, k)).abs().max() <= 0.51 * scales.max()


def test_nan_is_not_hidden() -> None:
    x = torch.ones(2, 32)
    x[0, 3] = torch.nan
    for symmetric in (True, False):
        _, scales, _ = scaled_int8_quant(x, symmetric=symmetric)
        assert scales.isnan().flatten().tolist() == [True, False]
    assert scaled_fp8_quant(x)[1].isnan().all()
    assert scaled_fp8_quant(x, torch.tensor([1.0]))[0].float().isnan().sum() == 1
    assert scaled_int8_quant(x, torch.tensor([1.0]))[0][0, 3] == 0


@TYPES
@SHAPES
@pytest.mark.parametrize("bounded", [False, True])
def test_fp8_by_rows(shape: tuple[int, int], dtype: torch.dtype, bounded: bool) -> None:
    x = torch.rand(shape).to(dtype) + 1e-6
    bound = x.float().mean() if bounded else None
    values, scales = scaled_fp8_quant(x, scale_ub=bound, use_per_token_if_dynamic=True)
    largest = x.float().abs().amax(1, keepdim=True)
    largest = largest if bound is None else torch.minimum(largest, bound)
    expected = (largest / torch.full_like(largest, 448)).clamp(min=1 / (448 * 512))
    assert torch.equal(scales, expected)
    assert torch.equal(values.float(), e4m3(x.float() * (1 / expected)))


@TYPES
@SHAPES
def test_fp8_of_a_tensor(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.rand(shape) * 1e-3).to(dtype)
    values, scale = scaled_fp8_quant(x)
    expected = (x.float().amax() / torch.tensor(448.0)).view(1)
    assert torch.equal(scale, expected) and torch.equal(values.float(), e4m3(x.float() * (1 / expected)))
    padded = torch.nn.functional.pad(x, (0, 8))[:, : shape[1]]
    assert torch.equal(scaled_fp8_quant(padded)[0].view(torch.uint8), values.view(torch.uint8))
    zeros, scale = scaled_fp8_quant(torch.zeros(shape, dtype=dtype))
    assert not zeros.float().any() and scale.isfinite().all() and (scale > 0).all()


@pytest.mark.parametrize("group", [(-1, -1), (-1, 1), (1, -1), (1, 16), (4, 8), (-1, 8)], ids=str)
def test_fp8_by_scales_of_groups(group: tuple[int, int]) -> None:
    x = torch.randn(8, 32)
    rows, columns = (all_of if part < 0 else part for part, all_of in zip(group, x.shape, strict=True))
    scale = torch.rand(8 // rows, 32 // columns) + 0.01
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    expected = e4m3(x * (1 / spread))
    found = [scaled_fp8_quant(x, scale, group_shape=group), scaled_fp8_quant(x, scale)]
    if 1 in scale.shape:
        found.append(scaled_fp8_quant(x, scale.flatten(), group_shape=group))
    assert all(torch.equal(values.float(), expected) for values, _ in found)
    assert found[0][1] is scale


def test_fp8_into_more_rows_and_into_a_tensor() -> None:
    x = torch.randn(10, 32)
    for options in ({}, {"use_per_token_if_dynamic": True}, {"scale": torch.tensor([0.1])}):
        plain, scale = scaled_fp8_quant(x, **options)
        longer, longer_scale = scaled_fp8_quant(x, num_token_padding=17, **options)
        assert longer.shape == (17, 32) and torch.equal(longer[:10].float(), plain.float())
        assert not longer[10:].float().any()
        assert torch.equal(longer_scale[: scale.numel()].view(-1), scale.view(-1))
        assert longer_scale.shape[0] == (17 if "use_per_token_if_dynamic" in options else 1)
        assert scaled_fp8_quant(x, num_token_padding=4, **options)[0].shape == (10, 32)
        output = torch.empty(10, 32, dtype=FP8)
        assert scaled_fp8_quant(x, output=output, **options)[0] is output
        assert torch.equal(output.float(), plain.float())


def test_empty() -> None:
    for shape in ((0, 32), (4, 0)):
        for symmetric in (True, False):
            values, scales, _ = scaled_int8_quant(torch.zeros(shape), symmetric=symmetric)
            assert values.shape == shape and scales.shape == (shape[0], 1)
        assert scaled_fp8_quant(torch.zeros(shape))[0].shape == shape


def test_what_is_refused() -> None:
    x, one = torch.randn(4, 32), torch.tensor([1.0])
    azp = torch.tensor([1], dtype=torch.int32)
    for call, message in (
        (lambda: scaled_int8_quant(x, one, azp), "symmetric is True but azp is given"),
        (lambda: scaled_int8_quant(x, one, symmetric=False), "symmetric is False but azp is None"),
        (lambda: scaled_int8_quant(x, azp=azp, symmetric=False), "azp is given without a scale"),
        (lambda: scaled_int8_quant(x, torch.ones(2)), "one value"),
        (lambda: scaled_int8_quant(x, one.double()), "scale has dtype torch.float64"),
        (lambda: scaled_int8_quant(x, one, azp.long(), symmetric=False), "azp has dtype torch.int64"),
        (lambda: scaled_int8_quant(x.double(), symmetric=False), "dtype torch.float64"),
        (lambda: scaled_fp8_quant(x[0]), r"input has shape \(32,\)"),
        (lambda: scaled_fp8_quant(x.int()), "input has dtype torch.int32"),
        (lambda: scaled_fp8_quant(x, torch.ones(4)), "group_shape is None"),
        (lambda: scaled_fp8_quant(x, torch.ones(4), group_shape=(-1, 1)), "for each of equal groups"),
        (lambda: scaled_fp8_quant(x, torch.ones(3, 1)), "for each of equal groups"),
        (lambda: scaled_fp8_quant(x, torch.ones(2, 1), group_shape=(3, -1)), "it must divide"),
        (lambda: scaled_fp8_quant(x, num_token_padding=8, output=torch.empty(4, 32, dtype=FP8)), "num_token_padding"),
        (lambda: scaled_fp8_quant(x, output=torch.empty(4, 16, dtype=FP8)), "output is"),
        (lambda: scaled_fp8_quant(x, 1.0), "scale is a float"),
        (lambda: scaled_int8_quant(x, 1.0), "scale is a float"),
        (lambda: scaled_int8_quant(None), "input is a NoneType"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()


@pytest.mark.parametrize("symmetric", [True, False])
def test_input_need_not_be_contiguous(symmetric: bool) -> None:
    x, scale = torch.randn(24, 5).t(), torch.tensor([0.1])
    azp = None if symmetric else torch.tensor([3], dtype=torch.int32)
    for given in ((), (scale, azp)):
        found, expected = (scaled_int8_quant(each, *given, symmetric=symmetric) for each in (x, x.contiguous()))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for given in ((), (scale,)):
        found, expected = (
            scaled_fp8_quant(each, *given, use_per_token_if_dynamic=True) for each in (x, x.contiguous())
        )
        assert torch.equal(found[0].float(), expected[0].float()) and torch.equal(found[1], expected[1])
