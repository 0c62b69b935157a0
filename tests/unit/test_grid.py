"""The proof's own machinery: a kernel with a planted fault must be reported, and a right one must not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import cases, grid
from tests import reference as ref
from tests.cases import Combination, Epilogue, Inputs
from tests.harness import Check, bit_class, load_plan

SHAPES: tuple[cases.Shape, ...] = ((17, 48, 80), (9, 32, 272), (5, 16, 48))
FP8 = Combination("e4m3", "bf16", bias=True)
INT8 = Combination("int8", "fp16", azp="token")
Kernel = Callable[[Combination, Inputs, Epilogue], torch.Tensor]


def modelled(combination: Combination, inputs: Inputs, epilogue: Epilogue) -> torch.Tensor:
    """What a right kernel on Hopper returns."""
    scales = epilogue.scale_a, epilogue.scale_b, combination.out_dtype
    if combination.operand == "int8":
        acc = ref.exact_accumulator(inputs.a, inputs.b)
        return ref.int8_expected(acc, *scales, azp=epilogue.azp, azp_adj=epilogue.azp_adj, bias=epilogue.bias)
    register = ref.hopper_fp8_accumulate(inputs.a, inputs.b).double()
    return ref.contract(register, *scales[:2], epilogue.bias, combination.out_dtype)


def run(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, after: Callable[[torch.Tensor], None] = lambda _: None
) -> dict[str, Check]:
    def call(
        combination: Combination,
        inputs: Inputs,
        epilogue: Epilogue,
        *,
        out: torch.Tensor | None = None,
        config: str | None = None,
    ) -> torch.Tensor:
        result = kernel(combination, inputs, epilogue)
        if out is None:
            return result
        out.copy_(result)
        after(out)
        return out

    monkeypatch.setattr(grid, "call", call)
    checks = grid.Grid({FP8: [None, "a"], INT8: [None, "a"]}, "cpu").run(SHAPES)
    return {check.name: check for check in checks}


def test_right_kernel_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = run(monkeypatch, modelled)
    assert [check.name for check in checks.values() if check.failed] == []
    assert checks[FP8.name].passed == checks[INT8.name].passed == 2 * len(SHAPES)
    assert checks[grid.MODEL_CHECK].passed == 2 * len(SHAPES)
    assert checks["writes stay inside the output"].passed == 8
    assert 0 < float(checks[FP8.name].details["largest error / bound"]) <= 1


@pytest.mark.parametrize("combination", [FP8, INT8])
def test_one_wrong_element_is_found_and_named(monkeypatch: pytest.MonkeyPatch, combination: Combination) -> None:
    def kernel(chosen: Combination, inputs: Inputs, epilogue: Epilogue) -> torch.Tensor:
        out = modelled(chosen, inputs, epilogue)
        if chosen is combination and inputs.shape == SHAPES[1]:
            out[3, 7] += out.abs().max() + 1
        return out

    checks = run(monkeypatch, kernel)
    assert checks[combination.name].failed == 2
    assert "1 of 288 wrong, first at (3, 7)" in checks[combination.name].failures[0]
    assert not checks[INT8.name if combination is FP8 else FP8.name].failed


def test_last_bit_of_an_fp8_output_is_the_models_business(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(combination: Combination, inputs: Inputs, epilogue: Epilogue) -> torch.Tensor:
        out = modelled(combination, inputs, epilogue)
        if combination is FP8:
            cases.bits(out)[0, 0] ^= 1
        return out

    checks = run(monkeypatch, kernel)
    assert checks[grid.MODEL_CHECK].failed == 2 * len(SHAPES)
    assert not checks[INT8.name].failed


def test_writes_outside_and_missing_writes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def overrun(out: torch.Tensor) -> None:
        wider = out.as_strided((out.shape[0], out.shape[1] + 1), out.stride(), out.storage_offset())
        wider[-1, -1] = 0

    checks = run(monkeypatch, modelled, overrun)
    assert checks["writes stay inside the output"].failed == 8
    assert not checks[INT8.name].failed

    def unwritten(out: torch.Tensor) -> None:
        out[-1, -1] = float("nan")

    checks = run(monkeypatch, modelled, unwritten)
    assert checks[FP8.name].failed
    assert checks[INT8.name].failed


def test_exceptions_and_unequal_configurations_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def kernel(combination: Combination, inputs: Inputs, epilogue: Epilogue) -> torch.Tensor:
        if combination is INT8:
            raise RuntimeError("no such kernel")
        calls[0] += 1
        out = modelled(combination, inputs, epilogue)
        if calls[0] % 2:
            cases.bits(out)[0, 0] ^= 1
        return out

    checks = run(monkeypatch, kernel)
    assert checks[INT8.name].failed == 2 * len(SHAPES)
    assert "no such kernel" in checks[INT8.name].failures[0]
    assert checks["same bits from every configuration"].failed == len(SHAPES)


def test_bit_classes() -> None:
    assert bit_class(INT8, "64x64x128_ws_streamk_split4") == "exact"
    assert bit_class(FP8, None) == bit_class(FP8, "64x64x128_1x1_pingpong_swap_s4_swizzle2") == "fast"
    assert bit_class(FP8, "64x64x128_ws_accurate") == "accurate"
    assert bit_class(FP8, "64x16x256_ws_swap_slices4") == "slices4" and bit_class(FP8, "invariant") == "fast"
    assert bit_class(FP8, "64x64x128_ws_streamk_split2") != bit_class(FP8, "64x64x128_ws_streamk_split4")


def test_plan(tmp_path: Path) -> None:
    spec = {"arch": "sm90", "operand": "e4m3", "out": "bf16", "epilogue": FP8.epilogue, "config": "64x16x128_ws"}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([json.dumps(spec), spec, spec | {"config": "64x16x128_ws_swap"}]))
    assert load_plan(path) == {FP8: [None, "invariant", "64x16x128_ws", "64x16x128_ws_swap"]}
    assert load_plan(path, dispatch=False) == {FP8: ["64x16x128_ws", "64x16x128_ws_swap"]}
    path.write_text(json.dumps([spec | {"out": "int8"}]))
    with pytest.raises(ValueError, match="none of the 96"):
        load_plan(path)
