"""Pictures: which there are for which results, that they can be drawn from any, and what matplotlib's absence means."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from cutlass_w8a8.bench import ceilings, plots
from cutlass_w8a8.bench.results import PROVIDERS, Column, Measurement, Run, load
from cutlass_w8a8.bench.shapes import BATCHES, ORDERS, WEIGHTS, Point
from cutlass_w8a8.bench.smooth import dense_batches
from cutlass_w8a8.cli import main

pytest.importorskip("matplotlib")

Capture = pytest.CaptureFixture[str]

SHAPES = WEIGHTS[2:4]
SPEED = {"ours": 1.0, "vllm": 1.1, "torch_row": 1.2, "torch_tensor": 0.9, "triton": 1.3, "bf16": 1.9}
OLD = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-29-h200-bench.json"


def synthetic(names=tuple(SPEED), shapes=SHAPES, batches=BATCHES, orders=tuple(ORDERS), dtypes=("fp8", "int8")) -> Run:
    """A run on a device that reaches 3.5 TB/s and 1500 TOP/s, give or take."""
    chance = random.Random(1)
    points = []
    for order in orders:
        for dtype in dtypes:
            for n, k in shapes:
                for m in batches:
                    us = 4 + max(2 * m * n * k / 1500e6, (n * k + m * k + 2 * m * n) / 3.5e6)
                    times = {name: us * SPEED[name] * chance.uniform(0.9, 1.1) for name in names}
                    points.append(Measurement(Point(dtype, m, n, k, order), times))
    return Run(
        [Column(name, name not in ("torch_tensor", "bf16")) for name in names],
        points,
        ceilings={"copy TB/s": 4.1, "data sheet": ceilings.data_sheet("NVIDIA H200")},
        conditions={"machine": {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "date": "2026-01-01T00:00:00"}},
    )


def test_pictures_of_a_whole_run(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(synthetic(dtypes=("int8",)).as_json()))
    assert main(["bench", "--from-json", str(path), "--plots", str(tmp_path / "plots")]) == 0
    kinds = [f"int8-{order}" for order in ORDERS]
    expected = {f"{what}-{kind}.svg" for what in ("speedup", "time") for kind in kinds}
    # Of a chain there is no roofline: two kernels share its time.
    expected |= {f"roofline-{kind}.svg" for kind in kinds if not kind.endswith("chain")}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == expected


def drawn(run: Run) -> dict[str, str]:
    """All words of each picture."""
    from matplotlib.text import Text

    return {name: "\n".join(t.get_text() for t in f.findobj(Text)) for name, f in plots.figures(run)}


def test_what_pictures_say() -> None:
    words = drawn(synthetic(dtypes=("fp8",), orders=("alone",)))
    assert "time of the fastest peer / ours, geometric mean 1." in words["speedup-fp8-alone"]
    assert "time of vllm / ours" in words["speedup-fp8-alone"] and "bf16" not in words["speedup-fp8-alone"]
    assert "28672 x 4096" in words["speedup-fp8-alone"]
    assert "memory: a large copy, measured, 4.10 TB/s" in words["roofline-fp8-alone"]
    assert "tensor cores: data sheet, 1979 TFLOP/s" in words["roofline-fp8-alone"]
    assert (
        "bf16" in words["time-fp8-alone"] and "NVIDIA H200, torch 2.11.0+cu130, 2026-01-01" in words["time-fp8-alone"]
    )


def test_every_provider_has_a_colour() -> None:
    assert set(plots._COLOURS) == set(PROVIDERS)


def test_ours_alone_has_no_speedup() -> None:
    words = drawn(synthetic(("ours",), ((4096, 4096),), dense_batches(), ("gemm",), ("int8",)))
    assert set(words) == {"roofline-int8-gemm", "time-int8-gemm"}
    one_point = drawn(synthetic(("ours",), ((4096, 4096),), (7,), ("alone",), ("int8",)))
    assert set(one_point) == {"roofline-int8-alone", "time-int8-alone"}


def test_a_single_peer_is_not_drawn_twice() -> None:
    words = drawn(synthetic(("ours", "vllm"), orders=("alone",), dtypes=("fp8",)))["speedup-fp8-alone"]
    assert "time of vllm" in words and "fastest peer" not in words


def test_holes_are_left_white() -> None:
    run = synthetic(orders=("alone",), dtypes=("fp8",))
    for r in run.points[::3]:
        r.microseconds.pop("ours")
    assert len(drawn(run)) == 3
    for r in run.points:
        r.microseconds.clear()
    assert drawn(run) == {}


def test_old_results_can_be_drawn(tmp_path: Path) -> None:
    written = plots.render(load(OLD), tmp_path, "png")
    assert len(written) == 6 and all(path.read_bytes()[:4] == b"\x89PNG" for path in written)
    assert "tensor cores: data sheet, 1979 TOP/s" in drawn(load(OLD))["roofline-int8-alone"]


def test_the_same_picture_has_the_same_bytes(tmp_path: Path) -> None:
    run = synthetic(orders=("alone",), dtypes=("fp8",))
    for name in ("a", "b"):
        plots.render(run, tmp_path / name)
    assert all(path.read_bytes() == (tmp_path / "b" / path.name).read_bytes() for path in (tmp_path / "a").iterdir())


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert main(["bench", "--from-json", str(OLD), "--plots", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "pip install 'cutlass-w8a8[bench]'" in captured.err


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "--from-json", str(OLD), "--plots", str(tmp_path / "file")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_matplotlib_is_imported_to_draw_only() -> None:
    program = "import cutlass_w8a8.cli, sys; sys.exit('matplotlib' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("gpu", "model"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_data_sheets(gpu: str, model: str) -> None:
    assert ceilings.data_sheet(gpu)["model"] == model
    assert ceilings.data_sheet("NVIDIA GeForce RTX 2080") == {}
