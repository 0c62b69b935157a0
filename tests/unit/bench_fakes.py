"""Stand-ins that let a benchmark run without a GPU: lists of calls for graphs, vLLM's operators, launch modes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8.bench import ceilings, machine, providers, timing


class FakeGraph:
    """What ``timing.capture`` returns: replaying it makes the calls."""

    def __init__(self, provider: providers.Provider, operands: providers.Operands, calls: int) -> None:
        self.calls = [partial(provider.call, operands, i) for i in range(calls)]
        self.replay()

    def replay(self) -> None:
        for call in self.calls:
            call()


def quantise(tokens: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor, scale: torch.Tensor) -> None:
    """Quantisation to a scale per token, by its definition."""
    largest = 127 if dtype is torch.int8 else 448
    scale.copy_(tokens.float().abs().amax(dim=1, keepdim=True) / largest)
    scaled = tokens.float() / scale
    out.copy_((scaled.round() if dtype is torch.int8 else scaled).to(dtype))


@pytest.fixture(name="device")
def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose calls each take as many microseconds as their provider's name has letters."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "make_operands", partial(providers.make_operands, device="cpu"))
    monkeypatch.setattr(timing, "WEIGHT_BYTES", 1)
    monkeypatch.setattr(timing, "capture", FakeGraph)
    monkeypatch.setattr(timing, "replay_all", lambda graphs, *_: {name: float(len(name)) for name in graphs})
    monkeypatch.setattr(machine, "facts", lambda commit: {"gpu": "NVIDIA H200", "commit": commit})
    monkeypatch.setattr(machine, "gpu_state", lambda: {"clocks.sm": "1980 MHz"})
    monkeypatch.setattr(ceilings, "find", lambda: {"copy TB/s": 4.0, "data sheet": ceilings.data_sheet("NVIDIA H200")})


@pytest.fixture(name="vllm")
def fake_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """vLLM's operators, with the schemas its wheel registers them by; the path stands for both of its libraries."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_s, Tensor b_s, Tensor? bias) -> ()")
    library.define("dynamic_per_token_scaled_fp8_quant(Tensor! q, Tensor x, Tensor! scale, Tensor? scale_ub) -> ()")
    library.define("dynamic_scaled_int8_quant(Tensor! q, Tensor x, Tensor! scale, Tensor!? azp) -> ()")

    def gemm(out, a, b, scale_a, scale_b, bias):
        cutlass_w8a8.scaled_mm(a, b, scale_a, scale_b, out=out)

    def quant(q, x, scale, _):
        quantise(x, q.dtype, out=q, scale=scale)

    library.impl("cutlass_scaled_mm", gemm, "CPU")
    library.impl("dynamic_per_token_scaled_fp8_quant", quant, "CPU")
    library.impl("dynamic_scaled_int8_quant", quant, "CPU")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    path = tmp_path / "_C.abi3.so"
    path.touch()
    yield path
    library._destroy()
    for name in ("cutlass_scaled_mm", "dynamic_per_token_scaled_fp8_quant", "dynamic_scaled_int8_quant"):
        vars(torch.ops._C).pop(name, None)


@pytest.fixture(name="launches")
def fake_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The list fills with how each call was launched."""
    seen: list[str] = []
    real = cutlass_w8a8.scaled_mm

    def scaled_mm(*operands, overlap="none", **options):
        seen.append(f"gemm {overlap}")
        return real(*operands, **options)

    def quantize_per_token(x, dtype, *, out=None, scale=None, overlap="launch"):
        seen.append(f"quantise {overlap}")
        quantise(x, dtype, out=out, scale=scale)
        return out, scale

    monkeypatch.setattr(cutlass_w8a8, "scaled_mm", scaled_mm)
    monkeypatch.setattr(cutlass_w8a8, "quantize_per_token", quantize_per_token)
    return seen
