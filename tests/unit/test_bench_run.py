"""A benchmark run on a stand-in for the device: who takes part, in which order, what is wrong, what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8.bench import accuracy, orders, providers, report, timing
from cutlass_w8a8.bench.results import NOT_COMPARABLE, PROVIDERS
from cutlass_w8a8.bench.run import Plan, merged, run
from cutlass_w8a8.bench.shapes import ORDERS, Point
from cutlass_w8a8.errors import UnsupportedError
from tests.unit.bench_fakes import fake_device, fake_launches, fake_vllm  # noqa: F401 (fixtures)

ROOT = Path(__file__).resolve().parents[2]
ALL = list(PROVIDERS)


def choose(order: str, wanted: list[str], library: Path | None = None, ops: Path | None = None):
    return providers.choose(order, wanted, [], library, ops)


# Who takes part ------------------------------------------------------------------------------------------------------


def test_every_provider_is_made_or_missing_with_a_reason(vllm: Path) -> None:
    made, missing, _ = choose("alone", ALL, vllm)
    assert {p.name for p in made} | set(missing) == set(ALL)
    assert {p.name for p in made if not p.comparable} == set(NOT_COMPARABLE)
    assert set(missing) <= {"triton"}


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "cutlass_w8a8.bench.triton_mm", raising=False)
    _, missing, _ = choose("alone", ["vllm", "triton"])
    assert missing["ours"] == "not asked for"
    assert missing["vllm"].startswith("no library; give --vllm FILE")
    assert missing["triton"].startswith("ModuleNotFoundError: ")


def test_a_library_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "_C.so"
    path.write_text("not a library")
    _, missing, _ = choose("alone", ["vllm"], path)
    assert missing["vllm"].startswith("OSError: ")


def test_missing_by_order() -> None:
    reasons = {"alone": {"vllm": "no", "ours": "a"}, "chain": {"vllm": "no", "ours": "b", "bf16": "c"}}
    assert merged(reasons) == {"vllm": "no", "alone: ours": "a", "chain: ours": "b", "chain: bf16": "c"}


# Orders --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("alone", ["gemm none"]),
        ("gemm", ["gemm weights"]),
        ("chain", ["quantise launch", "gemm weights"]),
    ],
)
def test_how_ours_is_launched(order: str, expected: list[str], launches: list[str]) -> None:
    (provider,), _, _ = choose(order, ["ours"])
    x = providers.make_operands(Point("int8", 3, 16, 32, order), torch.int8, 1, "cpu")
    provider.call(x, 0)
    assert launches == expected


def test_peers_quantise_with_vllms_kernel_if_there_is_one(launches: list[str], vllm: Path) -> None:
    for dtype in ("fp8", "int8"):
        (peer,), _, label = choose("chain", ["vllm"], vllm, vllm)
        x = providers.make_operands(Point(dtype, 3, 16, 32, "chain"), providers.DTYPES[dtype], 1, "cpu")
        x.poison()
        peer.call(x, 1)
        assert not accuracy.wrong(accuracy.check(x, 1))
        assert label == "vLLM's"
    assert launches == []


def test_peers_else_quantise_with_ours(launches: list[str], vllm: Path) -> None:
    (peer,), _, label = choose("chain", ["vllm"], vllm)
    x = providers.make_operands(Point("int8", 3, 16, 32, "chain"), torch.int8, 1, "cpu")
    peer.call(x, 0)
    assert launches == ["quantise none"]
    assert label == "ours without dependent launch (not vLLM's: no --vllm-ops FILE)"


def test_a_package_without_launch_modes_is_missing_with_the_reason(monkeypatch: pytest.MonkeyPatch, vllm: Path) -> None:
    def scaled_mm(a, b, scale_a, scale_b, out_dtype, *, out, config):
        return cutlass_w8a8.scaled_mm(a, b, scale_a, scale_b, out_dtype, out=out, config=config)

    monkeypatch.setattr(orders, "_package", SimpleNamespace(scaled_mm=scaled_mm))
    assert [p.name for p in choose("alone", ["ours"])[0]] == ["ours"]
    for order in ("gemm", "chain"):
        assert "no dependent launch; measure --orders alone" in choose(order, ["ours"])[1]["ours"]
    made, missing, label = choose("chain", ["vllm", "bf16"], vllm)
    assert [p.name for p in made] == ["bf16"]
    assert "no quantize_per_token" in missing["vllm"] and label.startswith("nothing (not vLLM's: ")
    assert [p.name for p in choose("chain", ["vllm", "bf16"], vllm, vllm)[0]] == ["vllm", "bf16"]


def test_what_has_no_use_for_scales_per_token_sits_out_of_a_chain() -> None:
    made, _, _ = choose("alone", ["torch_tensor", "int_mm", "int_mm_dequant"])
    served = {p.name: p.serves(Point("int8", 64, 8, 16, "chain")) for p in made}
    assert served == {"torch_tensor": False, "int_mm": False, "int_mm_dequant": True}


# Accuracy ------------------------------------------------------------------------------------------------------------


def computed(name: str, dtype: str, vllm: Path | None = None) -> providers.Operands:
    (provider,), _, _ = choose("alone", [name], vllm)
    x = providers.make_operands(Point(dtype, 70, 264, 512), providers.DTYPES[dtype], 1, "cpu")
    x.poison()
    provider.call(x, 1)
    return x


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["ours", "vllm", "int_mm_dequant"])
def test_right_results_pass(name: str, dtype: str, vllm: Path) -> None:
    if (name, dtype) != ("int_mm_dequant", "fp8"):
        found = accuracy.check(computed(name, dtype, vllm), 1)
        assert 0 < found["error / allowed"] <= 1 and not accuracy.wrong(found)


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_wrong_results_do_not(dtype: str) -> None:
    x = computed("ours", dtype)
    assert accuracy.wrong(accuracy.check(x, 0)), "the other activation's result"
    x.out[-1, -1] = torch.nan
    assert accuracy.check(x, 1)["error / allowed"] == accuracy.NOT_A_NUMBER
    x.poison()
    assert accuracy.check(x, 1)["largest error"] == accuracy.NOT_A_NUMBER


def test_a_piece_of_k_that_is_left_out_is_seen() -> None:
    x = computed("ours", "fp8")
    a, b = providers.pick(x, 1)
    cut = b.t().float()
    cut[:, 128:160] = 0
    cutlass_w8a8.scaled_mm(a, cut.to(b.dtype).t(), x.scale_a, x.scale_b, out=x.out)
    assert accuracy.wrong(accuracy.check(x, 1))


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_wrong_quantisation_is_seen(dtype: str, launches: list[str]) -> None:
    (provider,), _, _ = choose("chain", ["ours"])
    x = providers.make_operands(Point(dtype, 5, 16, 32, "chain"), providers.DTYPES[dtype], 1, "cpu")
    provider.call(x, 0)
    assert 0.5 < accuracy.check(x, 0)["quantisation error / allowed"] <= 1
    x.tokens[0] *= 1.05
    assert accuracy.wrong(accuracy.check(x, 0))


def test_sampled_rows_include_the_last() -> None:
    cpu = torch.device("cpu")
    assert accuracy.sample(3, 64, cpu).tolist() == [0, 1, 2]
    chosen = accuracy.sample(8192, 64, cpu).tolist()
    assert chosen[0] == 0 and chosen[-1] == 8191 and len(set(chosen)) == 64


# Timing --------------------------------------------------------------------------------------------------------------


def test_measure(device: None, launches: list[str]) -> None:
    made, _, _ = choose("chain", ["ours", "int_mm_dequant", "bf16"])
    result = timing.measure(Point("int8", 32, 16, 32, "chain"), made, 25)
    assert result.microseconds == {"ours": 4.0, "int_mm_dequant": 14.0, "bf16": 4.0}
    assert set(result.accuracy) == {"ours", "int_mm_dequant"} and result.rounds == timing.MAX_ROUNDS
    assert not any(accuracy.wrong(found) for found in result.accuracy.values())
    assert result.calls == timing.MIN_CALLS


def test_a_failing_peer_does_not_end_the_run(device: None) -> None:
    def refuse(*_):
        raise RuntimeError("cuBLAS says no")

    made = [providers.ours(), providers.Provider("torch_row", refuse, lambda _: True)]
    result = timing.measure(Point("int8", 3, 16, 32), made, 25)
    assert result.errors == {"torch_row": "RuntimeError: cuBLAS says no"} and set(result.microseconds) == {"ours"}
    assert timing.measure(Point("int8", 3, 16, 32), made[1:], 25).microseconds == {}


def test_a_result_that_is_not_written_is_wrong(device: None) -> None:
    result = timing.measure(Point("int8", 3, 16, 32), [providers.Provider("ours", lambda *_: 0, lambda _: True)], 25)
    assert accuracy.wrong(result.accuracy["ours"])


# A whole run ---------------------------------------------------------------------------------------------------------


def test_run(device: None, launches: list[str], vllm: Path) -> None:
    plan = Plan(
        weights={(16, 32): ["tiny o tp1"]},
        left_out=["tiny qkv tp8: no"],
        batches=[1, 32],
        orders=list(ORDERS),
        providers=["ours", "vllm", "int_mm_dequant", "bf16"],
        configs=["128x128x128_ws"],
        vllm=vllm,
        host=False,
        commit="abc",
    )
    found = run(plan)
    assert [p.point.order for p in found.points] == ["alone", "alone", "gemm", "gemm", "chain", "chain"] * 2
    assert [c.name for c in found.columns] == ["ours", "vllm", "int_mm_dequant", "bf16", "128x128x128_ws"]
    assert found.missing == dict.fromkeys(["torch_row", "torch_tensor", "int_mm", "triton"], "not asked for")
    assert not report.own_failures(found)
    text = report.text(found)
    assert "quantisation in front of peers: ours without dependent launch" in text
    assert "16x32: tiny o tp1" in text and "left out: tiny qkv tp8: no" in text
    assert found.conditions["machine"]["commit"] == "abc" and found.ceilings["copy TB/s"] == 4.0


def test_without_a_gpu() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="torch sees none; --from-json FILE"):
            run(Plan())


def test_triton_kernel() -> None:
    pytest.importorskip("triton")
    # Its interpreter has to be chosen before the kernel is defined, and cuts results to bf16 instead of rounding
    # them, which doubles their error.
    program = """
from cutlass_w8a8.bench import accuracy, providers
from cutlass_w8a8.bench.shapes import Point
for dtype in ("int8", "fp8"):
    for extents in ((5, 72, 80), (40, 264, 272), (1, 64, 256), (130, 136, 512)):
        x = providers.make_operands(Point(dtype, *extents), providers.DTYPES[dtype], 1, "cpu")
        x.poison()
        providers.triton().call(x, 1)
        assert accuracy.check(x, 1)["error / allowed"] < 2, (dtype, extents)
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not know this numpy")
    assert done.returncode == 0, done.stderr
