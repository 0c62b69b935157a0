"""The benchmark's arithmetic: which peer counts, geometric means, the worst point, what is missing, wrong or uneven."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from cutlass_w8a8.bench import report, smooth
from cutlass_w8a8.bench.machine import write_json
from cutlass_w8a8.bench.results import NOT_COMPARABLE, PROVIDERS, SCHEMA, Column, Measurement, Run, load
from cutlass_w8a8.bench.shapes import Point
from cutlass_w8a8.bench.timing import calls_per_graph
from cutlass_w8a8.errors import ArgumentError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COLUMNS = [
    Column("ours"),
    Column("vllm"),
    Column("torch_row"),
    Column("bf16", comparable=False),
    Column("64x16x128_ws", forced=True),
]
POINTS = [
    Measurement(
        Point("fp8", 1, 4096, 4096),
        {"ours": 5.0, "vllm": 6.0, "torch_row": 10.0, "bf16": 9.0},
        accuracy={"ours": {"largest error": 0.004, "error / allowed": 0.25}},
    ),
    Measurement(Point("fp8", 64, 4096, 4096), {"ours": 8.0, "vllm": 6.0, "torch_row": 4.0, "64x16x128_ws": 3.0}),
    Measurement(
        Point("fp8", 8192, 4096, 4096), {"vllm": 100.0, "bf16": 200.0}, errors={"ours": "LaunchError: refused"}
    ),
    Measurement(Point("fp8", 64, 4096, 4096, "chain"), {"ours": 8.0, "vllm": 16.0}),
]


def row(band: str, peer: str, order: str = "alone") -> dict[str, object]:
    rows = report.summary(POINTS, COLUMNS)
    return next(r for r in rows if (r["band"], r["peer"], r["order"]) == (band, peer, order))


def test_summary() -> None:
    assert row("M <= 64", "vllm")["geometric mean"] == pytest.approx(math.sqrt(6 / 5 * 6 / 8))
    best = row("M <= 64", "best")
    assert best["geometric mean"] == pytest.approx(math.sqrt(6 / 5 * 4 / 8))
    assert (best["worst"], best["worst point"]) == (0.5, "fp8 64x4096x4096")
    assert row("all M", "vllm")["points"] == 2
    assert row("all M", "bf16")["points"] == 1
    assert not any(r["band"] == "M >= 1024" for r in report.summary(POINTS, COLUMNS))


def test_orders_are_told_apart() -> None:
    assert row("all M", "vllm", "chain")["geometric mean"] == 2.0
    assert row("all M", "vllm", "chain")["worst point"] == "fp8 64x4096x4096 chain"


def test_tables_name_what_is_missing() -> None:
    lines = report.table(POINTS, COLUMNS).splitlines()
    assert "| alone | fp8 | 4096 x 4096 | 1 | 5.0 | 6.0 | 10.0 | 9.0 | 1.200 | 3.36 | 0.25 | - | - |" in lines
    assert "| alone | fp8 | 4096 x 4096 | 64 | 8.0 | 6.0 | 4.0 | - | 0.500 |" in lines[3]
    assert lines[3].endswith("| 64x16x128_ws | 3.0 |")
    assert "| error | 100.0 |" in lines[4]
    # Bandwidth is not told of a chain, which moves more than the GEMM's bytes.
    assert "| chain | fp8 | 4096 x 4096 | 64 | 8.0 | 16.0 | - | - | 2.000 | - | - |" in lines[5]
    assert report.error_lines(POINTS) == ["ours: no time at 1 points (first fp8 8192x4096x4096): LaunchError: refused"]


def test_summary_has_a_column_for_each_peer_and_brackets_around_unlike_ones() -> None:
    lines = report.summary_table(report.summary(POINTS, COLUMNS)).splitlines()
    assert lines[0] == "| order | dtype | M | vllm | torch_row | best | (bf16) | worst | worst point |"
    assert lines[2] == "| alone | fp8 | M <= 64 | 0.949 | 1.000 | 0.775 | 1.800 | 0.500 | fp8 64x4096x4096 |"


def test_what_is_not_comparable_is_known() -> None:
    assert set(NOT_COMPARABLE) < set(PROVIDERS)


def run() -> Run:
    return Run(
        COLUMNS,
        POINTS,
        {"triton": "ImportError: none", "chain: ours": "no"},
        {"4096x4096": ["llama-3-8b o tp1"]},
        {"copy TB/s": 4.0},
        {"left out": ["qwen2.5-7b qkv tp8: 28 heads"], "host microseconds": {"ours, output given": 20.0}},
    )


def test_text_tells_everything() -> None:
    text = report.text(run())
    for part in (
        "missing: triton: ImportError: none",
        "missing: chain: ours: no",
        "4096x4096: llama-3-8b o tp1",
        "left out: qwen2.5-7b qkv tp8: 28 heads",
        "host time of an eager call, ours, output given: 20.00 us",
        "error: ours: no time",
        "chain: quantisation of bf16 activations",
    ):
        assert part in text


def test_own_failures() -> None:
    assert report.own_failures(run()) == ["ours at fp8 8192x4096x4096: LaunchError: refused"]
    bad = {"largest error": 1e300, "error / allowed": 1e300}
    wrong = Run(COLUMNS, [Measurement(Point("fp8", 1, 8, 16), {"ours": 1.0}, accuracy={"ours": bad, "vllm": bad})])
    (line,) = report.own_failures(wrong)
    assert line == "ours: at 1 points; 1e+300 times the allowed error at fp8 1x8x16"
    assert "wrong: vllm: at 1 points" in report.text(wrong)


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, run().as_json() | {"summary": []})
    assert json.loads(path.read_text())["schema"] == SCHEMA
    assert load(path) == run()


def test_schema_1_can_be_read() -> None:
    old = load(RESULTS / "2026-11-29-h200-bench.json")
    assert [c.name for c in old.columns if not c.comparable] == ["int_mm", "bf16"]
    assert "| alone | fp8 | all M | 1.086 | 1.285 | 1.060 |" in report.text(old)
    forced = load(RESULTS / "2026-11-29-h200-sm80-configs.json")
    assert any(c.forced for c in forced.columns)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema": 99}', "has schema 99, and this version reads up to 2"),
        ('{"points": 1}', "is not the JSON of a benchmark"),
        ("[]", "is not the JSON of a benchmark"),
        ("nonsense", "is not the JSON of a benchmark"),
    ],
)
def test_other_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(ArgumentError, match=message):
        load(path)


@pytest.mark.parametrize("weights", range(2, 30))
def test_every_weight_is_used_equally_often(weights: int) -> None:
    calls = calls_per_graph(weights, Point("fp8", 16, 4096, 4096))
    assert calls % weights == 0
    assert max(16, weights) <= calls <= max(30, weights)


def test_long_calls_need_fewer_in_a_graph() -> None:
    counts = [calls_per_graph(2, Point("fp8", m, 8192, 28672)) for m in (256, 1024, 4096, 8192)]
    assert counts[0] == 16 and counts[-1] == 4 and counts == sorted(counts, reverse=True)


def test_dense_batches_surround_every_power_of_two() -> None:
    batches = smooth.dense_batches()
    assert batches == sorted(set(batches)) and batches[0] == 1 and batches[-1] == 1024
    assert 55 <= len(batches) <= 70
    for power in (4, 16, 64, 512):
        assert {power - 1, power, power + 1} <= set(batches)
    later = [m for m in batches if m >= 64]
    assert all(b / a <= 1.126 for a, b in pairwise(later))


def test_steps_are_found_within_a_shape_and_order_only() -> None:
    times = {("alone", 64): 10.0, ("alone", 65): 12.0, ("alone", 72): 13.0, ("gemm", 65): 30.0}
    points = [Measurement(Point("fp8", m, 4096, 4096, order), {"ours": us}) for (order, m), us in times.items()]
    points.append(Measurement(Point("fp8", 96, 4096, 4096), {"vllm": 99.0}))
    assert [str(step) for step in smooth.steps(points)] == ["fp8 alone 4096x4096: +20% from M=64 to 65"]
    text = report.text(Run([Column("ours")], points), smooth=True)
    assert "steps up of more than 15% between neighbouring M: 1\nfp8 alone 4096x4096: +20% from M=64 to 65" in text


def test_a_step_tells_how_many_tiles_there_were_before_and_after() -> None:
    chosen = {64: "64x64x256_1x1_ws_swap", 65: "64x64x256_1x2_ws_swap"}
    points = [Measurement(Point("fp8", m, 4096, 4096), {"ours": float(m * m)}, config=chosen[m]) for m in chosen]
    assert smooth.steps(points) == []
    points[1].microseconds["ours"] *= 2
    assert str(smooth.steps(points)[0]) == "fp8 alone 4096x4096: +106% from M=64 to 65, 64 tiles to 128"
