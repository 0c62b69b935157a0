"""Layers for whole models: values, state, and what torch does with modules. On the CPU."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cutlass_w8a8 import ArgumentError
from cutlass_w8a8.nn import W8A8Config, W8A8Linear, activations, calibrate, linear, quantize_
from cutlass_w8a8.quant_eval import quantized
from cutlass_w8a8.spec import Scheme
from cutlass_w8a8.weight_checks import operand_of
from cutlass_w8a8.weights import quantize_weight

E4M3 = torch.float8_e4m3fn
MODES = [
    W8A8Config(dtype, weight, dynamic, granularity, symmetric)
    for dtype, weight, (dynamic, granularity), symmetric in itertools.product(
        (torch.int8, E4M3), ("channel", "tensor"), ((True, "token"), (True, "tensor"), (False, "tensor")), (True, False)
    )
    if symmetric or dtype is torch.int8
]
AZP_STATIC = W8A8Config(torch.int8, dynamic=False, symmetric=False)


def name_of(config: W8A8Config) -> str:
    kind = f"{'dynamic' if config.dynamic else 'static'}-{config.granularity}"
    return f"{str(config.dtype)[6:]}-{config.weight}-{kind}-{'sym' if config.symmetric else 'azp'}"


def uneven(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    """Rows of different magnitude and offset."""
    generator = torch.Generator().manual_seed(seed)
    rows_of = torch.randn(rows, k, generator=generator) + torch.randn(rows, 1, generator=generator)
    return rows_of * torch.logspace(-1, 1, rows).unsqueeze(1)


def float_linear(k: int = 48, n: int = 24, bias: bool = True, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(k, n, bias).to(dtype).requires_grad_(False)


def quantised(config: W8A8Config, linear: torch.nn.Linear | None = None) -> W8A8Linear:
    model = torch.nn.Sequential(float_linear() if linear is None else linear)
    calibration = None
    if not config.dynamic:
        with calibrate(model) as calibration:
            model(uneven(32, model[0].in_features).to(model[0].weight.dtype))
    quantize_(model, config, calibration=calibration)
    layer = model[0]
    assert isinstance(layer, W8A8Linear)
    return layer


def bits(layer: torch.nn.Module) -> dict[str, tuple[torch.dtype, bytes]]:
    return {
        name: (t.dtype, t.contiguous().view(torch.uint8).numpy().tobytes()) for name, t in layer.state_dict().items()
    }


@pytest.mark.parametrize("config", MODES, ids=name_of)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("k", "n"), [(48, 24), (50, 21)])
def test_a_layer_is_its_formula(config: W8A8Config, biased: bool, k: int, n: int) -> None:
    linear = float_linear(k, n, biased)
    layer = quantised(config, linear)
    # Of what static scales were calibrated with, so that nothing saturates.
    x = uneven(32, k)[::6].contiguous()
    y = layer(x)
    assert y.shape == (6, n) and y.dtype is torch.float32
    a = layer._quantize(x)
    # The quantised values stand for x within half a step, or half a step of e4m3.
    zero = a.azp if a.azp is not None else layer.input_azp
    values = a.values[:, :k].double()
    step = a.scale.double().reshape(-1, 1)
    shifted = values - (0 if zero is None else zero.double().reshape(-1, 1))
    bound = step * 0.5001 if config.dtype is torch.int8 else torch.maximum(x.double().abs() / 15.9, step * 2**-10)
    assert bool(((shifted * step - x.double()).abs() <= bound).all())
    assert a.scale.shape == ((6, 1) if config.granularity == "token" else (1,))
    # The product is that of the quantised values, whatever the padding.
    q, scale = quantize_weight(linear.weight, config.dtype, config.weight)
    product = (shifted @ q.double().t()).float()
    inner = scale * product
    expected = step * inner.double() + (0 if linear.bias is None else linear.bias.double())
    assert torch.equal(y, expected.float())
    assert 1e-4 < (y - linear(x)).norm() / linear(x).norm() < (0.06 if config.dtype is E4M3 else 0.03)


@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_the_steps_in_torch_agree_with_the_kernels_formula(dtype: torch.dtype, source: torch.dtype) -> None:
    x = torch.cat([uneven(40, 33), torch.zeros(1, 33), torch.full((1, 33), 1e-30), torch.full((1, 33), 6e4)]).to(source)
    scale, azp = activations.parameters(activations.limits(x, "token", True), dtype, True)
    q, expected, _ = quantized(x, operand_of("dtype", dtype), Scheme.TOKEN)
    assert azp is None and torch.equal(scale, expected)
    assert torch.equal(activations.apply(x, dtype, scale, None).view(torch.uint8), q.view(torch.uint8))


def test_zero_is_exact_and_one_sided_rows_use_all_steps() -> None:
    x = torch.stack([torch.linspace(5, 9, 16), torch.linspace(-9, -5, 16), torch.zeros(16)])
    a = activations.quantize(x, torch.int8, symmetric=False)
    assert a.azp is not None and a.azp.tolist() == [-128, 127, -128]
    assert a.values[0].max() == 127 and a.values[1].min() == -128
    assert torch.equal(a.values[2].int(), a.azp[2].expand(16))
    static = activations.quantize(
        x,
        torch.int8,
        granularity="tensor",
        scale=torch.tensor([0.01]),
        azp=torch.tensor([3], dtype=torch.int32),
        symmetric=False,
    )
    assert static.azp is None
    assert static.values[0].eq(127).all() and static.values[1].eq(-128).all() and static.values[2].eq(3).all()


@pytest.mark.parametrize("config", [c for c in MODES if c.dynamic and c.weight == "channel"], ids=name_of)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_reaches_the_result(config: W8A8Config, bad: float) -> None:
    x = uneven(4, 48)
    x[1, 7] = bad
    y = quantised(config)(x)
    assert bool(y[1].isnan().all())
    if config.per_token:
        assert bool(y[[0, 2, 3]].isfinite().all())


@pytest.mark.parametrize("config", MODES, ids=name_of)
def test_shapes(config: W8A8Config) -> None:
    layer = quantised(config, float_linear(50, 21))
    x = uneven(12, 50)
    whole = layer(x)
    assert torch.equal(layer(x.view(3, 4, 50)), whole.view(3, 4, 21))
    assert layer(x[:0]).shape == (0, 21) and layer(x.view(3, 4, 50)[:, :0]).shape == (3, 0, 21)
    if config.granularity == "token" or not config.dynamic:
        assert torch.equal(layer(x[5]), whole[5])
        assert torch.equal(layer(x[::2]), whole[::2])
    strided = x.t().contiguous().t()
    assert strided.stride(1) != 1 and torch.equal(layer(strided), whole)
    with pytest.raises(ArgumentError, match=r"shape \(12, 49\).*K=50"):
        layer(x[:, :49])
    with pytest.raises(ArgumentError, match="K=50"):
        layer(torch.tensor(1.0))


@pytest.mark.parametrize("config", MODES, ids=name_of)
def test_a_state_goes_round(config: W8A8Config, tmp_path: Path) -> None:
    layer = quantised(config, float_linear(50, 21, dtype=torch.bfloat16))
    x = uneven(5, 50, seed=3).bfloat16()
    y = layer(x)
    names = {"weight", "weight_scale", "bias"}
    names |= set() if config.symmetric else {"azp_adj"}
    names |= set() if config.dynamic else {"input_scale"}
    names |= {"input_azp"} if config.folds else set()
    assert set(layer.state_dict()) == names
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)

    fresh = W8A8Linear(50, 21, config=config, dtype=torch.bfloat16)
    assert bool(fresh(x).isnan().all()), "a layer that was not loaded must not look as if it were"
    fresh.load_state_dict(state)
    assert bits(fresh) == bits(layer) and torch.equal(fresh(x), y)

    meta = W8A8Linear(50, 21, config=config, dtype=torch.bfloat16, device="meta")
    assert all(t.is_meta for t in meta.buffers()) and meta(x.to("meta")).shape == (5, 21)
    assigned = copy.deepcopy(meta)
    meta.to_empty(device="cpu").load_state_dict(state)
    assigned.load_state_dict(state, assign=True)
    for loaded in (meta, assigned):
        assert bits(loaded) == bits(layer) and torch.equal(loaded(x), y)

    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert bits(copied) == bits(layer) and torch.equal(copied(x), y)
        assert copied.weight.data_ptr() != layer.weight.data_ptr()
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False)(x), y)


def test_a_copy_goes_its_own_way() -> None:
    layer, x = quantised(W8A8Config()), uneven(4, 48)
    y = layer(x)
    copied = copy.deepcopy(layer)
    copied.weight.zero_()
    assert torch.equal(layer(x), y) and torch.equal(copied(x), layer.bias.expand(4, -1))


def test_other_tensors_in_the_place_of_the_first_are_used() -> None:
    layer = quantised(W8A8Config())
    other = quantised(W8A8Config(), torch.nn.Linear(48, 24).requires_grad_(False))
    x = uneven(4, 48)
    before, expected = layer(x), other(x)
    assert not torch.equal(before, expected)

    changed = copy.deepcopy(layer)
    changed(x)
    changed.load_state_dict(other.state_dict())
    assert torch.equal(changed(x), expected)

    changed = copy.deepcopy(layer)
    changed(x)
    for name, tensor in other.state_dict().items():
        setattr(changed, name, tensor)
    assert torch.equal(changed(x), expected)

    changed = copy.deepcopy(layer)
    changed(x)
    for name, tensor in other.state_dict().items():
        getattr(changed, name).data = tensor.clone()
    assert torch.equal(changed(x), expected)

    assert torch.equal(torch.func.functional_call(layer, other.state_dict(), (x,)), expected)
    assert torch.equal(layer(x), before)


def test_a_wrong_state_is_refused() -> None:
    linear = float_linear()
    int8, fp8 = quantised(W8A8Config()), quantised(W8A8Config(E4M3))
    before = bits(int8)
    with pytest.raises(RuntimeError, match=r"weight is torch\.float32, but this .* torch\.int8; quantise"):
        int8.load_state_dict(linear.state_dict(), strict=False)
    with pytest.raises(RuntimeError, match=r"weight is torch\.float8_e4m3fn, but .* torch\.int8"):
        int8.load_state_dict(fp8.state_dict())
    with pytest.raises(RuntimeError, match=r"weight_scale is torch\.float16, but"):
        int8.load_state_dict({**int8.state_dict(), "weight_scale": int8.weight_scale.half()})
    with pytest.raises(RuntimeError, match="size mismatch for weight_scale"):
        int8.load_state_dict(quantised(W8A8Config(weight="tensor")).state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key.*"azp_adj", "input_scale", "input_azp"'):
        quantised(AZP_STATIC).load_state_dict(int8.state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*azp_adj"):
        int8.load_state_dict(quantised(W8A8Config(symmetric=False)).state_dict())
    assert bits(int8) == before


@pytest.mark.parametrize("config", [W8A8Config(E4M3), AZP_STATIC], ids=name_of)
def test_conversions_change_the_results_type_only(config: W8A8Config) -> None:
    layer = quantised(config)
    before = bits(layer)
    x = uneven(4, 48)
    exact = layer(x)
    for convert, dtype in (
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.to(torch.float16), torch.float16),
        (lambda m: m.to("cpu", torch.bfloat16), torch.bfloat16),
        (lambda m: m.type(torch.bfloat16), torch.bfloat16),
        (lambda m: m.float(), torch.float32),
    ):
        converted = convert(copy.deepcopy(layer))
        assert converted.dtype is dtype and converted.bias.dtype is dtype
        assert {k: v for k, v in bits(converted).items() if k != "bias"} == {
            k: v for k, v in before.items() if k != "bias"
        }
        y = converted(x)
        assert y.dtype is dtype
        torch.testing.assert_close(y.float(), exact, rtol=0.02, atol=0.02)
    assert copy.deepcopy(layer).to("meta").weight_scale.dtype is torch.float32
    with pytest.raises(ArgumentError, match=r"dtype is torch\.float64"):
        layer.double()
    assert bits(layer) == before


def test_gradients_are_refused_in_grad_mode_only() -> None:
    layer = quantised(W8A8Config())
    x = uneven(4, 48).requires_grad_()
    with pytest.raises(ArgumentError, match=r"requires a gradient.*torch\.no_grad"):
        layer(x)
    with torch.no_grad():
        y = layer(x)
    with torch.inference_mode():
        assert torch.equal(layer(x), y)
    assert torch.equal(layer(x.detach()), y) and not y.requires_grad
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="requires a gradient"):
        compiled(x)
    with pytest.raises(ArgumentError, match="requires a gradient"):
        torch.compile(layer, backend="eager")(x)
    with torch.no_grad():
        assert torch.equal(compiled(x), y)
    assert not any(True for _ in layer.parameters())


@pytest.mark.parametrize("config", [c for c in MODES if c.weight == "channel"], ids=name_of)
def test_compiles_and_exports_whole(config: W8A8Config) -> None:
    torch._dynamo.reset()
    k, n = (50, 21) if config.granularity == "token" else (48, 24)
    model = torch.nn.Sequential(quantised(config, float_linear(k, n)), torch.nn.ReLU())
    x, other = uneven(6, k), uneven(9, k, seed=5)
    y, z = model(x), model(other)
    # aot_eager traces through the operators' fake implementations and functionalises what writes its arguments.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(x), y) and torch.equal(compiled(other), z)
    rows = torch.export.Dim("rows", min=2, max=1024)
    for strict in (False, True):
        program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},), strict=strict)
        assert torch.equal(program.module()(other), z)
    assert {name.removeprefix("0.") for name in program.state_dict} == set(model[0].state_dict())


@pytest.mark.parametrize("config", [W8A8Config(E4M3), AZP_STATIC], ids=name_of)
def test_compiles_with_inductor(config: W8A8Config) -> None:
    torch._dynamo.reset()
    layer = quantised(config, float_linear(50, 21))
    x = uneven(6, 50)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), rtol=0, atol=0)


@pytest.mark.parametrize("config", MODES, ids=name_of)
def test_fake_tensors(config: W8A8Config) -> None:
    layer = quantised(config, float_linear(50, 21, dtype=torch.bfloat16))
    x = uneven(6, 50)
    with FakeTensorMode() as mode:
        state = {name: mode.from_tensor(tensor) for name, tensor in layer.named_buffers()}
        y = torch.func.functional_call(layer, state, (mode.from_tensor(x).view(2, 3, 50),))
        assert y.shape == (2, 3, 21) and y.dtype is torch.bfloat16
        built = W8A8Linear(50, 21, config=config)
        assert built(torch.empty(7, 50)).shape == (7, 21)
    assert layer(x).isfinite().all()


class Block(torch.nn.Module):
    """Layers of several kinds, one of them at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
        self.again = self.first
        self.head = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(32, 8))
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.first(x) + self.again(x))


@torch.no_grad()
def test_a_model_is_quantised_in_place() -> None:
    torch.manual_seed(0)
    model = Block().eval()
    x = torch.randn(2, 5, 16)
    exact = model(x)
    chosen: list[str] = []

    def choose(module: torch.nn.Module, name: str) -> bool:
        if type(module) is torch.nn.Linear and "head" not in name:
            chosen.append(name)
            return True
        return False

    partly = copy.deepcopy(model)
    quantize_(partly, W8A8Config(), choose)
    assert set(chosen) == {"first", "again"} and type(partly.head[1]) is torch.nn.Linear
    quantize_(model, W8A8Config())
    assert type(model.first) is W8A8Linear and model.again is model.first and not model.first.training
    assert type(model.head[1]) is W8A8Linear
    # Attention reads its projection's weight rather than calling it.
    assert isinstance(model.attention.out_proj, torch.nn.Linear)
    assert 0 < (model(x) - exact).norm() / exact.norm() < 0.03


@torch.no_grad()
def test_torchs_own_transformer_layers_call_their_layers() -> None:
    torch.manual_seed(0)
    stack = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    x = torch.randn(2, 9, 32)
    exact = stack(x)
    quantize_(stack, W8A8Config())
    assert 0 < (stack(x) - exact).norm() / exact.norm() < 0.02


@torch.no_grad()
def test_a_model_on_the_meta_device_takes_a_quantised_state() -> None:
    torch.manual_seed(0)
    model = Block()
    with calibrate(model) as calibration:
        model(torch.randn(2, 5, 16))
    quantize_(model, AZP_STATIC, calibration=calibration)
    with torch.device("meta"):
        empty = Block()
    quantize_(empty, AZP_STATIC)
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    x = torch.randn(2, 5, 16)
    assert torch.equal(empty(x), model(x))


@torch.no_grad()
def test_calibration_finds_the_range_of_all_batches() -> None:
    model = torch.nn.Sequential(float_linear(4, 4), torch.nn.Linear(4, 4))
    with calibrate(model, lambda module, name: name == "0") as calibration:
        model(torch.tensor([[1.0, 2.0, 0.5, -0.25]]))
        model(torch.tensor([[0.0, 3.0, -0.75, 1.0]]).bfloat16().float())
        model(torch.empty(0, 4))
    assert set(calibration.reach) == {"0"} and calibration.reach["0"].flatten().tolist() == [0.75, 3.0]
    scale, azp = calibration.parameters("0", AZP_STATIC)
    assert (
        azp is not None and scale.item() == pytest.approx(3.75 / 255) and azp.item() == -128 + round(0.75 / 3.75 * 255)
    )
    scale, azp = calibration.parameters("0", W8A8Config(E4M3, dynamic=False))
    assert azp is None and scale.item() == pytest.approx(3 / 448)
    assert not model[0]._forward_pre_hooks
    with pytest.raises(ArgumentError, match="layer '1' was not calibrated"):
        quantize_(model, AZP_STATIC, calibration=calibration)
    assert type(model[0]) is torch.nn.Linear, "nothing may be replaced if anything cannot be"
    with calibrate(model) as calibration:
        model(torch.tensor([[1.0, float("nan"), 0.5, -0.25]]))
    with pytest.raises(ArgumentError, match="layer '0' held NaN"):
        quantize_(model, AZP_STATIC, calibration=calibration)


def test_models_that_cannot_be_quantised_are_left_alone() -> None:
    model = torch.nn.Sequential(float_linear(), torch.nn.Linear(24, 8))
    for match, call in {
        "a linear layer itself": lambda: quantize_(model[0], W8A8Config()),
        "layer '2' is a ReLU": lambda: quantize_(
            torch.nn.Sequential(*model, torch.nn.ReLU()), W8A8Config(), lambda module, name: name != ""
        ),
        "pass calibration": lambda: quantize_(model, W8A8Config(dynamic=False)),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            call()
    handle = model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ArgumentError, match="layer '1' has forward hooks"):
        quantize_(model, W8A8Config())
    handle.remove()
    with torch.no_grad():
        model[1].weight[0, 0] = float("nan")
    with pytest.raises(ArgumentError, match="layer '1': weight holds NaN"):
        quantize_(model, W8A8Config())
    assert type(model[0]) is torch.nn.Linear


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dtype": torch.float16}, "dtype is torch.float16"),
        ({"weight": "row"}, "weight is 'row'"),
        ({"granularity": "block"}, "granularity is 'block'"),
        ({"overlap": "yes"}, "overlap is 'yes'"),
        ({"dynamic": "no"}, "dynamic is 'no'"),
        ({"dynamic": False, "granularity": "token"}, "tokens are not known beforehand"),
        ({"dtype": E4M3, "symmetric": False}, "only int8 has zero points"),
    ],
)
def test_impossible_configurations(arguments: dict[str, object], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        W8A8Config(**arguments)  # type: ignore[arg-type]


def fused(config: W8A8Config, **given: object) -> W8A8Linear:
    parts = [quantize_weight(uneven(n, 48, seed=n) * n, config.dtype, "tensor") for n in (3, 8, 5)]
    values = torch.cat([part[0].view(torch.int8) for part in parts]).view(config.dtype)
    scales = torch.cat([part[1] for part in parts])
    return W8A8Linear.from_quantized(values, scales, config=config, logical_widths=(3, 8, 5), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
@pytest.mark.parametrize("weight", ["channel", "tensor"])
def test_fused_shards(dtype: torch.dtype, weight: str) -> None:
    layer = fused(W8A8Config(dtype, weight))
    x = uneven(6, 48, seed=9)
    exact = torch.cat([x @ (uneven(n, 48, seed=n) * n).t() for n in (3, 8, 5)], dim=1)
    assert layer.weight_scale.shape == ((16,) if weight == "channel" else (1,))
    assert (layer(x) - exact).norm() / exact.norm() < (0.05 if dtype is E4M3 else 0.02)


def test_fused_static_ranges_are_merged() -> None:
    scales, azps = torch.tensor([0.31, 0.77]), torch.tensor([25, -90], dtype=torch.int8)
    layer = fused(AZP_STATIC, input_scale=scales, input_azp=azps)
    assert layer.input_azp is not None and layer.input_azp.item() == -72
    assert layer.input_scale is not None and layer.input_scale.item() == pytest.approx((0.77 * 217 + 0.31 * 153) / 255)
    assert torch.equal(layer.azp_adj, layer.weight.sum(1, dtype=torch.int32) * -72)
    symmetric = fused(W8A8Config(E4M3, dynamic=False), input_scale=scales)
    assert symmetric.input_scale is not None and symmetric.input_scale.tolist() == pytest.approx([0.77])


def test_quantised_tensors_that_do_not_fit_are_refused() -> None:
    q, scale = quantize_weight(uneven(8, 16), torch.int8)
    make: Callable[..., W8A8Linear] = W8A8Linear.from_quantized
    one = torch.ones(1)
    for match, call in {
        "config.dtype is torch.float8": lambda: make(q, scale, config=W8A8Config(E4M3)),
        "has 8 values, but config.weight is 'tensor'": lambda: make(q, scale, config=W8A8Config(weight="tensor")),
        "3 values for N=8": lambda: make(q, scale[:3], config=W8A8Config()),
        "add up to 7": lambda: make(q, scale[:2], config=W8A8Config(), logical_widths=(3, 4)),
        "NaN or an infinity": lambda: make(q, scale / 0, config=W8A8Config()),
        "no input_scale given; this configuration needs both": lambda: make(q, scale, config=AZP_STATIC),
        "input_scale given; .* needs none": lambda: make(q, scale, config=W8A8Config(), input_scale=one),
        "input_scale, input_azp given; .* needs input_scale alone": lambda: make(
            q, scale, config=W8A8Config(dynamic=False), input_scale=one, input_azp=one
        ),
        "must be positive": lambda: make(q, scale, config=AZP_STATIC, input_scale=-one, input_azp=one),
        "zero point is 300": lambda: make(q, scale, config=AZP_STATIC, input_scale=one, input_azp=one * 300),
        "dtype is torch.float64": lambda: make(q, scale, config=W8A8Config(), dtype=torch.float64),
        "N=0 and K=4": lambda: W8A8Linear(4, 0),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            call()


def test_the_package_does_without_until_asked() -> None:
    late = "('cutlass_w8a8.nn', 'cutlass_w8a8.checkpoint')"
    code = f"import sys, cutlass_w8a8; print([name for name in sys.modules if name.startswith({late})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    code = "import sys, cutlass_w8a8.checkpoint; print('transformers' in sys.modules, 'safetensors' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"


def test_a_layer_tells_what_it_is() -> None:
    assert repr(quantised(AZP_STATIC)) == (
        "W8A8Linear(in_features=48, out_features=24, bias=True, int8 per channel, activations static per tensor, "
        "with zero points, to float32)"
    )


def test_layers_wait_for_what_writes_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled ones too, whose calls prepare nothing."""
    seen: list[tuple[int, str]] = []
    monkeypatch.setattr(linear, "settle", lambda b, overlap: seen.append((b.data_ptr(), overlap)))
    layer = W8A8Linear.from_linear(float_linear(), W8A8Config(overlap="launch"))
    assert seen.pop() == (layer.weight.data_ptr(), "launch") and not seen
    layer = W8A8Linear.from_linear(float_linear())
    for change in (layer.half, lambda: layer.load_state_dict(layer.state_dict()), lambda: None):
        assert [each == (layer.weight.data_ptr(), "weights") for each in seen] == [True]
        seen.clear()
        change()
    assert not seen
