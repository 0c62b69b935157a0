"""Prepared calls, and the options and settings of calls, on the CPU."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cutlass_w8a8
from cutlass_w8a8 import ArgumentError, ConfigError, calls
from cutlass_w8a8.arch import SM90
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.problem import Overlap
from cutlass_w8a8.request import check
from cutlass_w8a8.settings import options
from cutlass_w8a8.support import choose

M, N, K = 5, 24, 64
SLICED = "64x16x256_ws_swap_slices2"


def operands(dtype: torch.dtype, m: int = M, k: int = K) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(m)

    def matrix(rows: int) -> torch.Tensor:
        values = torch.randint(-100, 100, (rows, k), generator=generator)
        return values.to(torch.int8) if dtype is torch.int8 else (values / 50).to(dtype)

    return {
        "a": matrix(m),
        "b": matrix(N).t(),
        "scale_a": torch.rand(m, 1, generator=generator),
        "scale_b": torch.rand(1, N, generator=generator),
        "bias": torch.rand(N, generator=generator).bfloat16(),
        "azp": torch.randint(-9, 9, (m, 1), generator=generator, dtype=torch.int32),
    }


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_the_plain_call(dtype: torch.dtype, biased: bool) -> None:
    x = operands(dtype)
    bias = x["bias"] if biased else None
    mm = cutlass_w8a8.prepare(x["b"], x["scale_b"], torch.bfloat16, bias)
    expected = cutlass_w8a8.scaled_mm(x["a"], x["b"], x["scale_a"], x["scale_b"], torch.bfloat16, bias)
    assert torch.equal(mm(x["a"], x["scale_a"]), expected)
    out = torch.full((M, N), float("nan"), dtype=torch.bfloat16)
    assert mm(x["a"], x["scale_a"], out=out) is out and torch.equal(out, expected)
    deep = mm(x["a"].view(1, M, K), x["scale_a"])
    assert deep.shape == (1, M, N) and torch.equal(deep[0], expected)
    # Another M, and the first again.
    other = operands(dtype, 3)
    assert mm(other["a"], other["scale_a"]).shape == (3, N)
    assert torch.equal(mm(x["a"], x["scale_a"]), expected)


@pytest.mark.parametrize("per_token", [False, True])
def test_zero_points(per_token: bool) -> None:
    x = operands(torch.int8)
    sums = x["b"].sum(0, dtype=torch.int32)
    azp = x["azp"] if per_token else None
    mm = cutlass_w8a8.prepare(x["b"], x["scale_b"], azp_adj=sums)
    expected = cutlass_w8a8.scaled_mm_azp(x["a"], x["b"], x["scale_a"], x["scale_b"], torch.bfloat16, sums, azp)
    assert torch.equal(mm(x["a"], x["scale_a"], azp), expected)


def test_compiles_without_breaks() -> None:
    x = operands(torch.int8)
    mm = cutlass_w8a8.prepare(x["b"], x["scale_b"])
    compiled = torch.compile(mm.__call__, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x["a"], x["scale_a"]), mm(x["a"], x["scale_a"]))


def test_wrong_arguments() -> None:
    x = operands(torch.int8)
    mm = cutlass_w8a8.prepare(x["b"], x["scale_b"])
    with pytest.raises(ArgumentError, match=r"prepare\(\) got no azp_adj"):
        mm(x["a"], x["scale_a"], x["azp"])
    with pytest.raises(ArgumentError, match="a is a str"):
        mm("a", x["scale_a"])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="scale_a has shape"):
        mm(x["a"], torch.rand(2))
    with pytest.raises(ArgumentError, match="requires a gradient"):
        mm(x["a"], x["scale_a"].clone().requires_grad_())
    with pytest.raises(ArgumentError, match="b is a int"):
        cutlass_w8a8.prepare(3, x["scale_b"])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="overlap is 'all'; pass 'none', 'launch', 'weights'"):
        cutlass_w8a8.prepare(x["b"], x["scale_b"], overlap="all")
    with pytest.raises(ArgumentError, match="overlap is 'all'"):
        cutlass_w8a8.scaled_mm(x["a"], x["b"], x["scale_a"], x["scale_b"], overlap="all")
    with pytest.raises(ArgumentError, match="batch_invariant is 1; pass True, False, or None"):
        cutlass_w8a8.scaled_mm(x["a"], x["b"], x["scale_a"], x["scale_b"], batch_invariant=1)  # type: ignore[arg-type]


def test_weights_may_be_parameters_without_gradients_being_asked() -> None:
    """An fp8 parameter requires a gradient by default, and is a weight all the same."""
    x = operands(torch.float8_e4m3fn)
    weight = torch.nn.Parameter(x["b"].t()).t()
    scale = torch.nn.Parameter(x["scale_b"])
    with torch.no_grad():
        mm = cutlass_w8a8.prepare(weight, scale)
        expected = cutlass_w8a8.scaled_mm(x["a"], x["b"], x["scale_a"], x["scale_b"])
        assert torch.equal(mm(x["a"], x["scale_a"]), expected)
    with pytest.raises(ArgumentError, match="requires a gradient"):
        cutlass_w8a8.prepare(weight, scale)


def test_weights_are_checked_when_they_are_given() -> None:
    x = operands(torch.int8)
    for change, message in (
        ({"b": x["b"].contiguous()}, "b is not contiguous along K"),
        ({"b": x["b"].float()}, "dtype"),
        ({"scale_b": torch.rand(5)}, "scale_b has shape"),
        ({"bias": x["bias"].float()}, "bias has dtype"),
        ({"azp_adj": torch.rand(N)}, "azp_adj has dtype"),
        ({"out_dtype": torch.int32}, "out_dtype"),
    ):
        given: dict[str, Any] = {"b": x["b"], "scale_b": x["scale_b"], **change}
        with pytest.raises(ArgumentError, match=message):
            cutlass_w8a8.prepare(**given)


def test_copies_and_pickles() -> None:
    x = operands(torch.int8)
    mm = cutlass_w8a8.prepare(x["b"], x["scale_b"], bias=x["bias"], config="64x16x256_ws_swap")
    expected = mm(x["a"], x["scale_a"])
    for other in (copy.deepcopy(mm), pickle.loads(pickle.dumps(mm))):
        assert torch.equal(other(x["a"], x["scale_a"]), expected)
    assert repr(mm).startswith("PreparedMM(k=64, n=24, torch.int8 to torch.bfloat16, bias=True, azp=False")


def test_a_traced_call_refuses_zero_points_without_sums() -> None:
    x = operands(torch.int8)
    mm = cutlass_w8a8.prepare(x["b"], x["scale_b"])
    with pytest.raises(Exception, match="got no azp_adj"):
        torch.compile(mm.__call__, backend="eager")(x["a"], x["scale_a"], x["azp"])


def test_explain_knows_the_options() -> None:
    x = operands(torch.float8_e4m3fn)
    given = x["a"], x["b"], x["scale_a"], x["scale_b"]
    assert cutlass_w8a8.explain(*given, capability=(9, 0), overlap="weights", batch_invariant=True).spec
    with pytest.raises(ConfigError, match="changes the bits of fp8 sums"):
        cutlass_w8a8.explain(*given, capability=(9, 0), config=SLICED, batch_invariant=True)
    with cutlass_w8a8.batch_invariant():
        with pytest.raises(ConfigError, match="changes the bits of fp8 sums"):
            cutlass_w8a8.explain(*given, capability=(9, 0), config=SLICED)
        assert cutlass_w8a8.explain(*given, capability=(9, 0), config=SLICED, batch_invariant=False).spec
    with pytest.raises(ArgumentError, match="batch_invariant is 'no'; pass True, False, or None"):
        cutlass_w8a8.explain(*given, capability=(9, 0), batch_invariant="no")  # type: ignore[arg-type]


def test_zero_points_without_sums_are_refused_each_time() -> None:
    """What was kept for the call without them is not used for it."""
    x = operands(torch.int8)
    out = torch.empty(M, N, dtype=torch.bfloat16)
    given = x["a"], x["b"], x["scale_a"], x["scale_b"]
    torch.ops.cutlass_w8a8.scaled_mm_out(out, *given)
    with pytest.raises(ArgumentError, match="azp is given without azp_adj"):
        torch.ops.cutlass_w8a8.scaled_mm_out(out, *given, azp=x["azp"])


def test_context_of_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls see it at once, prepared ones as well, and what was kept before it is not used within it."""
    seen: list[bool] = []
    real = calls.resolve

    def resolve(*given: Any) -> calls.Resolved:
        seen.append(given[9].batch_invariant)
        return real(*given)

    monkeypatch.setattr(calls, "resolve", resolve)
    x = operands(torch.float8_e4m3fn)
    mm = cutlass_w8a8.prepare(x["b"], x["scale_b"])
    mm(x["a"], x["scale_a"])
    mm(x["a"], x["scale_a"])
    with cutlass_w8a8.batch_invariant():
        mm(x["a"], x["scale_a"])
        cutlass_w8a8.scaled_mm(x["a"], x["b"], x["scale_a"], x["scale_b"])
        cutlass_w8a8.scaled_mm(x["a"], x["b"], x["scale_a"], x["scale_b"], batch_invariant=False)
        with cutlass_w8a8.batch_invariant():
            pass
        assert options(None, "none", None).batch_invariant
    assert not options(None, "none", None).batch_invariant
    mm(x["a"], x["scale_a"])
    assert seen == [False, True, True, False, False]


def test_what_divides_k() -> None:
    def asked(dtype: torch.dtype, k: int, **wanted: Any) -> str:
        x = operands(dtype, k=k)
        request = check(x["a"], x["b"], x["scale_a"], x["scale_b"], torch.bfloat16, None, None, None, None)
        return choose(request, SM90, KernelConfig.parse(SLICED), overlap=Overlap.WEIGHTS, **wanted).config.name

    assert asked(torch.float8_e4m3fn, 64) == KernelConfig.parse(SLICED).name
    with pytest.raises(ConfigError, match="divides K among 2 blocks, so K must be a multiple of 32; it is 80"):
        asked(torch.float8_e4m3fn, 80)
    with pytest.raises(ConfigError, match="changes the bits of fp8 sums"):
        asked(torch.float8_e4m3fn, 64, batch_invariant=True)
    x = operands(torch.int8)
    request = check(x["a"], x["b"], x["scale_a"], x["scale_b"], torch.bfloat16, None, None, None, None)
    with pytest.raises(ConfigError, match="needs more blocks than a launch has for 1100000x24"):
        choose(replace(request, m=1_100_000), SM90, KernelConfig.parse("64x16x256_ws_swap"))
    # int8 sums are exact.
    assert asked(torch.int8, 64, batch_invariant=True) == KernelConfig.parse(SLICED).name


def test_prepares_for_a_gpu_that_is_not_there() -> None:
    """Traced on a machine without CUDA, there is no stream to wait for."""
    assert not torch.cuda.is_initialized()
    with FakeTensorMode():
        b = torch.empty(16, 32, dtype=torch.int8, device="cuda").t()
        mm = cutlass_w8a8.prepare(b, torch.empty(1, device="cuda"))
        y = mm(torch.empty(5, 32, dtype=torch.int8, device="cuda"), torch.empty(5, 1, device="cuda"))
    assert (y.shape, y.device.type, y.dtype) == ((5, 16), "cuda", torch.bfloat16)
