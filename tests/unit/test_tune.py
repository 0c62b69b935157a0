"""The tuner apart from its GPU part: records, covering sets, fits, candidates, what is told of a table."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cutlass_w8a8.arch import ARCHS, SM80, SM90
from cutlass_w8a8.config import KernelConfig, Raster
from cutlass_w8a8.dispatch import configs_of, problems
from cutlass_w8a8.dispatch.table import Cost, blocks
from cutlass_w8a8.dispatch.tables import read_table, write_text
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import TableError
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.tune import costs, cover, fit, plan, records, report, space
from cutlass_w8a8.tune.records import Log, Measurements, Record

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-29-h200-configs.json"
FACTS = {"gpu": "NVIDIA Test", "capability": "9.0", "multiprocessors": 132, "driver_version": "1.2"}
A, B, C = (KernelConfig.parse(name) for name in ("64x16x256_ws_swap", "64x64x256_ws_swap", "128x128x128_2x1_pingpong"))
RECORD = Record("fp8", "none", 16, 4096, 4096, {A.name: 10.0, B.name: 12.5}, [B.name], {C.name: "no room"})


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return records.read([RESULTS])


# Records --------------------------------------------------------------------------------------------------------------


def test_a_log_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "times.jsonl"
    log = Log(path, FACTS)
    log.append(RECORD)
    log.append(replace(RECORD, dtype="int8", overlap="launch", m=32))
    found = records.read([path])
    assert (found.machine.device, found.machine.arch, found.machine.sm_count) == ("NVIDIA Test", SM90, 132)
    assert found.times == {
        (DType.E4M3, "none"): {(16, 4096, 4096): {A: 10.0, B: 12.5}},
        (DType.INT8, "launch"): {(32, 4096, 4096): {A: 10.0, B: 12.5}},
    }


def test_a_log_goes_on_after_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    log = Log(path, FACTS)
    log.append(RECORD)
    log.append(replace(RECORD, m=32))
    whole = path.read_text()
    last = whole.splitlines()[-1]
    for kept in (1, len(last) // 2, len(last)):
        # Killed while writing: half a line, or all of it but its end.
        path.write_text(whole[: len(whole) - len(last) - 1 + kept])
        assert (32, 4096, 4096) in records.read([path]).times[DType.E4M3, "none"] or kept < len(last)
        again = Log(path, FACTS)
        assert again.finished >= {RECORD.key}
        again.append(replace(RECORD, m=64))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [entry["point"]["m"] for entry in lines if "point" in entry][-1] == 64
        assert {extents[0] for extents in records.read([path]).times[DType.E4M3, "none"]} >= {16, 64}


def test_a_log_of_another_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    Log(path, FACTS).append(RECORD)
    with pytest.raises(TableError, match=r"holds times of NVIDIA Test .* this is NVIDIA Other .* name another file"):
        Log(path, FACTS | {"gpu": "NVIDIA Other"})
    other = tmp_path / "other.jsonl"
    Log(other, FACTS | {"multiprocessors": 66}).append(RECORD)
    with pytest.raises(TableError, match="fit a table for each"):
        records.read([path, other])


def test_runs_of_a_point_are_brought_to_one_clock(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    # The second run's card was slower by a tenth, saw B gain less, and did not measure C.
    for path, times in zip(paths, ({A: 10.0, B: 8.0, C: 20.0}, {A: 11.0, B: 9.9}), strict=True):
        Log(path, FACTS).append(replace(RECORD, microseconds={config.name: us for config, us in times.items()}))
    found = records.read(paths).times[DType.E4M3, "none"][16, 4096, 4096]
    scale = (11 / 10 + 9.9 / 8) / 2
    assert found[C] == pytest.approx(20 * scale)
    assert (found[A], found[B]) == (11, 9.9)


def test_later_times_of_a_file_count(tmp_path: Path) -> None:
    log = Log(tmp_path / "a.jsonl", FACTS)
    for us in (10.0, 20.0):
        log.append(replace(RECORD, microseconds={A.name: us}))
    assert records.read([log.path]).times[DType.E4M3, "none"] == {(16, 4096, 4096): {A: 20.0}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no times of configurations"),
        ('{"machine": {}}\n', "is not understood"),
        ("nonsense\n{}\n", "line 1"),
        ('{"point": {"dtype": "fp4", "m": 1, "n": 8, "k": 16}, "microseconds": {"64x16x256_ws": 1}}\n', "fp4"),
        ('{"point": {"dtype": "fp8", "m": 1, "n": 8, "k": 16}, "microseconds": {"64x16x256_ws": 0}}\n', "took 0"),
        ('{"point": {"dtype": "fp8", "m": 1, "n": 8, "k": 16}, "overlap": "x", "microseconds": {}}\n', "'x'"),
        ("[]\n", "not an object"),
    ],
)  # fmt: skip
def test_files_without_times_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    path.write_text(text)
    with pytest.raises(TableError, match=message) as caught:
        records.read([path])
    assert str(path) in str(caught.value)


def test_benchmarks_are_read_in_both_schemas(tmp_path: Path, measured: Measurements) -> None:
    assert measured.machine.device == "NVIDIA H200" and measured.machine.sm_count == 132
    assert {key: len(times) for key, times in measured.times.items()} == {
        (DType.INT8, "none"): 80,
        (DType.E4M3, "none"): 80,
    }
    point = {"dtype": "fp8", "m": 16, "n": 4096, "k": 4096, "order": "alone"}
    # Neither what dispatch chose nor accurate kernels are candidates.
    times = {"ours": 9.0, A.name: 10.0, "64x16x128_ws_accurate": 5.0}
    entry: dict[str, Any] = {"point": point, "microseconds": times}
    chain = {"point": point | {"order": "chain", "m": 32}, "microseconds": {A.name: 10.0}}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"schema": 2, "conditions": {"machine": FACTS}, "points": [entry, chain]}))
    assert records.read([path]).times == {(DType.E4M3, "none"): {(16, 4096, 4096): {A: 10.0}}}


# Covering sets --------------------------------------------------------------------------------------------------------


def test_cover_is_small_and_within_bounds() -> None:
    times = {
        1: {A: 1.0, B: 1.01, C: 3.0},
        2: {A: 1.0, B: 1.5, C: 1.019},
        3: {A: 2.0, B: 1.0, C: 1.019},
        4: {A: 3.0, B: 2.0, C: 1.0},
    }
    # Greedily C, which serves three, and B for the first.
    assert set(cover.cover(times, 0.02)) == {B, C} or set(cover.cover(times, 0.02)) == {A, C}
    assert set(cover.cover(times, 0.0)) == {A, B, C}
    assert cover.cover(times, 10.0) in ([A], [B], [C])
    assert cover.cover({}, 0.02) == [] and cover.cover({1: {}}, 0.02) == []


def test_cover_gives_up_what_others_make_superfluous() -> None:
    # The greedy choice, B, serves the middle four; A and C, needed for the ends, serve these as well.
    times = {
        1: {A: 1.0},
        2: {A: 1.0, B: 1.0},
        3: {A: 1.0, B: 1.0},
        4: {C: 1.0, B: 1.0},
        5: {C: 1.0, B: 1.0},
        6: {C: 1.0},
    }
    assert set(cover.cover(times, 0.02)) == {A, C}
    assert cover.cover(times, 0.02, [B])[0] == B


def test_cover_counts_kernels_not_launches() -> None:
    swizzled = replace(C, swizzle=8)
    assert cover.cover({1: {C: 1.0, A: 1.5}, 2: {C: 2.0, swizzled: 1.0, A: 1.5}}, 0.02) == [C]


def test_cover_does_not_hang_on_order(measured: Measurements) -> None:
    times = measured.times[DType.E4M3, "none"]
    back = {point: dict(reversed(configs.items())) for point, configs in reversed(times.items())}
    chosen = cover.cover(times, 0.02)
    assert cover.cover(back, 0.02) == chosen and len(chosen) < 20
    for configs in times.values():
        best = min(us for config, us in configs.items() if config.compiled in chosen)
        assert best <= 1.02 * min(configs.values())


# Costs ----------------------------------------------------------------------------------------------------------------

POINTS = [(m, n, k) for m in (1, 64, 256, 1024, 4096) for n, k in ((4096, 4096), (28672, 4096), (8192, 28672))]


@pytest.mark.parametrize("config", [A, C, replace(C, swizzle=8)], ids=lambda config: config.name)
def test_prediction_is_the_costs_own_formula(config: KernelConfig) -> None:
    cost = Cost(1.5, 0.9, 0.5, 3.0, 3.5)
    features = costs._features(config, POINTS, 132)
    predicted = costs.predict(torch.tensor([costs.numbers(cost)], dtype=torch.float64), features)[0]
    assert predicted.tolist() == pytest.approx([cost.time(config, *point, 132) for point in POINTS])


def test_fit_finds_the_numbers_that_made_the_times() -> None:
    cost = Cost(2.6, 1.1, 0.4, 3.4, 3.0)
    times = {point: cost.time(C, *point, 132) for point in POINTS}
    fitted = costs.fit_cost(C, times, times, 132)
    assert fitted is not None and fitted[1] < 0.01
    for point, us in times.items():
        assert fitted[0].time(C, *point, 132) == pytest.approx(us, rel=0.02)


def test_fit_needs_as_many_points_as_numbers() -> None:
    times = dict.fromkeys(POINTS[:4], 5.0)
    assert costs.fit_cost(C, times, times, 132) is None


# Tables ---------------------------------------------------------------------------------------------------------------


def test_table_is_near_the_best_where_it_was_measured(measured: Measurements, tmp_path: Path) -> None:
    table = fit.fit_table(measured, 0.02)
    ratios = [loss.ratio for loss in fit.losses(table, measured)]
    assert len(ratios) == 160 and all(ratio is not None and ratio <= 1.02 for ratio in ratios)
    # What is written is what was fitted, and accepted by the reader's checks.
    path = tmp_path / "table.json"
    path.write_text(write_text(table))
    again = read_table(path)
    assert write_text(again) == write_text(table)
    assert [loss.config for loss in fit.losses(again, measured)] == [
        loss.config for loss in fit.losses(table, measured)
    ]
    assert again.conditions["driver"] == "580.159.04"


def test_every_problem_is_served_by_a_fitted_table(measured: Measurements) -> None:
    for section in fit.fit_table(measured).sections.values():
        for m, n, k in itertools.product((1, 17, 100, 777, 5000, 100_000), (8, 4096, 30000), (16, 4096)):
            assert any(row.fits(m, n, k) for row in section.rows), (m, n, k)


def test_unseen_shapes_lose_little(measured: Measurements) -> None:
    losses = list(fit.unseen_losses(measured))
    assert len(losses) == 160
    for operand, most in ((DType.E4M3, 0.03), (DType.INT8, 0.04)):
        mean = report.mean_loss([loss for loss in losses if loss.operand is operand])
        assert mean is not None and 0 < mean < most


def test_one_shape_alone_has_none_to_be_left_out(measured: Measurements) -> None:
    assert list(fit.unseen_losses(measured.only((4096, 4096)))) == []


def test_fp8_is_covered_without_kernels_that_divide_k() -> None:
    split = KernelConfig.parse("128x64x128_cooperative_streamk_split2")
    machine = records.Machine.of(FACTS)
    times = {point: {split: 10.0, C: 12.0, A: 20.0} for point in POINTS}
    both = Measurements(machine, {(DType.E4M3, "none"): times, (DType.INT8, "none"): times})
    assert fit.choose_kernels(both, DType.INT8, 0.02) == [split.compiled]
    assert fit.choose_kernels(both, DType.E4M3, 0.02) == [split.compiled, C]
    rows = {key[0]: [row.config for row in section.rows] for key, section in fit.fit_table(both).sections.items()}
    assert rows == {DType.E4M3: [split, C], DType.INT8: [split]}


def test_at_large_m_what_is_close_at_most_points_serves() -> None:
    wide = KernelConfig.parse("256x128x128_1x2_cooperative")
    weights = [(4096, 4096), (8192, 8192), (28672, 4096), (10240, 8192)]
    times = {(m, n, k): {C: 10.1, wide: 12.0} for m in (4096, 8192) for n, k in weights}
    times[4096, 4096, 4096] = {C: 10.1, wide: 10.0}
    times[8192, 4096, 4096] = {C: 10.3, wide: 10.0}
    times |= {(m, 4096, 4096): {C: 10.1, wide: 10.0} for m in (512, 1024, 2048)}
    section = fit.fit_table(Measurements(records.Machine.of(FACTS), {(DType.INT8, "none"): times}), 0.005).sections[
        DType.INT8, "none"
    ]
    served = {
        m: interval.row.config
        for interval in section.measured[4096, 4096]
        for m in (1024, 4096, 8192)
        if interval.first <= m <= interval.last
    }
    assert served == {1024: wide, 4096: C, 8192: wide}


def test_launch_time_choices_must_be_worth_a_row() -> None:
    little, much = replace(C, swizzle=2), replace(C, swizzle=8)
    machine = records.Machine.of(FACTS)
    large = {point: {C: 10.0, little: 9.95, **({much: 9.0} if point[0] == 4096 else {})} for point in POINTS}
    table = fit.fit_table(Measurements(machine, {(DType.INT8, "none"): large}))
    section = table.sections[DType.INT8, "none"]
    # Three points are too few for a cost of its own.
    assert [row.config for row in section.rows] == [C]
    weights = ((4096, 4096), (8192, 8192), (28672, 4096))
    more = {(m, n, k): {C: 10.0, little: 9.95, much: 9.0} for m in (4096, 8192) for n, k in weights}
    table = fit.fit_table(Measurements(machine, {(DType.INT8, "none"): large | more}))
    assert [row.config for row in table.sections[DType.INT8, "none"].rows] == [C, much]


def test_report_tells_of_each_section(measured: Measurements) -> None:
    part = measured.only((4096, 4096))
    table = fit.fit_table(part)
    own = fit.losses(table, part)
    lines = list(report.lines(table, own, own, []))
    assert lines[0].startswith("NVIDIA H200, sm90, 132 multiprocessors")
    assert sum(line.startswith(("int8, overlap none: ", "e4m3, overlap none: ")) for line in lines) == 2
    assert len(list(report.point_lines(own))) == len(own) == 20
    missing = [replace(own[0], ratio=None)]
    assert report.summary(missing) == "nothing to compare with"
    assert report.summary([*own, *missing]).endswith("; at 1 the choice was not measured")
    assert "not measured" in next(report.point_lines(missing))


# Candidates -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def candidates() -> list[KernelConfig]:
    return [spec.config for spec in space.kernels(SM90, DType.E4M3, DType.BF16, EpilogueSpec.of())]


def test_candidates_are_possible_and_different(candidates: list[KernelConfig]) -> None:
    specs = space.kernels(SM90, DType.E4M3, DType.BF16, EpilogueSpec.of())
    assert len(set(candidates)) == len(candidates) > 1000
    assert not any(problems(spec) for spec in specs)
    assert {config.cluster for config in candidates} == set(space.CLUSTERS)
    assert {config.tile[1] for config in candidates} == set(space.TILES_N)
    halved = [config for config in candidates if config.stages is not None]
    assert halved and all(config.stages is not None and config.stages >= space.LEAST_STAGES for config in halved)


def test_elsewhere_candidates_are_those_of_the_tables() -> None:
    found = [spec.config for spec in space.kernels(SM80, DType.INT8, DType.BF16, EpilogueSpec.of())]
    assert found == list(configs_of(SM80, DType.INT8))
    near = plan.near_best(plan.model_of(SM80, DType.INT8), found, POINTS)
    assert all(near.values())


def test_tile_orders_are_tried_where_they_can_matter() -> None:
    assert space.launch_choices(C, 128, 4096, 132) == [C]
    many = space.launch_choices(C, 8192, 8192, 132)
    assert many[0] == C and len(many) == 5 and {config.swizzle for config in many} == {1, 2, 8}
    assert {config.raster for config in many} == set(Raster)
    # Ten tiles along N would be filled up to sixteen.
    narrow = space.launch_choices(C, 8192, 1280, 132)
    assert 8 not in {config.swizzle for config in narrow}
    assert all(blocks(config, 8192, 1280) <= 1.1 * blocks(C, 8192, 1280) for config in narrow)
    multistage = configs_of(SM80, DType.INT8)[0]
    assert space.launch_choices(multistage, 8192, 8192, 108) == [multistage]


@pytest.mark.parametrize("operand", [DType.E4M3, DType.INT8])
def test_pruning_keeps_the_known_winners(
    operand: DType, measured: Measurements, candidates: list[KernelConfig]
) -> None:
    times = measured.times[operand, "none"]
    model = plan.model_of(SM90, operand, 132)
    everything = list(dict.fromkeys([*candidates, *(config.compiled for t in times.values() for config in t)]))
    near = plan.near_best(model, everything, list(times))
    for point, configs in times.items():
        winner = min(configs, key=configs.__getitem__)
        assert winner.compiled in near[point], (point, winner.name)
    # It does rule out: at a point, most candidates.
    assert sum(map(len, near.values())) < 0.45 * len(everything) * len(near)


def test_slices_do_not_rule_out_what_is_known() -> None:
    sliced = replace(A, slices=4)
    near = plan.near_best(lambda config, m, n, k: {A: 10.0, B: 20.0, sliced: 2.0}[config], [A, B, sliced], [(1, 8, 64)])
    assert near[1, 8, 64] == {A: 1.0, sliced: 1.0}


def test_model_knows_what_it_must() -> None:
    model = plan.Waves(sms=132, tb_per_s=4.8)
    # Fewer multiprocessors take more waves, less bandwidth more time for the weights.
    assert plan.Waves(66).time(C, 4096, 4096, 4096) > 1.5 * model.time(C, 4096, 4096, 4096)
    assert plan.Waves(tb_per_s=2.4).time(A, 1, 28672, 8192) > 1.6 * model.time(A, 1, 28672, 8192)
    # Small M wants the transposition; a cluster of 8 along M that has one tile to do is mostly empty.
    assert model.time(A, 16, 4096, 4096) < model.time(C, 16, 4096, 4096)
    assert model.time(replace(A, cluster=(1, 8)), 16, 28672, 4096) > model.time(A, 16, 28672, 4096)
    # 136 blocks are two waves, unless pingpong hides the second one's beginning.
    straight = replace(C, schedule=KernelConfig.parse("128x128x128_ws").schedule)
    assert model.time(C, 4096, 4096, 1024) < model.time(straight, 4096, 4096, 1024)


def test_choice_is_bounded_diverse_and_the_same_each_time(
    measured: Measurements, candidates: list[KernelConfig]
) -> None:
    points = list(measured.times[DType.E4M3, "none"])
    near = plan.near_best(plan.model_of(SM90, DType.E4M3, 132), candidates, points)
    given = configs_of(SM90, DType.E4M3)
    chosen = plan.choose(near, 75, given)
    assert len(chosen) == len(set(chosen)) == 75 and set(chosen[: len(given)]) == set(given)
    assert plan.choose({point: near[point] for point in reversed(points)}, 75, given) == chosen
    assert plan.choose(near, 20, given) == chosen[:20]
    assert len({config.schedule for config in chosen}) == 3
    assert len({config.cluster for config in chosen}) >= 6
    assert len({config.tile for config in chosen}) >= 20
    assert all(sum(config in near[point] for config in chosen) >= 5 for point in points)


def test_choice_ends_with_the_candidates() -> None:
    assert plan.choose({(1, 8, 16): {A: 1.0, B: 1.2}}, 5) in ([A, B], [B, A])
    assert plan.choose({}, 5, [C]) == [C]


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_every_arch_can_be_planned(arch: Any) -> None:
    for operand in arch.operands:
        configs = [spec.config for spec in space.kernels(arch, operand, DType.BF16, EpilogueSpec.of())]
        assert configs and plan.near_best(plan.model_of(arch, operand), configs, [(16, 4096, 4096)])[16, 4096, 4096]
