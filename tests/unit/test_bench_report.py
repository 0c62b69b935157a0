"""The benchmark's arithmetic: which peer counts, geometric means, the worst point, what is missing."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

from cutlass_w8a8.bench.providers import Provider
from cutlass_w8a8.bench.report import error_lines, summary, summary_table, table
from cutlass_w8a8.bench.shapes import Point
from cutlass_w8a8.bench.timing import Measurement, calls_per_graph


def provider(name: str, comparable: bool = True, forced: bool = False) -> Provider:
    return Provider(name, lambda *_: None, lambda _: True, comparable, forced=forced)


PROVIDERS = [
    provider("ours"),
    provider("vllm"),
    provider("torch_row"),
    provider("bf16", False),
    provider("64x16x128_ws", forced=True),
]
RESULTS = [
    Measurement(Point("fp8", 1, 4096, 4096), {"ours": 5.0, "vllm": 6.0, "torch_row": 10.0, "bf16": 9.0}),
    Measurement(Point("fp8", 64, 4096, 4096), {"ours": 8.0, "vllm": 6.0, "torch_row": 4.0, "64x16x128_ws": 3.0}),
    Measurement(
        Point("fp8", 8192, 4096, 4096), {"vllm": 100.0, "bf16": 200.0}, errors={"ours": "LaunchError: refused"}
    ),
]


def row(band: str, peer: str) -> dict[str, object]:
    return next(r for r in summary(RESULTS, PROVIDERS) if r["band"] == band and r["peer"] == peer)


def test_summary() -> None:
    assert row("M 1-64", "vllm")["geometric mean"] == pytest.approx(math.sqrt(6 / 5 * 6 / 8))
    best = row("M 1-64", "best")
    assert best["geometric mean"] == pytest.approx(math.sqrt(6 / 5 * 4 / 8))
    assert (best["worst"], best["worst point"]) == (0.5, "fp8 64x4096x4096")
    assert row("all", "vllm")["points"] == 2
    assert row("all", "bf16")["points"] == 1
    assert not any(r["band"] == "M 1024-8192" for r in summary(RESULTS, PROVIDERS))


def test_tables_name_what_is_missing() -> None:
    lines = table(RESULTS, PROVIDERS).splitlines()
    assert "| fp8 | 4096 x 4096 | 1 | 5.0 | 6.0 | 10.0 | 9.0 | 1.200 | 3.36 | - | - |" in lines
    assert "| fp8 | 4096 x 4096 | 64 | 8.0 | 6.0 | 4.0 | - | 0.500 |" in lines[3]
    assert lines[3].endswith("| 64x16x128_ws | 3.0 |")
    assert "| error | 100.0 |" in lines[4]
    assert error_lines(RESULTS) == ["ours: no time at 1 points (first fp8 8192x4096x4096): LaunchError: refused"]
    assert "| fp8 | M 1-64 | best | 2 | 0.775 | 0.500 | fp8 64x4096x4096 |" in summary_table(
        summary(RESULTS, PROVIDERS)
    )


@pytest.mark.parametrize("weights", range(2, 30))
def test_every_weight_is_used_equally_often(weights: int) -> None:
    calls = calls_per_graph(weights)
    assert calls % weights == 0
    assert max(16, weights) <= calls <= max(30, weights)
