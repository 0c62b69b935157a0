"""How it is measured: CUDA graphs of several calls, all providers' graphs replayed in turn."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from cutlass_w8a8.bench import accuracy, orders
from cutlass_w8a8.bench.launched import launched
from cutlass_w8a8.bench.providers import DTYPES, Operands, Provider, make_operands, pick
from cutlass_w8a8.bench.results import Measurement
from cutlass_w8a8.bench.shapes import Point

WEIGHT_BYTES = 160 << 20
MIN_CALLS = 16
# A replay that lasts so long needs no more calls; a device multiplies so many 8-bit numbers a microsecond.
ENOUGH_US, PER_US = 2000, 7e8
LEAST_CALLS = 4
MIN_ROUNDS, MAX_ROUNDS = 5, 25
# Of a device that is not throttled, roughly.
CYCLES_PER_US = 1900


def calls_per_graph(weights: int, point: Point) -> int:
    """A multiple of the number of weights, so that replays too meet each weight equally long ago."""
    enough = int(ENOUGH_US * PER_US / (point.m * point.n * point.k))
    return -(-min(MIN_CALLS, max(LEAST_CALLS, enough)) // weights) * weights


def capture(provider: Provider, operands: Operands, calls: int) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` calls, warmed up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(2):
            provider.call(operands, i)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            provider.call(operands, i)
    graph.replay()
    return graph


def measure(point: Point, providers: Sequence[Provider], budget_ms: float, *, rest: float = 0.0) -> Measurement:
    """Median time of a call of each provider, and whether its last call was right.

    Args:
        point: the problem; its order says what operands to make, and ``providers`` must be those of that order.
        providers: what to measure; those that do not serve the point are left out.
        budget_ms: about how much device time each may take, in milliseconds.
        rest: how long the device spins after each replay, as a multiple of the replay. It draws little power then, so
            that a long run does not throttle it.
    """
    result = Measurement(point)
    serving = [provider for provider in providers if provider.serves(point)]
    operands = {False: make_operands(point, DTYPES[point.dtype], WEIGHT_BYTES)}
    if any(provider.bf16 for provider in serving):
        operands[True] = make_operands(point, torch.bfloat16, WEIGHT_BYTES)
    calls = {wide: calls_per_graph(len(x.weights), point) for wide, x in operands.items()}
    result.calls = calls[False]
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for provider in serving:
        try:
            if provider.name == "ours":
                x = operands[False]
                result.config = orders.our_config(point.order, *pick(x, 0), x.scale_a, x.scale_b)
            graph = capture(provider, operands[provider.bf16], calls[provider.bf16])
        except Exception as error:  # a peer that fails is named in the table
            torch.cuda.synchronize()
            result.errors[provider.name] = f"{type(error).__name__}: {error}"
            continue
        graphs[provider.name] = (graph, calls[provider.bf16])
    if not graphs:
        return result
    first = replay_all(graphs)
    longest = max(first[name] * graphs[name][1] for name in graphs) / 1000
    result.rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(budget_ms / max(longest, 0.01))))
    pauses = {name: rest * first[name] * graphs[name][1] for name in graphs}
    for name, values in samples(graphs, result.rounds, pauses).items():
        result.microseconds[name] = statistics.median(values)
        result.spread[name] = (max(values) - min(values)) / result.microseconds[name]
    for provider in serving:
        if provider.name in graphs and provider.comparable:
            graph, count = graphs[provider.name]
            x = operands[provider.bf16]
            x.poison()
            graph.replay()
            result.accuracy[provider.name] = accuracy.check(x, count - 1)
    return result


def graph_of(run: Callable[[], object], runs: int) -> tuple[torch.cuda.CUDAGraph, list[str]]:
    """A graph of ``runs`` runs, warmed up, and the names of what one run gives the GPU to do, in order."""
    for _ in range(2):
        run()
    names = launched(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(runs):
            run()
    return graph, names


def medians(graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]], rounds: int) -> dict[str, float]:
    """The median microseconds of a run of each graph, which has so many, in ``rounds`` rounds of `replay_all`."""
    return {name: statistics.median(values) for name, values in samples(graphs, rounds).items()}


def samples(
    graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]], rounds: int, pauses: Mapping[str, float] | None = None
) -> dict[str, list[float]]:
    """Microseconds of a call, or run, of each graph in each of ``rounds`` rounds of `replay_all`."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for round_ in range(rounds):
        for name, us in replay_all(graphs, round_, pauses).items():
            found[name].append(us)
    return found


def replay_all(
    graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]], round_: int = 0, pauses: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Replay every graph once, one after another; microseconds of a call. ``pauses`` come after each, in microseconds.

    Each round has an order of its own: the clock follows the power of the milliseconds before, so that a kernel which
    always came after the same ones, or always first after a pause, would be measured by its neighbours.
    """
    names = random.Random(round_).sample(list(graphs), len(graphs))
    events = {name: (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for name in names}
    # The host gets ahead while the device spins, so that no replay waits for its own launch.
    torch.cuda._sleep(400_000)
    for name in names:
        start, end = events[name]
        start.record()
        graphs[name][0].replay()
        end.record()
        if pauses and pauses[name]:
            torch.cuda._sleep(int(pauses[name] * CYCLES_PER_US))
    torch.cuda.synchronize()
    return {name: start.elapsed_time(end) * 1000 / graphs[name][1] for name, (start, end) in events.items()}
