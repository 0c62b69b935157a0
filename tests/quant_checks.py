"""Checks of quantisation on a GPU: bits, order among other kernels, graphs, torch.compile, and how fast it is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch

import cutlass_w8a8
from tests import quant_cases, quant_reference
from tests.harness import Check

SECTION = "quantize"
# How the GEMM that follows may overlap with the quantisation.
CHAIN_OVERLAPS = ("none", "launch", "weights")
CHAIN_SHAPES = ((1, 256, 4096), (17, 512, 1040), (300, 256, 7168), (2048, 256, 512))
WAY_SHAPES = ((4096, 4096), (8192, 8192), (16384, 8192), (4096, 14336))
BANDWIDTH_SHAPES = ((4096, 4096), (4096, 8192), (8192, 8192), (4096, 16384), (4096, 28672), (16384, 4096), (1024, 8192))
# Below this much data a launch is more than its bytes.
JUDGED_ELEMENTS = 1 << 24
COPY_SHARE = 0.8
# So much is gone through before a buffer comes again that none of it is in the L2 cache any more.
ROTATION_BYTES = 512 << 20


def run(device: str) -> list[Check]:
    """All of them; on the CPU those that need no GPU."""
    if device == "cpu":
        return correctness(device, limit=1 << 14) + ways(device, limit=1 << 14)
    return [
        *correctness(device),
        *ways(device),
        *huge(device),
        *order(device),
        *handed_on(device),
        *chain(device),
        *graph(device),
        *compiled(device),
        *bandwidth(device),
        *way_bandwidth(device),
        *latency(device),
        *way_latency(device),
        *host(device),
    ]


def correctness(device: str, limit: int = quant_cases.LARGEST_CASE, step: int = 1) -> list[Check]:
    """Every shape, type and layout against the closed form, to the bit."""
    checks = {source: Check(SECTION, f"{source} to both types, to the bit") for source in quant_cases.SOURCES}
    for m, k, source, layout, overlap in quant_cases.cases(limit, step):
        quant_cases.compare(checks[source], m, k, source, layout, overlap, device)
    return list(checks.values())


def ways(device: str, limit: int = quant_cases.LARGEST_CASE, step: int = 1) -> list[Check]:
    """The other schemes likewise, each shape, type and layout with two of them in turn."""
    checks = {
        source: Check(SECTION, f"{source}: zero points, tensors, given scales, to the bit")
        for source in quant_cases.SOURCES
    }
    for number, case in enumerate(quant_cases.cases(limit, step)):
        quant_cases.compare_ways(checks[case[2]], number, case, device)
    return list(checks.values())


def huge(device: str) -> list[Check]:
    """More than 2^31 elements, in rows of odd length without gaps: the extreme lies last, and the last are right."""
    check = Check(SECTION, "more than 2^31 elements")
    m, k = 131101, 16385
    x = torch.zeros(m, k, dtype=torch.bfloat16, device=device)
    some = torch.randn(64, k, device=device).bfloat16()
    x[:64], x[-64:] = some, some
    x[-1, -1] = 200.0
    for scheme, target in quant_cases.WAYS:
        options: dict[str, Any] = quant_cases.given(scheme, 0, device)
        found = quant_cases.quantize(x, target, scheme, **options)
        for what, part in (("first", slice(None, 64)), ("last", slice(-64, None))):
            # The last rows hold the extremes of all.
            wanted = quant_reference.quantize(x[-64:], target, scheme, **options)
            if what == "first" and found[1].numel() > 1:
                wanted = quant_reference.quantize(x[:64], target, scheme)
            codes = wanted[0]
            if what == "first" and found[1].numel() == 1:
                zero = wanted[2] if len(found) == 3 else None
                codes = quant_reference.quantize(x[:64], target, "static", wanted[1].view(torch.float32), zero)[0]
            check.record(torch.equal(found[0][part].view(torch.uint8), codes), f"{scheme} to {target}: {what} rows")
            scale = found[1] if found[1].numel() == 1 else found[1][part]
            check.record(torch.equal(scale.view(torch.int32), wanted[1]), f"{scheme} to {target}: {what} scales")
        middle = found[0][64:-64].view(torch.uint8)
        code = int(found[2].reshape(-1)[100 % found[2].numel()]) & 0xFF if len(found) == 3 else 0
        check.record(bool((middle == code).all()), f"{scheme} to {target}: zeros between")
        del found, middle
    return [check]


def order(device: str) -> list[Check]:
    """It reads nothing before what went before has written it, nor does what follows write before it has read."""
    check = Check(SECTION, "order among other kernels of a stream")
    for scheme, target in quant_cases.WAYS:
        options: dict[str, Any] = quant_cases.given(scheme, 0, device)
        names = ("out",) if options else ("out", "scale_out", "azp_out")
        for m, k in ((1, 4096), (64, 8192), (512, 4096), (2048, 8192), (3, 4097)):
            sources = [quant_cases.values(scheme, m, k, torch.bfloat16, seed, device) for seed in range(16)]
            expected = [quant_cases.quantize(x, target, scheme, **options) for x in sources]
            torch.cuda.synchronize()
            x = torch.empty_like(sources[0])
            found = [tuple(torch.empty_like(each) for each in wanted[: len(names)]) for wanted in expected]
            for number, (source, into) in enumerate(zip(sources, found, strict=True)):
                x.copy_(source)
                overlap = ("none", "launch")[number % 2]
                buffers = dict(zip(names, into, strict=False))
                quant_cases.quantize(x, target, scheme, overlap=overlap, **options, **buffers)
                x.fill_(3.0)
            torch.cuda.synchronize()
            for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
                same = _same(got, wanted[: len(names)])
                check.record(same, f"{m}x{k} to {target}, {scheme}, round {number}")
    return [check]


def chain(device: str) -> list[Check]:
    """Quantisation and GEMM at once give what they give one by one, in a graph too."""
    check = Check(SECTION, "quantise, then multiply")
    for target in quant_cases.TARGETS:
        if not cutlass_w8a8.is_supported(torch.cuda.get_device_capability(), target):
            continue
        for m, n, k in CHAIN_SHAPES:
            weight = torch.randn(n, k, device=device)
            b, scale_b = cutlass_w8a8.quantize_per_token(weight, target)
            inputs = [torch.randn(m, k, device=device).bfloat16() * (seed + 1) for seed in range(8)]
            for overlap in CHAIN_OVERLAPS:

                def multiply(q: torch.Tensor, scale: torch.Tensor, overlap: str = overlap) -> torch.Tensor:
                    return cutlass_w8a8.scaled_mm(q, b.t(), scale, scale_b, overlap=overlap)  # noqa: B023 - called at once

                expected = []
                for x in inputs:
                    q, scale = cutlass_w8a8.quantize_per_token(x, target, overlap="none")
                    torch.cuda.synchronize()
                    expected.append(multiply(q, scale))
                    torch.cuda.synchronize()
                found = _chained(inputs, target, multiply)
                captured, static, outs = _capture(lambda x: _chained(x, target, multiply), inputs)  # noqa: B023
                for _ in range(3):
                    for out in outs:
                        out.fill_(float("nan"))
                    captured.replay()
                del static
                torch.cuda.synchronize()
                for kind, results in (("eager", found), ("graph", outs)):
                    same = all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
                    check.record(same, f"{m}x{n}x{k} {target} {overlap} {kind}")
    return [check]


def _chained(
    inputs: Sequence[torch.Tensor],
    target: torch.dtype,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Each input through one and the same buffers, so that every kernel has something to wait for."""
    x = torch.empty_like(inputs[0])
    q = torch.empty(x.shape, dtype=target, device=x.device)
    scale = torch.empty(x.shape[0], 1, device=x.device)
    results = []
    for source in inputs:
        x.copy_(source)
        cutlass_w8a8.quantize_per_token(x, target, out=q, scale=scale, overlap="launch")
        results.append(multiply(q, scale))
    return results


def handed_on(device: str) -> list[Check]:
    """Scales that one kernel finds and the next is given, through buffers that all share, eager and in a graph."""
    check = Check(SECTION, "scales found by one kernel and given to the next")
    for target in quant_cases.TARGETS:
        for azp in (False, True) if target is torch.int8 else (False,):
            for m, k in ((1, 4096), (64, 8192), (3, 4097), (2048, 8192)):
                sources = [torch.randn(m, k, device=device).bfloat16() * (seed + 1) for seed in range(6)]
                for overlap in ("launch", "none"):

                    def pass_on(
                        sources: list[torch.Tensor],
                        overlap: str = overlap,
                        azp: bool = azp,
                        target: torch.dtype = target,
                    ) -> list[tuple[torch.Tensor, ...]]:
                        return _passed_on(sources, target, azp, overlap)

                    expected = _passed_on(sources, target, azp, "none", wait=True)
                    found = pass_on(sources)
                    captured, _, outs = _capture(pass_on, sources)
                    for _ in range(3):
                        for each in outs:
                            for out in each:
                                out.view(torch.uint8).fill_(quant_cases.POISON)
                        captured.replay()
                    torch.cuda.synchronize()
                    for kind, results in (("eager", found), ("graph", outs)):
                        same = all(_same(got, wanted) for got, wanted in zip(results, expected, strict=True))
                        check.record(same, f"{m}x{k} to {target}, azp {azp}, {overlap}, {kind}")
    return [check]


def _passed_on(
    sources: Sequence[torch.Tensor], target: torch.dtype, azp: bool, overlap: str, wait: bool = False
) -> list[tuple[torch.Tensor, ...]]:
    """Each source quantised by the scale of the one before, and a copy of what that gave."""
    q = torch.empty(sources[0].shape, dtype=target, device=sources[0].device)
    scale = torch.empty(1, device=q.device)
    zero = {"azp_out": torch.empty(1, dtype=torch.int32, device=q.device)} if azp else {}
    results = []
    for before, source in pairwise(sources):
        found = cutlass_w8a8.quantize(
            before, target, granularity="tensor", symmetric=not azp, out=q, scale_out=scale, **zero, overlap=overlap
        )
        if wait:
            torch.cuda.synchronize()
        cutlass_w8a8.quantize(source, target, *found[1:], out=q, overlap=overlap)
        if wait:
            torch.cuda.synchronize()
        results.append((q.clone(), *(each.clone() for each in found[1:])))
    return results


def graph(device: str) -> list[Check]:
    """A captured graph replayed after its inputs changed gives what eager calls give on the new inputs."""
    check = Check(SECTION, "capture and replay on changed inputs")
    shapes = ((1, 4096), (33, 8192), (1000, 1040), (7, 4097))
    for scheme, target in quant_cases.WAYS:
        for overlap in ("launch", "none"):
            static = [quant_cases.values(scheme, m, k, torch.float16, 0, device) for m, k in shapes]
            given = quant_cases.given(scheme, 0, device)

            def call(
                x: list[torch.Tensor],
                target: torch.dtype = target,
                scheme: str = scheme,
                options: dict[str, Any] = given | {"overlap": overlap},
            ) -> list[Any]:
                return [quant_cases.quantize(each, target, scheme, **options) for each in x]

            captured, _, outs = _capture(call, static)
            for replay in range(3):
                for x, (m, k) in zip(static, shapes, strict=True):
                    x.copy_(quant_cases.values(scheme, m, k, torch.float16, replay + 1, device))
                for scale in given.values():
                    scale.add_(replay)
                for out in outs:
                    for each in out[: 1 if given else 3]:
                        each.view(torch.uint8).fill_(quant_cases.POISON)
                captured.replay()
                for got, wanted, shape in zip(outs, call(static), shapes, strict=True):
                    check.record(_same(got, wanted), f"{shape} to {target} {scheme} {overlap}, replay {replay}")
    return [check]


def compiled(device: str) -> list[Check]:
    """torch.compile takes the call whole, and it gives the same."""
    check = Check(SECTION, "torch.compile and opcheck")
    backend = "inductor" if find_spec("triton") else "aot_eager"
    for target in quant_cases.TARGETS:
        for x in (torch.randn(2, 5, 4096, device=device).bfloat16(), torch.randn(3, 100, device=device)):
            function: Callable[..., Any] = torch.compile(
                lambda x, target=target: cutlass_w8a8.quantize_per_token(x + 1, target), fullgraph=True, backend=backend
            )
            check.record(_same(function(x), cutlass_w8a8.quantize_per_token(x + 1, target)), f"{x.shape} to {target}")
            tests = ("test_autograd_registration", "test_faketensor")
            try:
                torch.library.opcheck(
                    torch.ops.cutlass_w8a8.quantize_per_token, (x, target, "launch"), test_utils=tests
                )
                check.record(True)
            except Exception as error:  # what opcheck raises is of many kinds
                check.record(False, f"opcheck {target}: {error}")
    x = torch.randn(2, 5, 4096, device=device).bfloat16()
    for scheme, target in quant_cases.OTHER_WAYS:
        given = quant_cases.given(scheme, 0, device)

        def call(
            x: torch.Tensor, given: dict[str, torch.Tensor], target: torch.dtype = target, scheme: str = scheme
        ) -> Any:
            return quant_cases.quantize(x + 1, target, scheme, **given)

        # Every scheme compiles the same code again, which has a limit.
        torch._dynamo.reset()
        # Code of its own takes the compiler seconds for each.
        function = torch.compile(call, fullgraph=True, backend=backend if scheme == "tensor-azp" else "aot_eager")
        check.record(_same(function(x, given), call(x, given)), f"{scheme} to {target}")
    check.details["backend"] = backend
    return [check]


def bandwidth(device: str) -> list[Check]:
    """Time against that of a copy of as many bytes; judged where there is much to do."""
    checks = []
    for source in (torch.bfloat16, torch.float32):
        check = Check(SECTION, f"share of a copy's bandwidth, {source}")
        for m, k in BANDWIDTH_SHAPES:
            moved = m * k * (source.itemsize + 1)
            count = max(2, ROTATION_BYTES // moved)
            inputs = [torch.randn(m, k, device=device).to(source) for _ in range(count)]
            halves = [torch.zeros(moved // 2, dtype=torch.uint8, device=device) for _ in range(2 * count)]
            pairs = list(zip(halves[:count], halves[count:], strict=True))
            copy = _microseconds([lambda a=a, b=b: b.copy_(a) for a, b in pairs])
            for target in quant_cases.TARGETS:
                outs = [cutlass_w8a8.quantize_per_token(x, target) for x in inputs]
                calls = [
                    lambda x=x, q=q, s=s, t=target: cutlass_w8a8.quantize_per_token(x, t, out=q, scale=s)
                    for x, (q, s) in zip(inputs, outs, strict=True)
                ]
                taken = _microseconds(calls)
                title = f"{m}x{k} to {str(target).removeprefix('torch.')}"
                check.details[title] = round(copy / taken, 3)
                check.details[f"{title}, GB/s"] = round(moved / taken / 1e3)
                share = f"{title}: {copy / taken:.2f} of a copy's bandwidth, {taken:.1f} us against {copy:.1f}"
                check.record(m * k < JUDGED_ELEMENTS or copy / taken >= COPY_SHARE, share)
        checks.append(check)
    return checks


def way_bandwidth(device: str) -> list[Check]:
    """The same for the other schemes; where a tensor's scale is looked for, against a copy of x read twice and q."""
    checks = []
    for source, shapes in ((torch.bfloat16, WAY_SHAPES), (torch.float32, WAY_SHAPES[:2])):
        check = Check(SECTION, f"share of a copy's bandwidth, {source}, other schemes")
        for m, k in shapes:
            count = max(2, ROTATION_BYTES // (m * k * source.itemsize))
            inputs = [torch.randn(m, k, device=device).to(source) for _ in range(count)]
            copies: dict[int, float] = {}
            for scheme, target in quant_cases.OTHER_WAYS:
                moved = m * k * (source.itemsize * (2 if scheme.startswith("tensor") else 1) + 1)
                if moved not in copies:
                    halves = [torch.zeros(moved // 2, dtype=torch.uint8, device=device) for _ in range(2 * count)]
                    pairs = list(zip(halves[:count], halves[count:], strict=True))
                    copies[moved] = _microseconds([lambda a=a, b=b: b.copy_(a) for a, b in pairs])
                    del halves, pairs
                taken = _microseconds(_calls(inputs, target, scheme, device))
                share = copies[moved] / taken
                title = f"{m}x{k} to {str(target).removeprefix('torch.')}, {scheme}"
                check.details[title] = round(share, 3)
                check.details[f"{title}, us"] = round(taken, 1)
                against = f"{title}: {share:.2f} of a copy's bandwidth, {taken:.1f} us against {copies[moved]:.1f}"
                check.record(m * k < JUDGED_ELEMENTS or share >= COPY_SHARE, against)
        checks.append(check)
    return checks


def _calls(
    inputs: Sequence[torch.Tensor], target: torch.dtype, scheme: str, device: str, overlap: str = "none"
) -> list[Callable[[], object]]:
    """Calls of a scheme on each input, into results of their own."""
    options: dict[str, Any] = quant_cases.given(scheme, 0, device) | {"overlap": overlap}
    names = () if scheme.startswith("static") else ("scale_out", "azp_out")
    calls: list[Callable[[], object]] = []
    for x in inputs:
        out, *found = quant_cases.quantize(x, target, scheme, **options)
        into = {"out": out} | dict(zip(names, found, strict=False))
        calls.append(partial(quant_cases.quantize, x, target, scheme, **into, **options))
    return calls


def way_latency(device: str) -> list[Check]:
    """The same for the other schemes."""
    check = Check(SECTION, "latency in a graph, us, other schemes")
    for m in (1, 16, 128):
        for k in (4096, 8192):
            x = torch.randn(m, k, device=device).bfloat16()
            for scheme, target in quant_cases.OTHER_WAYS:
                for overlap in ("launch", "none"):
                    name = f"{m}x{k} to {str(target).removeprefix('torch.')}, {scheme}, {overlap}"
                    calls = _calls([x], target, scheme, device, overlap) * 50
                    check.details[name] = round(_microseconds(calls), 2)
            check.record(True)
    return [check]


def latency(device: str) -> list[Check]:
    """Microseconds of a call among others in a graph, and of copying the row: reported, not judged."""
    check = Check(SECTION, "latency in a graph, us")
    for m in (1, 16, 128):
        for k in (4096, 8192, 16384, 28672):
            x = torch.randn(m, k, device=device).bfloat16()
            other = torch.empty_like(x)
            check.details[f"{m}x{k} copy"] = round(_microseconds([lambda a=x, b=other: b.copy_(a)] * 50), 2)
            for target in quant_cases.TARGETS:
                q, scale = cutlass_w8a8.quantize_per_token(x, target)
                for overlap in ("launch", "none"):
                    calls = [
                        lambda x=x, q=q, s=scale, t=target, o=overlap: cutlass_w8a8.quantize_per_token(
                            x, t, out=q, scale=s, overlap=o
                        )
                    ] * 50
                    name = f"{m}x{k} to {str(target).removeprefix('torch.')} {overlap}"
                    check.details[name] = round(_microseconds(calls), 2)
            check.record(True)
    return [check]


def host(device: str) -> list[Check]:
    """Host microseconds of an eager call: reported, not judged."""
    check = Check(SECTION, "host time per call, M=16 K=4096, us")
    x = torch.randn(16, 4096, device=device).bfloat16()
    q, scale = cutlass_w8a8.quantize_per_token(x, torch.int8)
    one = torch.ones(1, device=device)
    kinds: dict[str, Callable[[], object]] = {
        "allocating": lambda: cutlass_w8a8.quantize_per_token(x, torch.int8),
        "out and scale given": lambda: cutlass_w8a8.quantize_per_token(x, torch.int8, out=q, scale=scale),
        "token-azp, allocating": lambda: cutlass_w8a8.quantize(x, torch.int8, symmetric=False),
        "tensor, out and scale given": lambda: cutlass_w8a8.quantize(
            x, torch.int8, granularity="tensor", out=q, scale_out=one
        ),
        "static, out given": lambda: cutlass_w8a8.quantize(x, torch.int8, one, out=q),
    }
    for name, call in kinds.items():
        call()
        times = []
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            # Few enough that the launch queue never fills and makes the host wait for the device.
            for _ in range(400):
                call()
            times.append((time.perf_counter() - start) / 400 * 1e6)
        check.details[name] = round(statistics.median(times), 2)
        check.record(True)
    return [check]


def _same(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Equal bits of two results, NaN included."""
    return len(got) == len(wanted) and all(
        a.dtype is b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(got, wanted, strict=True)
    )


def _capture(function: Callable[[Any], Any], inputs: Any) -> tuple[torch.cuda.CUDAGraph, Any, Any]:
    """A graph of ``function(inputs)``, warmed up; the inputs, to be kept alive; and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function(inputs)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        outs = function(inputs)
    return captured, inputs, outs


def _microseconds(calls: Sequence[Callable[[], object]], rounds: int = 9) -> float:
    """Median device time of one of ``calls``, in a graph of all of them."""
    captured, _, _ = _capture(lambda each: [call() for call in each], calls)
    captured.replay()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The host gets ahead while the device spins, so that the replay does not wait for its own launch.
        torch.cuda._sleep(400_000)
        begin.record()
        captured.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)
