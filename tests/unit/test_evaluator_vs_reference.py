"""The public functions on CPU tensors, that is each tree interpreted, against the closed formulas: bit for bit."""

from __future__ import annotations

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8.evt.epilogues import FORMULAS, EpilogueSpec
from tests import cases
from tests import reference as ref
from tests.cases import Combination
from tests.harness import call

SHAPES: tuple[cases.Shape, ...] = (
    *((m, 16 * (1 + m % 4), 16 * (1 + m % 5)) for m in range(1, 18)),
    *cases.SMALL_SHAPES,
    (2, 16, 4112),
    (64, 128, 256),
    (128, 128, 128),
)


@pytest.mark.parametrize("combination", cases.combinations(), ids=lambda c: c.name)
def test_cpu_matches_reference(combination: Combination) -> None:
    for index, shape in enumerate(SHAPES):
        layout = cases.LAYOUTS[index % len(cases.LAYOUTS)]
        inputs = cases.make_inputs(shape, combination.operand_dtype, layout, seed=index, wide=index % 2 == 1)
        epilogue = cases.make_epilogue(combination, inputs, form=index)
        acc = ref.exact_accumulator(inputs.a, inputs.b)
        if epilogue.azp_adj is not None:
            acc = ref.subtract_zero_point(acc, epilogue.azp, epilogue.azp_adj)
        expected = ref.contract(acc, epilogue.scale_a, epilogue.scale_b, epilogue.bias, combination.out_dtype)
        output = cases.make_output(*shape[:2], combination.out_dtype, layout)
        got = call(combination, inputs, epilogue, out=output.view if index % 2 else None)
        assert got.dtype is combination.out_dtype
        assert torch.equal(cases.bits(got), cases.bits(expected)), shape
        assert output.touched() == 0


def test_every_epilogue_is_among_the_combinations() -> None:
    covered = {EpilogueSpec.parse(combination.epilogue) for combination in cases.combinations()}
    assert {spec.formula for spec in covered} == set(FORMULAS)
    assert len(covered) == 4 * len(FORMULAS)


def test_leading_batch_dimensions() -> None:
    inputs = cases.make_inputs((12, 32, 48), cases.INT8)
    flat = cutlass_w8a8.scaled_mm(inputs.a, inputs.b, inputs.scale_a, inputs.scale_b)
    batched = cutlass_w8a8.scaled_mm(inputs.a.view(3, 4, 48), inputs.b, inputs.scale_a, inputs.scale_b)
    assert batched.shape == (3, 4, 32)
    assert torch.equal(batched.view(12, 32), flat)
