"""``cutlass-w8a8 tune``: its steps on the command line, and what they leave in the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cutlass_w8a8 import batch
from cutlass_w8a8.arch import ARCHS
from cutlass_w8a8.cli import main
from cutlass_w8a8.cli import tune as steps
from cutlass_w8a8.dispatch import select
from cutlass_w8a8.dispatch.tables import read_table
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.problem import Problem
from cutlass_w8a8.tune import measure
from cutlass_w8a8.tune.records import Log, Record
from scripts import pregenerate

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-29-h200-configs.json"
FACTS = {"gpu": "NVIDIA Test", "capability": "9.0", "multiprocessors": 132}
SMALL = "--weights 4096x4096,8192x1024 --m 1,64 --max-kernels 40"
Capture = pytest.CaptureFixture[str]


def test_a_plan_is_what_build_and_pregenerate_read(tmp_path: Path, capsys: Capture) -> None:
    assert main(["tune", "plan", "--dir", str(tmp_path), *SMALL.split(), "--dtypes", "int8"]) == 0
    assert "40 kernels in " in capsys.readouterr().out
    specs = batch.read_plan(tmp_path / "plan.jsonl")
    assert len(specs) == 40 and {spec.operand for spec in specs} == {DType.INT8}
    assert pregenerate.main(["--plan", str(tmp_path / "plan.jsonl"), "--print-plan"]) == 0
    assert capsys.readouterr().out.count("int8") == 40
    first = (tmp_path / "plan.jsonl").read_text()
    assert main(["tune", "--dir", str(tmp_path), *SMALL.split(), "plan", "--dtypes", "int8"]) == 0
    assert (tmp_path / "plan.jsonl").read_text() == first


def test_models_and_other_archs_can_be_planned(tmp_path: Path, capsys: Capture) -> None:
    words = "--model llama-3-8b --tp 2 --m 16 --arch sm89 --dtypes fp8 --sm-count 58"
    assert main(["tune", "plan", "--dir", str(tmp_path), *words.split()]) == 0
    assert "fp8: 5 of 5 candidates" in capsys.readouterr().out


def test_fit_writes_a_table_that_dispatch_follows(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["tune", "fit", "--dir", str(tmp_path), str(RESULTS), "--points"]) == 0
    told = capsys.readouterr().out
    assert "on weight shapes left out" in told and "8192x28672x8192" not in told
    assert told.count("  int8  none ") == told.count("  e4m3  none ") == 80
    table = read_table(tmp_path / "table.json")
    monkeypatch.setenv("CUTLASS_W8A8_TABLES", str(tmp_path))
    for (operand, _), section in table.sections.items():
        for (n, k), intervals in section.measured.items():
            for interval in intervals:
                problem = Problem(
                    ARCHS["sm90"], interval.last, n, k, operand, DType.BF16, EpilogueSpec.of(), 132, "NVIDIA H200"
                )
                assert select(problem) == interval.row.config


def test_missing_files_are_errors(tmp_path: Path, capsys: Capture) -> None:
    for step, name in (("compile", "plan.jsonl"), ("measure", "plan.jsonl"), ("fit", "times.jsonl")):
        assert main(["tune", step, "--dir", str(tmp_path)]) == 1
        assert f"{tmp_path / name} cannot be read" in capsys.readouterr().err


def test_a_plan_of_another_arch_is_refused(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "facts", lambda commit: FACTS | {"capability": "8.9"})
    assert main(["tune", "plan", "--dir", str(tmp_path), *SMALL.split(), "--dtypes", "int8"]) == 0
    assert main(["tune", "measure", "--dir", str(tmp_path)]) == 1
    assert "lists kernels of sm90, and this GPU runs those of sm89; plan with --arch sm89" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "plan --keep 0",
        "plan --keep x",
        "plan --weights 4096",
        "plan --max-kernels 0",
        "fit --within 1",
        "measure --overlaps some",
        "nonsense",
    ],
)
def test_wrong_usage_is_status_2(words: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tune", *words.split()])
    assert caught.value.code == 2


def test_all_steps_run_in_order_and_again_from_where_they_were(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[int] = []
    plans: list[Any] = []

    def build_all(specs: list[Any], jobs: int, console: object) -> list[batch.Outcome]:
        compiled.append(len(specs))
        return [batch.Outcome(spec) for spec in specs]

    def run(plan: measure.Plan, log: Log, told: Any) -> bool:
        plans.append(plan)
        for number, point in enumerate(plan.points):
            times = {config.name: 10.0 + place for place, config in enumerate(plan.kernels[DType.INT8][:3])}
            log.append(Record(point.dtype, "none", point.m, point.n, point.k, times))
            told(point.name, number + 1, len(plan.points))
        return len(plans) > 1

    monkeypatch.setattr(batch, "build_all", build_all)
    monkeypatch.setattr(measure, "facts", lambda commit: FACTS)
    monkeypatch.setattr(measure, "run", run)
    words = ["tune", "--dir", str(tmp_path), *SMALL.split(), "--m", "1,16,64", "--dtypes", "int8", "--minutes", "2"]
    # Time ran out: nothing is fitted yet.
    assert main(words) == 1
    assert "time is up" in capsys.readouterr().out and not (tmp_path / "table.json").exists()
    before = (tmp_path / "plan.jsonl").read_bytes()
    assert main(words) == 0
    assert compiled == [40, 40] and (tmp_path / "plan.jsonl").read_bytes() == before
    assert [plan.seconds for plan in plans] == [120.0, 120.0] and len(plans[0].points) == 6
    assert read_table(tmp_path / steps.TABLE).device == "NVIDIA Test"
