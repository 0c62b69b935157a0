"""Checks of quantisation on a GPU: bits, order among other kernels, graphs, torch.compile, and how fast it is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

import cutlass_w8a8
from tests import quant_cases
from tests.harness import Check

SECTION = "quantize"
# How the GEMM that follows may overlap with the quantisation.
CHAIN_OVERLAPS = ("none", "launch", "weights")
CHAIN_SHAPES = ((1, 256, 4096), (17, 512, 1040), (300, 256, 7168), (2048, 256, 512))
BANDWIDTH_SHAPES = ((4096, 4096), (4096, 8192), (8192, 8192), (4096, 16384), (4096, 28672), (16384, 4096), (1024, 8192))
# Below this much data a launch is more than its bytes.
JUDGED_ELEMENTS = 1 << 24
COPY_SHARE = 0.8
# So much is gone through before a buffer comes again that none of it is in the L2 cache any more.
ROTATION_BYTES = 512 << 20


def run(device: str) -> list[Check]:
    """All of them; on the CPU those that need no GPU."""
    if device == "cpu":
        return correctness(device, limit=1 << 14)
    return [
        *correctness(device),
        *order(device),
        *chain(device),
        *graph(device),
        *compiled(device),
        *bandwidth(device),
        *latency(device),
        *host(device),
    ]


def correctness(device: str, limit: int = quant_cases.LARGEST_CASE, step: int = 1) -> list[Check]:
    """Every shape, type and layout against the closed form, to the bit."""
    checks = {source: Check(SECTION, f"{source} to both types, to the bit") for source in quant_cases.SOURCES}
    for m, k, source, layout, overlap in quant_cases.cases(limit, step):
        quant_cases.compare(checks[source], m, k, source, layout, overlap, device)
    return list(checks.values())


def order(device: str) -> list[Check]:
    """It reads nothing before what went before has written it, nor does what follows write before it has read."""
    check = Check(SECTION, "order among other kernels of a stream")
    for target in quant_cases.TARGETS:
        for m, k in ((1, 4096), (64, 8192), (512, 4096), (2048, 8192), (3, 4097)):
            sources = [quant_cases.rows(m, k, torch.bfloat16, seed, device) for seed in range(16)]
            expected = [cutlass_w8a8.quantize_per_token(x, target, overlap="none") for x in sources]
            torch.cuda.synchronize()
            x = torch.empty_like(sources[0])
            found = [(torch.empty_like(q), torch.empty_like(scale)) for q, scale in expected]
            for source, (q, scale) in zip(sources, found, strict=True):
                x.copy_(source)
                cutlass_w8a8.quantize_per_token(x, target, out=q, scale=scale)
                x.fill_(3.0)
            torch.cuda.synchronize()
            for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
                check.record(_same(got, wanted), f"{m}x{k} to {target}, round {number}")
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


def graph(device: str) -> list[Check]:
    """A captured graph replayed after its inputs changed gives what eager calls give on the new inputs."""
    check = Check(SECTION, "capture and replay on changed inputs")
    for target in quant_cases.TARGETS:
        for overlap in ("launch", "none"):
            shapes = ((1, 4096), (33, 8192), (1000, 1040), (7, 4097))
            static = [quant_cases.rows(m, k, torch.float16, 0, device) for m, k in shapes]

            def call(x: list[torch.Tensor], target: torch.dtype = target, overlap: str = overlap) -> list[Any]:
                return [cutlass_w8a8.quantize_per_token(each, target, overlap=overlap) for each in x]

            captured, _, outs = _capture(call, static)
            for replay in range(3):
                for x, (m, k) in zip(static, shapes, strict=True):
                    x.copy_(quant_cases.rows(m, k, torch.float16, replay + 1, device))
                for q, scale in outs:
                    q.view(torch.uint8).fill_(quant_cases.POISON)
                    scale.fill_(-7.0)
                captured.replay()
                for got, wanted, shape in zip(outs, call(static), shapes, strict=True):
                    check.record(_same(got, wanted), f"{shape} to {target} {overlap}, replay {replay}")
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
    for name, given in (("allocating", {}), ("out and scale given", {"out": q, "scale": scale})):
        times = []
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            # Few enough that the launch queue never fills and makes the host wait for the device.
            for _ in range(400):
                cutlass_w8a8.quantize_per_token(x, torch.int8, **given)
            times.append((time.perf_counter() - start) / 400 * 1e6)
        check.details[name] = round(statistics.median(times), 2)
        check.record(True)
    return [check]


def _same(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Equal bits of two results, NaN included."""
    (q, scale), (other, others) = got, wanted
    values = torch.equal(q.view(torch.uint8), other.view(torch.uint8))
    return values and torch.equal(scale.view(torch.int32), others.view(torch.int32))


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
