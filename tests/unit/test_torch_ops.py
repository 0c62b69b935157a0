"""The operators registered with torch: what is passed arrives."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8 import torch_ops
from cutlass_w8a8.problem import OVERLAPS

SCALE = torch.ones(1)


@pytest.mark.parametrize("schema", torch_ops.SCHEMAS, ids=lambda schema: schema.partition("(")[0])
def test_defaults_are_those_of_the_functions(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher leaves out arguments that equal the schema's defaults; the functions must fill in the same."""
    functions: dict[str, Any] = {}
    monkeypatch.setattr(torch_ops._library, "define", lambda *_, **__: None)
    monkeypatch.setattr(torch_ops._library, "impl", lambda name, function, _: functions.__setitem__(name, function))
    monkeypatch.setattr(torch.library, "register_fake", lambda *_, **__: None)
    torch_ops._register()
    parsed = torch._C.parse_schema(f"cutlass_w8a8::{schema}")
    function = inspect.signature(functions[schema.partition("(")[0]])
    assert [argument.name for argument in parsed.arguments] == list(function.parameters)
    for argument in parsed.arguments:
        expected = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        assert function.parameters[argument.name].default == expected, argument.name


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_traced_call_overlaps_as_asked(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = torch_ops._run, []

    def watched(*arguments: Any) -> torch.Tensor:
        seen.append(arguments[-2])
        return run(*arguments)

    monkeypatch.setattr(torch_ops, "_run", watched)
    a, b = torch.ones(4, 16, dtype=torch.int8), torch.ones(8, 16, dtype=torch.int8).t()
    traced = torch.compile(
        lambda: cutlass_w8a8.scaled_mm(a, b, SCALE, SCALE, overlap=overlap), backend="aot_eager", fullgraph=True
    )
    assert traced().unique().tolist() == [16]
    assert seen == [overlap]


@pytest.mark.parametrize("overlap", ["none", "launch"])
def test_a_traced_call_that_quantises_overlaps_as_asked(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = torch_ops._run_quantize, []

    def watched(*arguments: Any) -> Any:
        seen.append(arguments[6])
        return run(*arguments)

    monkeypatch.setattr(torch_ops, "_run_quantize", watched)
    x = torch.ones(4, 16)
    traced = torch.compile(
        lambda: cutlass_w8a8.quantize(x, torch.int8, SCALE, overlap=overlap)[0], backend="aot_eager", fullgraph=True
    )
    assert traced().unique().tolist() == [1]
    assert seen == [overlap]
