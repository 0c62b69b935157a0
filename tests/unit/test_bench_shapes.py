"""Which weights a model has, how tensor parallelism divides them, and what cannot be divided."""

from __future__ import annotations

import pytest

from cutlass_w8a8.bench import shapes
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.request import K_MULTIPLE, N_MULTIPLE

LAYERS = {  # N x K of qkv, o, gate_up, down, as published checkpoints have them
    ("llama-2-7b", 1): [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)],
    ("llama-2-13b", 1): [(15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824)],
    ("llama-2-70b", 1): [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)],
    ("llama-3-8b", 1): [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    ("llama-3-8b", 2): [(3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168)],
    ("llama-3-70b", 8): [(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)],
    ("llama-3-405b", 1): [(18432, 16384), (16384, 16384), (106496, 16384), (16384, 53248)],
    ("qwen2.5-7b", 1): [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)],
    ("qwen2.5-32b", 1): [(7168, 5120), (5120, 5120), (55296, 5120), (5120, 27648)],
    ("qwen2.5-72b", 1): [(10240, 8192), (8192, 8192), (59136, 8192), (8192, 29568)],
    ("mistral-7b", 4): [(1536, 4096), (4096, 1024), (7168, 4096), (4096, 3584)],
    # 8 key-value heads on 16 ranks: each rank has one.
    ("llama-3-70b", 16): [(768, 8192), (8192, 512), (3584, 8192), (8192, 1792)],
}


@pytest.mark.parametrize(("model", "ranks"), LAYERS)
def test_weights_of_a_model(model: str, ranks: int) -> None:
    weights, refused = shapes.weights_of([model], [ranks])
    assert list(weights) == list(dict.fromkeys(LAYERS[model, ranks])) and not refused


def test_deepseek_v3() -> None:
    weights, refused = shapes.weights_of(["deepseek-v3"], [1, 8])
    by_layer = {layer: weight for weight, layers in weights.items() for layer in layers}
    assert not refused
    assert by_layer["deepseek-v3 qkv_a tp1"] == by_layer["deepseek-v3 qkv_a tp8"] == (2112, 7168)
    assert by_layer["deepseek-v3 q_b tp1"] == (24576, 1536)
    assert by_layer["deepseek-v3 kv_b tp8"] == (4096, 512)
    assert by_layer["deepseek-v3 o tp8"] == (7168, 2048)
    assert by_layer["deepseek-v3 dense_gate_up tp1"] == (36864, 7168)
    assert by_layer["deepseek-v3 shared_down tp8"] == (7168, 256)


def test_equal_weights_are_measured_once() -> None:
    weights, _ = shapes.weights_of(["llama-3-8b", "mistral-7b"], [1])
    assert weights[6144, 4096] == ["llama-3-8b qkv tp1", "mistral-7b qkv tp1"]


@pytest.mark.parametrize(
    ("model", "ranks", "reason"),
    [
        ("qwen2.5-7b", 8, "qwen2.5-7b qkv tp8: 28 heads cannot be divided among 8 ranks"),
        ("llama-2-13b", 16, "llama-2-13b o tp16: 40 heads cannot be divided among 16 ranks"),
        ("llama-2-7b", 32, "llama-2-7b down tp32: K=344 is not a positive multiple of 16"),
        ("qwen2.5-32b", 5, "qwen2.5-32b qkv tp5: 8 key-value heads cannot be divided among 5 ranks"),
        ("llama-3-8b", 3, "llama-3-8b o tp3: 32 heads cannot be divided among 3 ranks"),
    ],
)
def test_what_cannot_be_divided_is_said(model: str, ranks: int, reason: str) -> None:
    assert reason in shapes.weights_of([model], [ranks])[1]


@pytest.mark.parametrize("model", shapes.MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 16, 64])
def test_every_layer_is_either_legal_or_said(model: str, ranks: int) -> None:
    weights, refused = shapes.weights_of([model], [ranks])
    assert all(n % N_MULTIPLE == 0 and k % K_MULTIPLE == 0 for n, k in weights)
    assert sum(map(len, weights.values())) + len(refused) == len(shapes.MODELS[model].layers())


def test_an_extent_that_does_not_divide() -> None:
    model = shapes.Model(4096, 14336, 6, 6)
    layer = shapes.Layer("odd", 4096, 100, shapes.Split.ROW)
    with pytest.raises(ArgumentError, match="K=100 cannot be divided among 6 ranks"):
        shapes.divided(model, layer, 6)


def test_points_of_a_weight_follow_each_other() -> None:
    found = shapes.points([(8, 16), (16, 16)], [1, 2], ["fp8", "int8"], ["alone", "chain"])
    assert len(found) == len(set(found)) == 16
    assert [p.n for p in found] == [8] * 8 + [16] * 8
    assert [p.name for p in found[:3]] == ["fp8 1x8x16", "fp8 2x8x16", "fp8 1x8x16 chain"]
