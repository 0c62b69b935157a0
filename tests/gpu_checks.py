"""Checks of what surrounds a kernel: graphs, streams, threads, reused arguments, torch.compile, opcheck."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.util import find_spec

import torch

import cutlass_w8a8
from cutlass_w8a8.arch import match
from tests import cases
from tests.cases import Combination, Epilogue, Inputs, Shape
from tests.grid import Expectation, accumulators
from tests.harness import INVARIANT, Check, Plan, bit_class, call
from tests.harness import chosen as actual

COMMON = (
    Combination("e4m3", "bf16"),
    Combination("e4m3", "fp16", bias=True, scale_a="tensor"),
    Combination("int8", "bf16", bias=True),
    Combination("int8", "fp32", azp="token", bias=True, scale_b="tensor"),
)
"""One combination of each kind, used where a plan names none."""


def representatives(plan: Plan, prefer_dispatch: bool = False) -> list[tuple[Combination, str | None]]:
    """One combination per operand type and zero point out of ``plan``.

    With its last configuration, or with dispatch's choice if that is wanted and in the plan.
    """
    chosen: dict[tuple[str, str], tuple[Combination, str | None]] = {}
    for combination, configs in plan.items():
        config = None if prefer_dispatch and None in configs else [c for c in configs if c != INVARIANT][-1]
        chosen.setdefault((combination.operand, combination.azp), (combination, config))
    return list(chosen.values())


def reference_output(combination: Combination, inputs: Inputs, epilogue: Epilogue, config: str | None) -> Expectation:
    """The expectation for one call, without the hardware model."""
    kind = bit_class(combination, actual(combination, inputs, epilogue, config)).partition(":")[0]
    return Expectation.of(combination, epilogue, accumulators(inputs, {kind}, with_model=False), kind)


def _copy(target: Inputs, source: Inputs) -> None:
    """Overwrite the operands of ``target`` in place, byte by byte (fp8 has few operators)."""
    target.a.view(torch.uint8).copy_(source.a.view(torch.uint8))
    target.b.t().view(torch.uint8).copy_(source.b.t().view(torch.uint8))
    for name in ("scale_a", "scale_b", "azp", "azp_adj", "azp_adj_folded"):
        value = getattr(source, name)
        if value is not None:
            getattr(target, name).copy_(value)
    for name, bias in source.bias.items():
        target.bias[name].copy_(bias)


def graph(plan: Plan) -> list[Check]:
    """A captured graph replayed after its inputs changed gives what eager calls give on the new inputs."""
    check = Check("graph", "capture and replay on changed inputs")
    shapes: tuple[Shape, ...] = ((17, 272, 272), (64, 1040, 528), (257, 304, 208))
    for combination, config in representatives(plan):
        static = [cases.make_inputs(s, combination.operand_dtype, seed=i, device="cuda") for i, s in enumerate(shapes)]
        # Even forms alias the vectors of the inputs, so that copying into these reaches the captured pointers.
        epilogues = [cases.make_epilogue(combination, inputs, form=0) for inputs in static]
        pairs = list(zip(static, epilogues, strict=True))

        def run(pairs: list[tuple[Inputs, Epilogue]] = pairs) -> list[torch.Tensor]:
            return [call(combination, x, e, config=config) for x, e in pairs]  # noqa: B023 - called at once

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            outs = run()
        for replay in range(3):
            for i, (shape, inputs) in enumerate(zip(shapes, static, strict=True)):
                seed = 10 + 3 * replay + i
                _copy(inputs, cases.make_inputs(shape, combination.operand_dtype, seed=seed, device="cuda"))
            for out in outs:
                out.fill_(float("nan"))
            captured.replay()
            for shape, out, inputs, epilogue, eager in zip(shapes, outs, static, epilogues, run(), strict=True):
                title = f"{combination.name} {shape} replay {replay}"
                check.record(torch.equal(cases.bits(out), cases.bits(eager)), f"{title}: unlike eager")
                expectation = reference_output(combination, inputs, epilogue, config)
                check.record(not bool(expectation.wrong(out).any()), f"{title}: unlike the reference")
    return [check]


def streams(plan: Plan) -> list[Check]:
    """A call runs on the current stream: it sees what that stream wrote before, not what is there now."""
    check = Check("graph", "non-default stream")
    for combination, config in representatives(plan):
        shape = (33, 528, 1040)
        target, source = (
            cases.make_inputs(shape, combination.operand_dtype, seed=seed, device="cuda") for seed in (0, 1)
        )
        epilogue = cases.make_epilogue(combination, target, form=0)
        call(combination, target, epilogue, config=config)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            _copy(target, source)
            out = call(combination, target, epilogue, config=config)
        stream.synchronize()
        wrong = reference_output(combination, target, epilogue, config).wrong(out)
        check.record(not bool(wrong.any()), f"{combination.name}: {int(wrong.sum())} wrong")
    return [check]


def threads(plan: Plan, count: int = 8, repeats: int = 40) -> list[Check]:
    """Threads calling at once, each on its own stream and shapes, disturb neither each other's outputs nor state."""
    check = Check("graph", f"{count} threads at once")
    chosen = representatives(plan)
    failures: list[str] = []
    passed = [0]
    lock = threading.Lock()

    def work(number: int) -> None:
        try:
            combination, config = chosen[number % len(chosen)]
            shape = cases.SMALL_SHAPES[number % len(cases.SMALL_SHAPES)]
            with torch.cuda.stream(torch.cuda.Stream()):
                inputs = cases.make_inputs(shape, combination.operand_dtype, seed=number, device="cuda")
                epilogue = cases.make_epilogue(combination, inputs, form=number)
                expectation = reference_output(combination, inputs, epilogue, config)
                for _ in range(repeats):
                    wrong = int(expectation.wrong(call(combination, inputs, epilogue, config=config)).sum())
                    with lock:
                        if wrong:
                            failures.append(f"thread {number}, {combination.name} {shape}: {wrong} wrong")
                        else:
                            passed[0] += 1
        except Exception as error:  # reported by the caller
            with lock:
                failures.append(f"thread {number}: {type(error).__name__}: {error}")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    check.passed = passed[0]
    for failure in failures:
        check.record(False, failure)
    return [check]


def devices(plan: Plan, repeats: int = 20) -> list[Check]:
    """Tensors of several GPUs in one process: each goes by its own device, by another architecture too.

    The second device has portable kernels forced on it, so that calls in turn need different kernels. Without a
    second device nothing is checked.
    """
    check = Check("devices", "calls in turn on several GPUs")
    count = torch.cuda.device_count()
    check.details["GPUs"] = count
    combinations = [(c, config) for c, config in representatives(plan, prefer_dispatch=True) if c.operand == "int8"]
    if count < 2:
        return [check]
    with cutlass_w8a8.use_arch("sm80", 1):
        for combination, config in combinations:
            sides = []
            for index in range(count):
                inputs = cases.make_inputs(
                    (130, 528, 1040), combination.operand_dtype, seed=index, device=f"cuda:{index}"
                )
                epilogue = cases.make_epilogue(combination, inputs, form=0)
                sides.append((inputs, epilogue, reference_output(combination, inputs, epilogue, config)))
            for repeat in range(repeats):
                # The current device is one or the other; what decides is where the tensors are.
                with torch.cuda.device(repeat % count):
                    outs = [call(combination, inputs, epilogue) for inputs, epilogue, _ in sides]
                for index, (out, side) in enumerate(zip(outs, sides, strict=True)):
                    title = f"{combination.name} on cuda:{index}, call {repeat}"
                    check.record(out.get_device() == index, f"{title}: result on {out.device}")
                    check.record(not bool(side[2].wrong(out).any()), f"{title}: unlike the reference")
            for index, (inputs, epilogue, _) in enumerate(sides):
                chosen = cutlass_w8a8.explain(
                    inputs.a, inputs.b, epilogue.scale_a, epilogue.scale_b, combination.out_dtype, epilogue.bias,
                    epilogue.azp_adj, epilogue.azp,
                )  # fmt: skip
                expected = "sm80" if index == 1 else match(torch.cuda.get_device_capability(index)).arch.name
                check.record(chosen.spec.arch.name == expected, f"cuda:{index} served by {chosen.spec.arch.name}")
    return [check]


def arguments(plan: Plan, device: str = "cuda", calls: int = 400) -> list[Check]:
    """The same kernel called in random order with different pointers, strides, sizes and outputs.

    Arguments prepared for one call and reused for another would show, as would a dependence on the previous call.
    """
    check = Check("arguments", "one kernel, changing pointers, strides and sizes")
    rng = random.Random(4)
    for combination, config in representatives(plan):
        pool: list[tuple[str, Inputs, Epilogue, Expectation]] = []
        for number, shape in enumerate((*cases.SMALL_SHAPES, *cases.SMALL_SHAPES)):
            layout = cases.LAYOUTS[number % 3]
            inputs = cases.make_inputs(shape, combination.operand_dtype, layout, seed=number, device=device)
            epilogue = cases.make_epilogue(combination, inputs, form=number)
            expectation = reference_output(combination, inputs, epilogue, config)
            pool.append((f"{combination.name} {shape} {layout}", inputs, epilogue, expectation))
        counts: list[tuple[str, torch.Tensor]] = []
        for number in range(calls):
            title, inputs, epilogue, expectation = rng.choice(pool)
            m, n, _ = inputs.shape
            layout = rng.choice(cases.LAYOUTS)
            output = cases.make_output(m, n, combination.out_dtype, layout, device)
            out = call(combination, inputs, epilogue, out=output.view if number % 4 else None, config=config)
            wrong = expectation.wrong(out).sum() + (output.touched() if number % 4 else 0)
            counts.append((f"call {number}, {title}, output {layout}", wrong))
        for (title, _), wrong in zip(counts, torch.stack([c for _, c in counts]).tolist(), strict=True):
            check.record(wrong == 0, f"{title}: {wrong} wrong or outside")
    return [check, *_refused(plan, device)]


def _refused(plan: Plan, device: str) -> list[Check]:
    """What only addresses can tell: outputs over inputs, and pointers off their 16-byte boundary, raise."""
    check = Check("arguments", "overlapping and misaligned operands are refused")
    if device == "cpu":
        return []
    for combination, config in representatives(plan):
        inputs = cases.make_inputs(
            (16, 16, 16 * combination.out_dtype.itemsize), combination.operand_dtype, device=device
        )
        epilogue = cases.make_epilogue(combination, inputs)
        flat = torch.empty(4096, dtype=torch.uint8, device=device)
        size = combination.out_dtype.itemsize * 256
        for start in (0, 16, size - 16, size):
            a = flat[start : start + inputs.a.numel()].view(inputs.a.dtype).view(inputs.a.shape)
            moved = replace(inputs, a=a)
            out = flat[:size].view(combination.out_dtype).view(16, 16)
            try:
                call(combination, moved, epilogue, out=out, config=config)
                refused = False
            except cutlass_w8a8.ArgumentError as error:
                refused = "shares memory" in str(error)
            check.record(refused == (start < size), f"{combination.name}: a {start} bytes into out of {size} bytes")
        for off in (1, 8, 16):
            a = flat[off : off + inputs.a.numel()].view(inputs.a.dtype).view(inputs.a.shape)
            try:
                call(combination, replace(inputs, a=a), epilogue, config=config)
                refused = False
            except cutlass_w8a8.ArgumentError as error:
                refused = "boundary" in str(error)
            check.record(refused == bool(off % 16), f"{combination.name}: a {off} bytes past a boundary")
    return [check]


def compiled(plan: Plan, device: str = "cuda") -> list[Check]:
    """A function that calls the operator compiles as one graph, for fixed and for varying M, with equal results."""
    usable = device == "cpu" or find_spec("triton") is not None
    backend = "inductor" if usable else "aot_eager"
    check = Check("compile", "torch.compile(fullgraph=True)", details={"backend": backend})
    for combination, config in representatives(plan, prefer_dispatch=True):
        for dynamic in (False, True):
            torch._dynamo.reset()
            traced = torch.compile(_function(combination, config), fullgraph=True, dynamic=dynamic, backend=backend)
            for m in (16, 33, 129) if dynamic else (17,):
                inputs = cases.make_inputs((m, 272, 528), combination.operand_dtype, seed=m, device=device)
                epilogue = cases.make_epilogue(combination, inputs)
                tensors = (inputs.a, inputs.b, *(getattr(epilogue, f.name) for f in fields(epilogue)))
                title = f"{combination.name} M={m} dynamic={dynamic}"
                try:
                    got = traced(*tensors)
                except Exception as error:
                    check.record(False, f"{title}: {type(error).__name__}: {str(error)[:400]}")
                    continue
                check.record(torch.equal(got, _function(combination, config)(*tensors)), f"{title}: unlike eager")
    torch._dynamo.reset()
    return [check]


def _function(combination: Combination, config: str | None) -> Callable[..., torch.Tensor]:
    """A small model around one operator; a new function object each time, since dynamo caches by it."""
    dtype, azp = combination.out_dtype, combination.azp != "none"

    def function(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
        zero_point: torch.Tensor | None,
        azp_adj: torch.Tensor | None,
    ) -> torch.Tensor:
        if azp:
            y = cutlass_w8a8.scaled_mm_azp(a, b, scale_a, scale_b, dtype, azp_adj, zero_point, bias, config=config)
        else:
            y = cutlass_w8a8.scaled_mm(a, b, scale_a, scale_b, dtype, bias, config=config)
        return torch.relu(y) + 1

    return function


def opcheck(plan: Plan, device: str = "cuda") -> list[Check]:
    """torch.library.opcheck of the registered operators."""
    check = Check("compile", "torch.library.opcheck")
    namespace = torch.ops.cutlass_w8a8
    for combination, config in representatives(plan, prefer_dispatch=True):
        named = namespace.scaled_mm if combination.azp == "none" else namespace.scaled_mm_azp
        inputs = cases.make_inputs((17, 48, 80), combination.operand_dtype, device=device)
        epilogue = cases.make_epilogue(combination, inputs)
        given: dict[str, object] = {
            "a": inputs.a,
            "b": inputs.b,
            "scale_a": epilogue.scale_a,
            "scale_b": epilogue.scale_b,
            "out_dtype": combination.out_dtype,
            "bias": epilogue.bias,
            "azp": epilogue.azp,
            "azp_adj": epilogue.azp_adj,
            "config": config,
            "out": cases.make_output(17, 48, combination.out_dtype, "packed", device).view,
        }
        utilities = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        # torch's schema check compares tensors with operations it lacks for fp8; the check below stands in.
        if combination.operand != "e4m3":
            utilities.append("test_schema")
        for op in (named.default, namespace.scaled_mm_out.default):
            args = tuple(given[a.name] for a in op._schema.arguments)
            title = f"{op} on {combination.name}"
            try:
                torch.library.opcheck(op, args, test_utils=utilities)
                before = [cases.bits(x).clone() for x in (inputs.a, inputs.b)]
                op(*args)
                after = [cases.bits(x) for x in (inputs.a, inputs.b)]
                check.record(all(map(torch.equal, before, after)), f"{title}: it changed an input")
            except Exception as error:
                check.record(False, f"{title}: {type(error).__name__}: {str(error)[:600]}")
    return [check]
