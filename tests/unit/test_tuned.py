"""Tuned tables: read, checked, found by device and variable, and what they choose."""

from __future__ import annotations

import copy
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cutlass_w8a8.arch import ARCHS
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch import configs_of, select, tuned, validate
from cutlass_w8a8.dispatch.table import Corrected, Cost, Row, blocks
from cutlass_w8a8.dispatch.tables import SCHEMA, read_table, write_text
from cutlass_w8a8.dispatch.waves import Waves
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import TableError
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.problem import Problem
from cutlass_w8a8.spec import KernelSpec

SMALL, MIDDLE, LARGE = "64x16x128_1x1_ws_swap", "64x64x128_1x1_ws_swap", "128x128x128_2x1_pingpong"
DEVICE = "NVIDIA Test"
CONTENT: dict[str, Any] = {
    "schema": SCHEMA,
    "device": DEVICE,
    "arch": "sm90",
    "multiprocessors": 132,
    "conditions": {"driver": "1.2"},
    "tables": [
        {
            "operand": "e4m3",
            "overlap": "none",
            "rows": [
                {"config": SMALL, "cost": [0.5, 1.0, 0.5, 3.0, 4.0], "max_m": 256},
                {"config": MIDDLE, "cost": [0.8, 1.0, 0.5, 3.0, 4.0]},
                {"config": LARGE, "cost": [2.5, 1.0, 0.5, 3.0, 4.0], "residuals": [[64, 4096, 4096, 0.25]]},
            ],
            "measured": [
                # Not what the costs say: the measurement decides.
                {"n": 4096, "k": 4096, "intervals": [[8, 32, MIDDLE], [64, 64, LARGE], [256, 512, SMALL]]}
            ],
        }
    ],
}
PROBLEM = Problem(ARCHS["sm90"], 16, 4096, 4096, DType.E4M3, DType.BF16, EpilogueSpec.of(), sm_count=132, device=DEVICE)


def write(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(CONTENT | changes))
    return path


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write(tmp_path / "table.json")
    monkeypatch.setenv("CUTLASS_W8A8_TABLES", str(path))
    return path


def at(m: int, **changes: Any) -> str:
    return select(replace(PROBLEM, m=m, **changes)).name


def by_model(names: tuple[str, ...], m: int, n: int = 4096, k: int = 4096, prior_weight: int = 0) -> str:
    rows = {row.config.name: row for row in read_table(Path(os.environ["CUTLASS_W8A8_TABLES"])).sections[
        DType.E4M3, "none"
    ].rows}  # fmt: skip
    prior = {name: Waves().time(rows[name].config, m, n, k) ** prior_weight for name in names}
    return min(names, key=lambda name: rows[name].time(m, n, k, 132) * prior[name])


def test_text_is_read_back(table: Path, tmp_path: Path) -> None:
    first = read_table(table)
    again = tmp_path / "again.json"
    again.write_text(write_text(first))
    second = read_table(again)
    assert write_text(second) == write_text(first)
    assert (second.device, second.sm_count, second.conditions) == (DEVICE, 132, {"driver": "1.2"})
    section = second.sections[DType.E4M3, "none"]
    assert section.rows == first.sections[DType.E4M3, "none"].rows
    assert section.rows[0].max_m == 256
    assert section.rows[2].cost == Corrected(Cost(2.5, 1.0, 0.5, 3.0, 4.0), ((64, 4096, 4096, 0.25),))
    assert section.measured == first.sections[DType.E4M3, "none"].measured


@pytest.mark.parametrize(("m", "name"), [(8, MIDDLE), (16, MIDDLE), (32, MIDDLE), (64, LARGE), (300, SMALL)])
def test_what_was_measured_decides_where_it_was(m: int, name: str, table: Path) -> None:
    assert at(m) == name


@pytest.mark.parametrize("m", [33, 48, 63])
def test_between_measured_m_the_model_chooses_among_the_two(m: int, table: Path) -> None:
    assert by_model((SMALL, MIDDLE, LARGE), m) == MIDDLE
    assert at(m) == by_model((MIDDLE, LARGE), m)


def test_between_measured_m_a_tile_that_fits_may_go_before_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, narrow = "64x128x128_1x1_pingpong_swap", "64x96x128_1x1_pingpong_swap"
    known = [[m, 4096, 14336, 0.0] for m in (128, 256)]
    rows = [
        {"config": name, "cost": [per_k, 1.0, 0.5, 3.0, 8.0], "residuals": known}
        for name, per_k in ((wide, 1.0), (narrow, 0.75))
    ]
    measured = [{"n": 4096, "k": 14336, "intervals": [[128, 128, wide], [256, 256, wide]]}]
    tables = [CONTENT["tables"][0] | {"rows": rows, "measured": measured}]
    monkeypatch.setenv("CUTLASS_W8A8_TABLES", str(write(tmp_path / "table.json", tables=tables)))
    # Up to 192, two tiles of 96 do.
    assert [at(m, k=14336) for m in (128, 129, 192, 193, 256)] == [wide, narrow, narrow, wide, wide]


@pytest.mark.parametrize("config", ["64x128x128_1x1_pingpong_swap", "128x64x128_1x1_pingpong"])
def test_rows_that_a_tile_lacks_are_not_taken_in(config: str) -> None:
    few, many = (Waves().time(KernelConfig.parse(config), m, 64, 14336) for m in (1, 64))
    assert few < many


@pytest.mark.parametrize("shape", [(4, 4096, 4096), (513, 4096, 4096), (16, 4096, 8192), (64, 8192, 4096)])
def test_elsewhere_the_model_chooses_among_the_rows_that_fit(shape: tuple[int, int, int], table: Path) -> None:
    m, n, k = shape
    names = (SMALL, MIDDLE, LARGE) if m <= 256 else (MIDDLE, LARGE)
    assert at(m, n=n, k=k) == by_model(names, m, n, k, 8 if m <= 64 else 1)


def test_those_that_take_anothers_place_are_ranked_by_what_they_are_meant_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However cheap: tile orders that were not measured here, and rows of other M, come after the others."""
    ordered = f"{LARGE}_swizzle8"
    cost = [0.5, 1.0, 0.5, 3.0, 4.0]
    cheap = [0.4, 1.0, 0.1, 0.5, 0.5]
    rows: list[dict[str, Any]] = [
        {"config": ordered, "cost": cheap},
        {"config": SMALL, "cost": cheap, "max_m": 256},
        {"config": MIDDLE, "cost": [2 * part for part in cost]},
        {"config": LARGE, "cost": cost},
    ]

    def ranked(rows: list[dict[str, Any]]) -> list[str]:
        tables = [CONTENT["tables"][0] | {"rows": rows, "measured": []}]
        monkeypatch.setenv("CUTLASS_W8A8_TABLES", str(write(tmp_path / f"{len(rows)}.json", tables=tables)))
        found = [config.name for config in tuned.ranked(replace(PROBLEM, m=2048))]
        assert found[0] == at(2048)
        return found

    first, second, *rest = ranked(rows)
    assert {first, second} == {LARGE, MIDDLE} and set(rest) == {ordered, SMALL}
    # Where it is the kernel's only row, its cost is all there is.
    assert ranked(rows[:3])[0] == ordered


def test_a_cost_that_promises_too_much_is_not_believed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 rows of a tile for one of the problem: whatever its cost says, the device model knows better."""
    rows = [
        {"config": SMALL, "cost": [0.6, 1.0, 0.5, 3.0, 4.0]},
        {"config": LARGE, "cost": [0.1, 1.0, 0.1, 2.0, 5.0]},
    ]
    tables = [CONTENT["tables"][0] | {"rows": rows, "measured": []}]
    monkeypatch.setenv("CUTLASS_W8A8_TABLES", str(write(tmp_path / "table.json", tables=tables)))
    assert by_model((SMALL, LARGE), 1, 30000, 1024) == LARGE
    assert at(1, n=30000, k=1024) == SMALL


@pytest.mark.parametrize(
    "changes",
    [
        {"device": None},
        {"device": "NVIDIA Other"},
        {"sm_count": 66},
        {"operand": DType.INT8},
        {"arch": ARCHS["sm80"], "operand": DType.INT8},
    ],
)
def test_what_the_table_is_not_for_goes_by_the_arch(changes: dict[str, Any], table: Path) -> None:
    problem = replace(PROBLEM, **changes)
    assert tuned.choose(problem) is None
    assert select(problem) == select(replace(problem, device=None))


def test_modes_that_were_not_measured_go_by_the_next_weaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [{"n": 4096, "k": 4096, "intervals": [[16, 16, LARGE]]}]
    launch = CONTENT["tables"][0] | {"overlap": "launch", "measured": measured}
    path = write(tmp_path / "table.json", tables=[CONTENT["tables"][0], launch])
    monkeypatch.setenv("CUTLASS_W8A8_TABLES", str(path))
    assert [at(16, overlap=mode) for mode in ("none", "launch", "weights")] == [MIDDLE, LARGE, LARGE]


def test_what_a_weaker_mode_measured_goes_before_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [{"n": 4096, "k": 4096, "intervals": [[16, 16, LARGE]]}]
    more = [{"n": 4096, "k": 4096, "intervals": [[16, 16, MIDDLE], [700, 700, MIDDLE]]}]
    sections = [
        CONTENT["tables"][0] | {"measured": more},
        CONTENT["tables"][0] | {"overlap": "weights", "measured": few},
    ]
    monkeypatch.setenv("CUTLASS_W8A8_TABLES", str(write(tmp_path / "table.json", tables=sections)))
    assert at(16, overlap="weights") == LARGE and at(700, overlap="weights") == MIDDLE


def test_batch_invariance_leaves_out_what_divides_k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = "128x64x128_1x1_cooperative_streamk_split2"
    rows = [{"config": split, "cost": [0.01, 1.0, 0.0, 0.0, 8.0]}, {"config": LARGE, "cost": [2.5, 1.0, 0.5, 3.0, 4.0]}]
    entry = {"overlap": "none", "rows": rows, "measured": [{"n": 4096, "k": 4096, "intervals": [[16, 16, split]]}]}
    tables = [entry | {"operand": operand} for operand in ("e4m3", "int8")]
    monkeypatch.setenv("CUTLASS_W8A8_TABLES", str(write(tmp_path / "table.json", tables=tables)))
    for m in (16, 17):
        assert at(m) == at(m, operand=DType.INT8) == at(m, operand=DType.INT8, batch_invariant=True) == split
        assert at(m, batch_invariant=True) == LARGE


def test_rows_an_epilogue_does_not_fit_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = "64x64x64_1x1_ws_s27_swap"
    rows = [{"config": full, "cost": [0.01, 1.0, 0.0, 0.0, 8.0]}, {"config": LARGE, "cost": [2.5, 1.0, 0.5, 3.0, 4.0]}]
    path = write(tmp_path / "t.json", tables=[{"operand": "e4m3", "overlap": "none", "rows": rows}])
    monkeypatch.setenv("CUTLASS_W8A8_TABLES", str(path))
    assert at(16) == full
    assert at(16, out=DType.FP32) == LARGE


def test_first_table_wins_and_shipped_ones_come_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: Path
) -> None:
    assert tuned.tables()[0].device == DEVICE
    folder = tmp_path / "folder"
    folder.mkdir()
    other = copy.deepcopy(CONTENT)
    other["tables"][0]["measured"] = []
    for name, device in (("b", DEVICE), ("a", "NVIDIA A")):
        (folder / f"{name}.json").write_text(json.dumps(other | {"device": device}))
    monkeypatch.setattr(tuned, "SHIPPED", folder)
    monkeypatch.setenv("CUTLASS_W8A8_TABLES", f"{table}{os.pathsep}")
    tuned._tables.cache_clear()
    assert [x.device for x in tuned.tables()] == [DEVICE, "NVIDIA A", DEVICE]
    assert at(64) == LARGE
    monkeypatch.setenv("CUTLASS_W8A8_TABLES", f"{folder}{os.pathsep}{table}")
    assert at(64) == by_model_of_first(64)
    monkeypatch.delenv("CUTLASS_W8A8_TABLES")
    assert at(64) == by_model_of_first(64)
    tuned._tables.cache_clear()


def by_model_of_first(m: int) -> str:
    rows = next(x for x in tuned.tables() if x.device == DEVICE).sections[DType.E4M3, "none"].rows
    return min(rows, key=lambda row: row.time(m, 4096, 4096, 132)).config.name


def test_files_are_read_once(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tuned.tables()
    table.write_text("broken now")
    assert tuned.tables() is first


def test_dispatch_may_choose_what_tables_hold(table: Path) -> None:
    names = [config.name for config in configs_of(ARCHS["sm90"], DType.E4M3)]
    assert len(names) == len(set(names)) and MIDDLE in names


ROWS = "tables[0].rows[0]"
MEASURED = "tables[0].measured[0]"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("schema",), 0, f"is of schema 0, this version reads {SCHEMA}"),
        (("arch",), "sm33", "arch: 'sm33' is not understood"),
        (("device",), 7, "device: 7 is not a str"),
        (("multiprocessors",), 0, "multiprocessors: 0 is below 1"),
        (("tables",), {}, "tables: {} is not a list"),
        (("tables", 0, "operand"), "fp4", "tables[0].operand: 'fp4'"),
        (("tables", 0, "overlap"), "some", "tables[0].overlap: 'some' is not one of none, launch, weights"),
        (("tables", 0, "rows"), [], "tables[0].rows: there are none"),
        (("tables", 0, "rows", 0, "config"), "64x8x128_ws", f"{ROWS}: config 64x8x128_1x1_ws is impossible for sm90"),
        (("tables", 0, "rows", 0, "config"), "nonsense", f"{ROWS}: 'nonsense' is not understood"),
        (("tables", 0, "rows", 0, "config"), 5, f"{ROWS}: 5 is not understood"),
        (("tables", 0, "rows", 0, "config"), MIDDLE, "tables[0].rows[1]: config " + MIDDLE + " is there twice"),
        (("tables", 0, "rows", 0, "config"), "64x16x128_ws_accurate", "which only a caller may choose"),
        (("tables", 0, "rows", 0, "max_k"), 5, f"{ROWS}: max_k is not understood"),
        (("tables", 0, "rows", 0, "max_m"), "5", f"{ROWS}.max_m: '5' is not a int"),
        (("tables", 0, "rows", 0, "cost"), [1, 2, 3], f"{ROWS}.cost: [1, 2, 3] is not 5 finite numbers"),
        (("tables", 0, "rows", 0, "cost"), [1, 2, 3, 4, float("nan")], "is not 5 finite numbers"),
        (("tables", 0, "rows", 0, "cost"), [1, 2, 3, 4, 0], "a bandwidth of zero"),
        (("tables", 0, "rows", 0, "residuals"), [[0, 8, 16, 0.1]], f"{ROWS}.residuals[0]: 0 is below 1"),
        (("tables", 0, "rows", 0, "residuals"), [[1, 8, 0.1]], f"{ROWS}.residuals[0]: [1, 8, 0.1] is not 4"),
        (("tables", 0, "measured", 0, "n"), True, f"{MEASURED}.n: True is not a int"),
        (("tables", 0, "measured", 0, "intervals"), [], f"{MEASURED}.intervals: they must be at least one"),
        (("tables", 0, "measured", 0, "intervals"), [[1, 2]], f"{MEASURED}.intervals[0]: [1, 2] is not [first"),
        (("tables", 0, "measured", 0, "intervals"), [[8, 4, SMALL]], "ascending, and apart"),
        (("tables", 0, "measured", 0, "intervals"), [[1, 8, SMALL], [8, 9, LARGE]], "ascending, and apart"),
        (("tables", 0, "measured", 0, "intervals"), [[1, 8, "128x64x128_ws"]], "is none of the rows"),
    ],
)  # fmt: skip
def test_bad_tables_are_refused_by_file_and_entry(
    place: tuple[Any, ...], value: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = copy.deepcopy(CONTENT)
    parent: Any = content
    for step in place[:-1]:
        parent = parent[step]
    parent[place[-1]] = value
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    monkeypatch.setenv("CUTLASS_W8A8_TABLES", str(path))
    with pytest.raises(TableError) as caught:
        select(PROBLEM)
    assert str(path) in str(caught.value) and message in str(caught.value) and "tune fit" in str(caught.value)


def test_twofold_sections_and_shapes_are_refused(tmp_path: Path) -> None:
    section = CONTENT["tables"][0]
    with pytest.raises(TableError, match=r"tables\[1\]: e4m3 with overlap none is there twice"):
        read_table(write(tmp_path / "a.json", tables=[section, section]))
    with pytest.raises(TableError, match=r"measured\[1\]: n=4096, k=4096 is there twice"):
        read_table(write(tmp_path / "b.json", tables=[section | {"measured": section["measured"] * 2}]))


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_files_that_are_no_tables_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TableError, match=str(path)):
        read_table(path)


def test_missing_paths_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_TABLES", str(tmp_path / "nothing"))
    with pytest.raises(TableError, match=r"CUTLASS_W8A8_TABLES: .*nothing is neither a file nor a folder"):
        select(PROBLEM)


def test_residuals_correct_near_the_measured_point_only() -> None:
    cost = Cost(1.0, 1.0, 0.5, 3.0, 4.0)
    config = KernelConfig.parse(LARGE)
    corrected = Row(config, Corrected(cost, ((256, 4096, 4096, 0.3), (2048, 4096, 4096, -0.3))))

    def factor(m: int, n: int, k: int) -> float:
        return corrected.time(m, n, k, 132) / cost.time(config, m, n, k, 132)

    assert 1.29 < factor(256, 4096, 4096) < 1.35 and 0.74 < factor(2048, 4096, 4096) < 0.78
    assert factor(256, 4096, 4096) > factor(256, 8192, 8192) > factor(256, 16384, 16384) > 1
    assert factor(16, 4096, 4096) == pytest.approx(1, abs=1e-3)
    # What is too far to count may be left out without a step.
    for m in range(50, 70):
        assert abs(factor(m + 1, 4096, 4096) - factor(m, 4096, 4096)) < 0.01


def test_swizzled_strips_are_filled_up() -> None:
    config = KernelConfig.parse("128x128x128_2x1_pingpong_swizzle8")
    assert blocks(replace(config, swizzle=1), 4096, 1280) == 32 * 10
    assert blocks(config, 4096, 1280) == 32 * 16
    # Strips get narrower where the shorter side has few tiles.
    assert blocks(config, 4096, 512) == 32 * 4 and blocks(config, 4096, 384) == 32 * 4
    assert blocks(config, 512, 128) == 4 and blocks(config, 128, 256) == 4 * 2


def test_shipped_tables_are_sound() -> None:
    shipped = tuned.tables()
    assert {table.device for table in shipped} == {"NVIDIA H200"}
    for table in shipped:
        for (operand, overlap), section in table.sections.items():
            for (n, k), intervals in section.measured.items():
                problem = Problem(
                    table.arch,
                    intervals[0].first,
                    n,
                    k,
                    operand,
                    DType.BF16,
                    EpilogueSpec.of(),
                    table.sm_count,
                    table.device,
                    overlap,
                )
                assert select(problem) == intervals[0].row.config


def test_shipped_tables_serve_every_problem() -> None:
    for table in tuned.tables():
        for operand, overlap in table.sections:
            for out, m, n, k in itertools.product(
                (DType.BF16, DType.FP32), (1, 16, 17, 100, 1000, 20_000), (8, 1280, 4096), (16, 4096)
            ):
                problem = Problem(
                    table.arch, m, n, k, operand, out, EpilogueSpec.of(), table.sm_count, table.device, overlap
                )
                config = select(problem)
                validate(KernelSpec(table.arch, operand, out, EpilogueSpec.of(), config), config)
