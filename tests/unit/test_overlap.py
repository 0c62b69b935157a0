"""The way to overlap where none is asked for: one for calls, one for weights that stay, and nowhere a third."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8.arch import SM90
from cutlass_w8a8.dispatch import select
from cutlass_w8a8.dispatch.tables import SCHEMA
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.problem import Problem
from cutlass_w8a8.request import check
from cutlass_w8a8.support import alternatives, choose
from tests.unit.fake_gpu import WHERE, FakeGpu, on_gpu

PACKAGE = Path(cutlass_w8a8.__file__).parent
CONFIGS = {
    "none": "64x16x128_1x1_ws_swap",
    "launch": "64x64x128_1x1_ws_swap",
    "weights": "128x128x128_2x1_pingpong",
}
DEFAULTS = {"DEFAULT_OVERLAP", "CALL_OVERLAP", "CONSTANT_OVERLAP"}


def defaults(tree: ast.AST) -> list[str]:
    """The default of each parameter and field named ``overlap``, as it is written."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            ordinary = [*node.args.posonlyargs, *node.args.args]
            given = zip(ordinary[len(ordinary) - len(node.args.defaults) :], node.args.defaults, strict=True)
            named = [*given, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
            found += [ast.unparse(value) for argument, value in named if argument.arg == "overlap" and value]
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "overlap" and node.value:
            found.append(ast.unparse(node.value))
    return found


def test_no_default_is_written_out() -> None:
    found = {path: defaults(ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))}
    assert sum(map(len, found.values())) > 20
    assert {path: given for path, given in found.items() if set(given) - DEFAULTS} == {}


def test_what_is_chosen_is_what_a_call_runs(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a table that has another kernel for each way to overlap."""
    tables = [
        {"operand": "e4m3", "overlap": mode, "rows": [{"config": config, "cost": [1.0, 1.0, 1.0, 1.0, 1.0]}]}
        for mode, config in CONFIGS.items()
    ]
    head = {"schema": SCHEMA, "device": WHERE.name, "arch": "sm90", "multiprocessors": WHERE.sm_count, "conditions": {}}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(head | {"tables": tables}))
    monkeypatch.setenv("CUTLASS_W8A8_TABLES", str(path))
    monkeypatch.setenv("CUTLASS_W8A8_JIT", "block")
    a, b = (torch.zeros(rows, 256).to(torch.float8_e4m3fn) for rows in (16, 512))
    operands = [on_gpu(each) for each in (a, b.t(), torch.ones(16, 1), torch.ones(1, 512))]
    cutlass_w8a8.scaled_mm(*operands)
    cutlass_w8a8.prepare(operands[1], operands[3])(operands[0], operands[2])
    launch, weights = gpu.ran
    assert CONFIGS["launch"] in launch and CONFIGS["weights"] in weights
    facts = {"sm_count": WHERE.sm_count, "device": WHERE.name}
    request = check(*operands, torch.bfloat16, None, None, None, None)
    assert choose(request, SM90, None, **facts).spec.name == launch
    assert next(alternatives(request, SM90, **facts)).spec.name == launch
    problem = Problem(SM90, 16, 512, 256, DType.E4M3, DType.BF16, EpilogueSpec.of(), **facts)
    assert select(problem).name == CONFIGS["launch"]
