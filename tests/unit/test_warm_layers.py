"""Every kernel that a layer calls on a GPU is one that warmup gets for it, however the layer is configured."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8 import nn
from cutlass_w8a8.arch import SM90
from cutlass_w8a8.cli import main
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.nn import W8A8Config, W8A8Linear, activations
from cutlass_w8a8.problem import OVERLAPS
from cutlass_w8a8.spec import KernelSpec, QuantSpec, Spec, spec_from_json
from cutlass_w8a8.wanted import Target, items_of, plan
from tests.unit.fake_gpu import FakeGpu, on_gpu

N, K = 64, 48
# Small enough for one launch a tensor: between two, memory of the GPU is needed.
MS = (1, 16, 96)
RESULTS = [("bf16", torch.bfloat16, False), ("fp16", torch.float16, True), ("fp32", torch.float32, True)]


def configs() -> list[W8A8Config]:
    """All that there are."""
    found = []
    for dtype, *rest in itertools.product(
        (torch.int8, torch.float8_e4m3fn),
        ("channel", "tensor"),
        (True, False),
        ("token", "tensor"),
        (True, False),
        OVERLAPS,
    ):
        try:
            found.append(W8A8Config(dtype, *rest))
        except ArgumentError:
            continue
    return found


def layer_of(config: W8A8Config, dtype: torch.dtype, bias: bool) -> W8A8Linear:
    return W8A8Linear.from_linear(
        torch.nn.Linear(K, N, bias, dtype=dtype).requires_grad_(False),
        config,
        input_scale=None if config.dynamic else torch.full((1,), 0.1),
        input_azp=torch.full((1,), 3, dtype=torch.int32) if config.folds else None,
    )


@pytest.fixture
def device(gpu: FakeGpu, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The GPU that is not there, with what layers quantise on it, and so what they multiply."""
    real = activations.quantize

    def quantize(x: torch.Tensor, *given: Any, **options: Any) -> activations.Activations:
        found = real(on_gpu(x), *given, **options)
        return replace(found, values=on_gpu(found.values))

    monkeypatch.setattr(activations, "quantize", quantize)
    return gpu


def shaped(config: W8A8Config, bias: bool) -> dict[str, Any]:
    """What `warmup` is told of a layer's weight that is given by its shape."""
    return {
        "bias": bias,
        "azp": "none" if config.symmetric else "token" if config.dynamic else "tensor",
        "scale_a": config.granularity,
        "scale_b": config.weight,
        "overlap": config.overlap,
    }


def planned_for(layer: W8A8Linear) -> set[Spec]:
    """What warmup plans for a layer on an H200 that is not at hand."""
    target = Target(SM90, 132, "NVIDIA H200")
    return set(plan(list(items_of(layer)), MS, target, lambda n, k: pytest.fail("by shape"), quantize=torch.bfloat16))


def multiplying(specs: Any) -> set[Spec]:
    return {spec for spec in specs if isinstance(spec, KernelSpec)}


def test_the_configurations_are_all_there_are() -> None:
    """Three ways to scale activations, with zero points or, as all fp8, without."""
    assert len(configs()) == len(set(configs())) == 2 * len(OVERLAPS) * 3 * (2 + 1)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("config", configs(), ids=repr)
def test_layers_call_what_warmup_gets(
    device: FakeGpu, config: W8A8Config, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it and nothing more; and nothing that warmup does not get for their weights by shape."""
    # Traced layers call operators in place of a prepared call.
    monkeypatch.setattr(nn.linear, "is_compiling", lambda: traced)
    for _, dtype, bias in RESULTS:
        layer = layer_of(config, dtype, bias)
        report = cutlass_w8a8.warmup(torch.nn.Sequential(layer), ms=MS)
        device.ran.clear()
        # Whatever is not loaded by now is an error.
        device.capturing = True
        for m in MS:
            layer(torch.ones(m, K, dtype=dtype))
        device.capturing = False
        assert sorted(set(device.ran)) == sorted(spec.name for spec in report.kernels)
        assert [type(spec) for spec in report.kernels].count(QuantSpec) == 1
        told = shaped(config, bias) | {"dtype": config.dtype, "out_dtype": dtype, "quantize": dtype}
        by_shape = cutlass_w8a8.warmup((N, K), ms=MS, **told).kernels
        assert multiplying(by_shape) == multiplying(report.kernels) and set(by_shape) >= set(report.kernels)


@pytest.mark.parametrize("config", configs(), ids=repr)
def test_the_command_line_builds_what_warmup_gets(config: W8A8Config, capsys: pytest.CaptureFixture[str]) -> None:
    for name, dtype, bias in RESULTS:
        told = shaped(config, bias)
        report = planned_for(layer_of(config, dtype, bias))
        words = f"build --weights {N}x{K} --m {','.join(map(str, MS))} --sm-count 132 --print-plan --out-dtype {name}"
        words += f" --a-dtype {'int8' if config.dtype is torch.int8 else 'e4m3'} --quantize {name}"
        words += "".join(f" --{key.replace('_', '-')} {told[key]}" for key in ("azp", "scale_a", "scale_b", "overlap"))
        assert main([*words.split(), "--device", "NVIDIA H200", *["--bias"] * bias]) == 0
        planned = {spec_from_json(text) for text in json.loads(capsys.readouterr().out)}
        assert multiplying(planned) == multiplying(report) and planned >= report
