"""The tuner's measurements, with a clock that is made up: halving, resuming, failures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cutlass_w8a8
from cutlass_w8a8.arch import SM90
from cutlass_w8a8.bench.results import Measurement
from cutlass_w8a8.bench.shapes import Point
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import UnsupportedError
from cutlass_w8a8.tune import measure, records
from cutlass_w8a8.tune.records import Log

FACTS = {"gpu": "NVIDIA Test", "capability": "9.0", "multiprocessors": 132}
CONFIGS = [
    KernelConfig.parse(name)
    for name in ("128x128x128_2x1_pingpong", "128x128x128_pingpong", "64x128x128_pingpong", "64x64x128_ws")
]
SPEED = {config.name: factor for config, factor in zip(CONFIGS, (1.0, 1.1, 1.3, 2.0), strict=True)}


class Clock:
    """Rounds whose times are `SPEED`'s, swizzled ones 5 % less, everything 10 % more once budgets are long."""

    def __init__(self, *failing: str, wrong: str = "") -> None:
        self.rounds: list[tuple[list[str], float]] = []
        self.failing, self.wrong = failing, wrong

    def __call__(self, configs: Sequence[KernelConfig], budget: float) -> Measurement:
        self.rounds.append(([config.name for config in configs], budget))
        found = Measurement(Point("int8", 8192, 8192, 4096))
        for config in configs:
            if config.compiled.name in self.failing:
                found.errors[config.name] = "CUDA error"
                continue
            us = 100 * SPEED[config.compiled.name] * (0.95 if config.swizzle == 8 else 1)
            found.microseconds[config.name] = us * (1.1 if budget > measure.QUICK_MS else 1)
            found.accuracy[config.name] = {"error / allowed": 2.0 if config.name == self.wrong else 0.5}
        return found


KEY = ("int8", "none", 8192, 8192, 4096)


def test_candidates_are_halved_and_orders_tried_on_the_near_ones() -> None:
    clock = Clock()
    record = measure.measure_point(KEY, CONFIGS, clock, 25, 132)
    (first, quick), (second, _), (last, long) = clock.rounds
    assert first == [config.name for config in CONFIGS] and (quick, long) == (measure.QUICK_MS, 25)
    assert {KernelConfig.parse(name).compiled for name in second} == set(CONFIGS[:2]) and len(second) == 10
    assert len(last) <= measure.FINALISTS and all(name in second for name in last)
    # All of one clock: those that dropped out are scaled to the long round.
    assert record.microseconds[CONFIGS[3].name] == pytest.approx(220)
    assert min(record.microseconds, key=record.microseconds.__getitem__).startswith("128x128x128_2x1_pingpong_swizzle8")
    assert set(record.dropped) == set(record.microseconds) - set(last) and not record.errors
    assert list(record.microseconds.values()) == sorted(record.microseconds.values())


def test_what_fails_or_is_wrong_has_no_time() -> None:
    record = measure.measure_point(KEY, CONFIGS, Clock(CONFIGS[0].name, wrong=CONFIGS[1].name), 25, 132)
    assert CONFIGS[0].name not in record.microseconds and "CUDA error" in record.errors[CONFIGS[0].name]
    assert CONFIGS[1].name not in record.microseconds and "wrong result" in record.errors[CONFIGS[1].name]
    assert min(record.microseconds, key=record.microseconds.__getitem__).startswith("64x128x128")


def test_nothing_that_runs_is_a_record_without_times() -> None:
    record = measure.measure_point(KEY, CONFIGS[:1], Clock(CONFIGS[0].name), 25, 132)
    assert record.microseconds == {} and len(record.errors) == 1
    assert measure.measure_point(KEY, [], Clock(), 25, 132).microseconds == {}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(measure, "device", lambda index: SimpleNamespace(sm_count=132))
    monkeypatch.setattr(measure, "arch_of", lambda where: SM90)


def plan(points: int, **changes: Any) -> measure.Plan:
    shapes = [Point("int8", m, 4096, 4096) for m in (2048, 4096, 8192)[:points]]
    return measure.Plan({DType.INT8: CONFIGS}, shapes, keep=100.0, **changes)


def test_a_run_resumes_after_the_points_it_has(device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "times.jsonl"
    asked: list[int] = []

    def timed(point: Point, providers: Sequence[Any], budget: float, *, rest: float) -> Measurement:
        assert rest == measure.REST
        if point.m not in asked:
            asked.append(point.m)
        if len(asked) == 3 and not resumed:
            raise KeyboardInterrupt
        return Clock()([KernelConfig.parse(provider.name) for provider in providers], budget)

    monkeypatch.setattr(measure.timing, "measure", timed)
    told: list[tuple[str, int, int]] = []
    resumed = False
    with pytest.raises(KeyboardInterrupt):
        measure.run(plan(3), Log(path, FACTS), lambda *line: told.append(line))
    assert asked == [2048, 4096, 8192] and [line[1:] for line in told] == [(1, 3), (2, 3)]
    with path.open("a") as file:
        file.write('{"point": {"dty')
    resumed, asked = True, []
    assert measure.run(plan(3), Log(path, FACTS), lambda *line: told.append(line))
    assert asked == [8192] and told[-1][1:] == (3, 3)
    assert told[-1][0].startswith("int8 8192x4096x4096 none: ") and "us, 128x128x128_2x1_pingpong" in told[-1][0]
    found = records.read([path]).times[DType.INT8, "none"]
    assert sorted(extents[0] for extents in found) == [2048, 4096, 8192]


def test_a_run_ends_when_its_time_is_up(device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 40))
    monkeypatch.setattr(measure.time, "monotonic", lambda: next(now))

    def timed(point: Point, made: Sequence[Any], budget: float, *, rest: float) -> Measurement:
        return Clock()([KernelConfig.parse(provider.name) for provider in made], budget)

    monkeypatch.setattr(measure.timing, "measure", timed)
    log = Log(tmp_path / "times.jsonl", FACTS)
    assert not measure.run(plan(3, seconds=60.0), log, lambda *_: None)
    assert len(log.finished) == 1
    assert measure.run(plan(3), log, lambda *_: None) and len(log.finished) == 3


def test_calls_are_launched_as_the_overlap_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def scaled_mm(*operands: Any, out: Any, config: Any, overlap: str) -> None:
        seen.append({"config": config, "overlap": overlap})

    monkeypatch.setattr(cutlass_w8a8, "scaled_mm", scaled_mm)
    x: Any = SimpleNamespace(weights=["w"], activations=["a", "b"], scale_a=1, scale_b=2, out=3)
    measure.provider(CONFIGS[0], "weights").call(x, 0)
    assert seen == [{"config": CONFIGS[0], "overlap": "weights"}]


def test_measuring_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="torch sees none; plan, compile and fit do without"):
        measure.facts()
