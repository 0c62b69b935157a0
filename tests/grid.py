"""The grid: every shape, combination and configuration against the reference, and promises about equal bits.

Verdicts stay on the device until a shape is done, so that the host never waits for a single kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from tests import cases
from tests import reference as ref
from tests.cases import Combination, Epilogue, Inputs, Output, Shape
from tests.harness import INVARIANT, Check, Plan, bit_class, call, first_mismatch, is_split, k_multiple
from tests.harness import chosen as chosen_config

SECTION = "correctness"
MODEL_CHECK = "fp8 bits as the tensor core is modelled"


@dataclass
class Accumulators:
    """What the accumulator of one set of operands is, or may be, by bit class."""

    exact: torch.Tensor
    errors: dict[str, torch.Tensor]
    models: dict[str, torch.Tensor]


def accumulators(inputs: Inputs, kinds: set[str], with_model: bool) -> Accumulators:
    """The exact accumulator, and for fp8 the error bound and the hardware model of each kind in ``kinds``."""
    exact = ref.exact_accumulator(inputs.a, inputs.b)
    errors, models = {}, {}
    if inputs.a.dtype is cases.FP8:
        for kind in kinds:
            if multistage := re.fullmatch(r"tile(\d+)-(\w+)", kind):
                a, b = _residue_first(inputs.a, inputs.b, int(multistage[1]))
                errors[kind] = ref.fp8_error(a, b, split=multistage[2] != "fast")
                continue
            if sliced := re.fullmatch(r"slices(\d+)", kind):
                errors[kind] = ref.fp8_error_of_slices(inputs.a, inputs.b, int(sliced[1]))
                if with_model:
                    models[kind] = ref.hopper_fp8_accumulate_slices(inputs.a, inputs.b, int(sliced[1]))
                continue
            promotion = ref.PROMOTION if kind == "accurate" else None
            errors[kind] = ref.fp8_error(inputs.a, inputs.b, promotion=promotion, split=kind == "split")
            if with_model and kind != "split":
                models[kind] = ref.hopper_fp8_accumulate(inputs.a, inputs.b, promotion=promotion)
    return Accumulators(exact, errors, models)


def _residue_first(a: torch.Tensor, b: torch.Tensor, tile_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands in the order in which a multistage kernel sums them.

    It takes what K leaves over a multiple of the tile's k first, filled up with zeros to whole instructions.
    """
    residue = a.shape[1] % tile_k
    if not residue % ref.GROUP:
        return a, b
    fill = ref.GROUP - residue % ref.GROUP
    wide_a, wide_b = a.double(), b.double()
    zeros_a, zeros_b = (
        wide.new_zeros(shape) for wide, shape in ((wide_a, (a.shape[0], fill)), (wide_b, (fill, b.shape[1])))
    )
    filled_a = torch.cat((wide_a[:, :residue], zeros_a, wide_a[:, residue:]), dim=1)
    filled_b = torch.cat((wide_b[:residue], zeros_b, wide_b[residue:]), dim=0)
    return filled_a.to(a.dtype), filled_b.to(b.dtype)


@dataclass
class Verdict:
    """Counts of one call, as 0-d tensors on the device; ``ratio`` is the largest error over its bound."""

    wrong: torch.Tensor
    unlike_model: torch.Tensor
    ratio: torch.Tensor


@dataclass
class Expectation:
    """What one combination must return on one set of operands, for configurations of one bit class."""

    expected: torch.Tensor
    low: torch.Tensor | None = None
    high: torch.Tensor | None = None
    model: torch.Tensor | None = None

    @classmethod
    def of(cls, combination: Combination, epilogue: Epilogue, acc: Accumulators, kind: str) -> Expectation:
        scales, out = (epilogue.scale_a, epilogue.scale_b), combination.out_dtype
        if combination.operand == "int8":
            return cls(
                ref.int8_expected(
                    acc.exact, *scales, out, azp=epilogue.azp, azp_adj=epilogue.azp_adj, bias=epilogue.bias
                )
            )
        low, expected, high = ref.fp8_interval(acc.exact, acc.errors[kind], *scales, out, bias=epilogue.bias)
        model = acc.models.get(kind)
        predicted = None if model is None else ref.contract(model.double(), *scales, epilogue.bias, out)
        return cls(expected, low, high, predicted)

    def wrong(self, got: torch.Tensor) -> torch.Tensor:
        """Where ``got`` is not acceptable: other bits (int8), or outside the interval (fp8)."""
        if self.low is None or self.high is None:
            return cases.bits(got) != cases.bits(self.expected)
        return ~((got >= self.low) & (got <= self.high))

    def judge(self, got: torch.Tensor) -> Verdict:
        zero = torch.zeros((), dtype=torch.int64, device=got.device)
        ratio = zero.double()
        if self.low is not None and self.high is not None:
            middle = self.expected.double()
            room = torch.maximum(self.high.double() - middle, middle - self.low.double())
            ratio = torch.where(room > 0, (got.double() - middle).abs() / room, 0.0).amax()
        unlike = zero if self.model is None else (cases.bits(got) != cases.bits(self.model)).sum()
        return Verdict(self.wrong(got).sum(), unlike, ratio)


@dataclass
class Run:
    """One call within a shape, kept until the shape's verdicts are read."""

    combination: Combination
    config: str | None
    expectation: Expectation
    verdict: Verdict
    touched: torch.Tensor
    unequal: torch.Tensor

    @property
    def title(self) -> str:
        return f"{self.combination.name} [{self.config or 'dispatch'}]"


class Grid:
    """Runs a plan over shapes; one `Check` per combination and promise."""

    def __init__(
        self, plan: Plan, device: str, *, with_model: bool = True, aligned: bool = False, fp8_class: str = "fast"
    ) -> None:
        """Take a plan and how its results are to be judged.

        Args:
            plan: what to run.
            device: where.
            with_model: compare fp8 with the hardware model too.
            aligned: keep vectors on 16-byte boundaries, as 2.x kernels demand.
            fp8_class: the bit class of what dispatch chooses for fp8.
        """
        self.fp8_class = fp8_class
        self.plan, self.device, self.with_model = plan, device, with_model
        self.form_step = 2 if aligned else 1
        self.checks: dict[str, Check] = {}

    def check(self, name: str) -> Check:
        return self.checks.setdefault(name, Check(SECTION, name))

    def run(self, shapes: tuple[Shape, ...]) -> list[Check]:
        """All combinations on all shapes; layouts, operand forms and value ranges rotate with the shape."""
        for index, shape in enumerate(shapes):
            for dtype in (cases.FP8, cases.INT8):
                chosen = {c: configs for c, configs in self.plan.items() if c.operand_dtype is dtype}
                if chosen:
                    self._run_shape(index, shape, dtype, chosen)
        return list(self.checks.values())

    def _run_shape(self, index: int, shape: Shape, dtype: torch.dtype, chosen: Plan) -> None:
        layout = cases.LAYOUTS[index % len(cases.LAYOUTS)]
        wide = index % 4 == 3
        inputs = cases.make_inputs(shape, dtype, layout, seed=index, device=self.device, wide=wide)
        epilogues = {
            combination: cases.make_epilogue(combination, inputs, form=(index + number) * self.form_step)
            for number, combination in enumerate(chosen)
        }
        classes = {
            (c, config): self._class(c, inputs, epilogues[c], config)
            for c, configs in chosen.items()
            for config in configs
        }
        acc = accumulators(inputs, {v.partition(":")[0] for v in classes.values()}, self.with_model)
        runs: list[Run] = []
        for combination, configs in chosen.items():
            epilogue = epilogues[combination]
            expectations: dict[str, Expectation] = {}
            first: dict[str, torch.Tensor] = {}
            for config in configs:
                if shape[2] % k_multiple(config):
                    continue
                class_ = classes[combination, config]
                kind = class_.partition(":")[0]
                if kind not in expectations:
                    expectations[kind] = Expectation.of(combination, epilogue, acc, kind)
                output = self._output(combination, shape, layout)
                try:
                    got = call(combination, inputs, epilogue, out=output.view if output else None, config=config)
                except Exception as error:  # whatever it is, it is a failure to report
                    where = f"{combination.name} [{config or 'dispatch'}] {shape} {layout}"
                    self.check(combination.name).record(False, f"{where}: {type(error).__name__}: {error}")
                    continue
                same = first.setdefault(class_, got)
                runs.append(
                    Run(
                        combination,
                        config,
                        expectations[kind],
                        expectations[kind].judge(got),
                        output.touched() if output else torch.zeros((), dtype=torch.int64, device=got.device),
                        (cases.bits(same) != cases.bits(got)).sum(),
                    )
                )
        self._settle(shape, layout, inputs, index, runs)

    def _class(self, combination: Combination, inputs: Inputs, epilogue: Epilogue, config: str | None) -> str:
        if self.fp8_class != "fast" and config in (None, INVARIANT) and combination.operand == "e4m3":
            return self.fp8_class
        return bit_class(combination, chosen_config(combination, inputs, epilogue, config))

    def _output(self, combination: Combination, shape: Shape, layout: str) -> Output | None:
        m, n, _ = shape
        output = cases.make_output(m, n, combination.out_dtype, layout, self.device)
        # Packed cases take the output the operator allocates: likely this memory, so its poison still counts.
        return None if layout == "packed" else output

    def _settle(self, shape: Shape, layout: str, inputs: Inputs, index: int, runs: list[Run]) -> None:
        if not runs:
            return
        counts = torch.stack(
            [torch.stack([r.verdict.wrong, r.touched, r.unequal, r.verdict.unlike_model]).double() for r in runs]
        ).tolist()
        ratios = torch.stack([run.verdict.ratio for run in runs]).tolist()
        for run, (wrong, touched, unequal, unlike), ratio in zip(runs, counts, ratios, strict=True):
            where = f"{run.title} {shape} {layout}"
            values = self.check(run.combination.name)
            values.record(wrong == 0, self._explain(where, run, inputs, index) if wrong else "")
            values.count(f"{layout} calls")
            if run.combination.operand == "e4m3":
                values.largest("largest error / bound", ratio)
            if layout != "packed":
                self.check("writes stay inside the output").record(touched == 0, f"{where}: {touched:.0f} guards")
            if run.config is not None or len(self.plan[run.combination]) > 1:
                self.check("same bits from every configuration").record(unequal == 0, f"{where}: {unequal:.0f}")
            if run.expectation.model is not None:
                self._model(where, run, unlike)

    def _model(self, where: str, run: Run, unlike: float) -> None:
        """fp8 outputs equal the published model of the tensor core, bit for bit."""
        check = self.check(MODEL_CHECK)
        elements = run.expectation.expected.numel()
        check.record(unlike == 0, f"{where}: {unlike:.0f} of {elements} differ")
        check.count("elements", elements)
        check.count("elements that differ", int(unlike))

    def _explain(self, where: str, run: Run, inputs: Inputs, index: int) -> str:
        """Repeat a failed call alone and say what is wrong with it."""
        number = [c for c in self.plan if c.operand == run.combination.operand].index(run.combination)
        epilogue = cases.make_epilogue(run.combination, inputs, form=(index + number) * self.form_step)
        got = call(run.combination, inputs, epilogue, config=run.config)
        expectation = run.expectation
        return f"{where}: {first_mismatch(got, expectation.expected, expectation.wrong(got))}"


def row_invariance(plan: Plan, device: str, shape: Shape = (512, 1024, 2176)) -> list[Check]:
    """The rows of a small batch equal the same rows of a large one, bit for bit."""
    check = Check(SECTION, "rows do not depend on the batch")
    m, n, k = shape
    for combination, configs in plan.items():
        whole = cases.make_inputs((m, n, k), combination.operand_dtype, seed=5, device=device)
        large = cases.make_epilogue(combination, whole)
        for config in configs:
            if combination.operand == "e4m3" and (config is None or is_split(config)):
                continue
            title = f"{combination.name} [{config or 'dispatch'}]"
            if k % k_multiple(config):
                continue
            try:
                reference = call(combination, whole, large, config=config)
                for rows in (1, 3, 17, 64, 200):
                    part = _first_rows(whole, min(rows, m))
                    got = call(combination, part, cases.make_epilogue(combination, part), config=config)
                    same = torch.equal(cases.bits(got), cases.bits(reference[: part.shape[0]]))
                    check.record(same, f"{title}: the first {rows} of {m} rows")
            except Exception as error:
                check.record(False, f"{title}: {type(error).__name__}: {error}")
    return [check]


def _first_rows(inputs: Inputs, rows: int) -> Inputs:
    _, n, k = inputs.shape
    return Inputs(
        shape=(rows, n, k),
        seed=inputs.seed,
        a=inputs.a[:rows],
        b=inputs.b,
        scale_a=inputs.scale_a[:rows],
        scale_b=inputs.scale_b,
        bias=inputs.bias,
        azp=None if inputs.azp is None else inputs.azp[:rows],
        azp_adj=inputs.azp_adj,
        azp_adj_folded=inputs.azp_adj_folded,
    )
