"""Compiling in other processes: what comes back, what an end on either side does, and many at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cutlass_w8a8 import batch, pipeline, worker
from cutlass_w8a8.arch import SM80, SM90
from cutlass_w8a8.dtypes import OPERAND_DTYPES, OUTPUT_DTYPES, DType
from cutlass_w8a8.evt import epilogues
from cutlass_w8a8.spec import KernelSpec, QuantSpec
from cutlass_w8a8.worker import Worker
from tests.unit.test_background import SPECS
from tests.unit.test_races import alive, wait_for

ROOT = Path(__file__).parents[2]
SPEC = QuantSpec(SM90, DType.BF16, DType.INT8)


@pytest.fixture
def tools(fake_tools: Any, library: Path) -> Any:
    fake_tools.write(link=f"cp {library} kernel.so; exit 0")
    return fake_tools


def test_a_kernel_compiled_elsewhere(tools: Any) -> None:
    compiler = Worker()
    try:
        first = compiler.build(SPEC)
        assert first.error == "" and first.compiled and first.spec == SPEC
        assert (first.registers, first.spills, first.smem) == (168, 12, 4096) and first.size > 0 < first.seconds
        assert pipeline.find(SPEC) is not None
        again = compiler.build(SPEC)
        assert again.error == "" and not again.compiled
        # A failure is an answer, and the next kernel is compiled by the same process.
        tools.write(device="echo 'kernel.cu(1): error: no' >&2; exit 1")
        other = QuantSpec(SM80, DType.FP16, DType.INT8)
        failed = compiler.build(other)
        assert "error: no" in failed.error and f"failed/{other.name}" in failed.error
        assert len(tools.calls) == 1 + 1
        # Nothing that it uses is evicted while it is there.
        root = Path(os.environ["CUTLASS_W8A8_CACHE_DIR"])
        assert any(path.name.startswith(f"{compiler._process.pid}-") for path in (root / "v1" / "users").iterdir())
    finally:
        compiler.close()
    assert compiler._process is None
    assert not list((root / "v1" / "users").iterdir())


def test_what_others_wait_for_gets_into_the_cache_or_is_an_error(
    tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary cache would end with the process that compiles."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", str(tmp_path / "file"))
    compiler = Worker()
    error = compiler.build(SPEC).error
    compiler.close()
    assert str(tmp_path / "file") in error and "set CUTLASS_W8A8_CACHE_DIR to a writable directory" in error


def test_a_worker_that_is_killed_is_an_answer_and_replaced(tools: Any, library: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    tools.write(device=f"echo $PPID > {started}; sleep 60")
    compiler = Worker()

    def kill() -> None:
        wait_for(started.exists)
        assert compiler._process is not None
        compiler._process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = compiler.build(SPEC)
    killer.join()
    assert "ended with status -9" in outcome.error and "memory may be short" in outcome.error
    tools.write(link=f"cp {library} kernel.so; exit 0")
    assert compiler.build(SPEC).compiled
    compiler.close()


def test_a_python_that_cannot_be_started_is_an_answer(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "/no/such/python" in Worker().build(SPEC).error
    # An interpreter that is part of another program has no name: it compiles itself.
    monkeypatch.setattr(sys, "executable", "")
    compiler = Worker()
    assert compiler.build(SPEC).compiled and compiler._process is None


def test_formulas_from_outside_are_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process would not know them."""
    monkeypatch.setitem(epilogues.FORMULAS, "own", lambda x: x.scale_a * x.acc)
    own = KernelSpec(SM90, DType.E4M3, DType.BF16, epilogues.EpilogueSpec.parse("own_token_channel"), SPECS[0].config)
    monkeypatch.setattr(worker, "build", lambda spec: worker.Outcome(spec, seconds=7))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("another process"))
    assert Worker().build(own).seconds == 7
    with pytest.raises(pytest.fail.Exception):
        Worker().build(SPECS[0])


EXIT = """
import sys
sys.path.insert(0, {root!r})
from cutlass_w8a8 import background
from cutlass_w8a8.arch import SM90
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.spec import QuantSpec
import pathlib, time
background.compile_behind(QuantSpec(SM90, DType.BF16, DType.INT8))
while not pathlib.Path({pids!r}).exists():
    time.sleep(0.01)
print(time.time(), flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["", "raise SystemExit(3)", "time.sleep(60)"])
def test_a_compilation_behind_does_not_hold_up_the_exit(fake_tools: Any, tmp_path: Path, then: str) -> None:
    """However the interpreter ends: at once, and the compiler with it."""
    pids = tmp_path / "pids"
    fake_tools.write(device=f"sleep 60 & echo $$ $! > {pids}.tmp; mv {pids}.tmp {pids}; wait")
    code = EXIT.format(root=str(ROOT), pids=str(pids), then=then)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    begin = float(process.stdout.readline())
    compilers = [int(pid) for pid in pids.read_text().split()]
    if "sleep" in then:
        process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=20) == {"": 0, "raise SystemExit(3)": 3}.get(then, -signal.SIGKILL)
    assert time.time() - begin < 5
    wait_for(lambda: not any(alive(pid) for pid in compilers))
    # It had the time to remove its folder.
    wait_for(lambda: not list((tmp_path / "cache" / "v1" / "work").iterdir()))


def test_a_forked_child_does_not_keep_a_compiler_alive(fake_tools: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    fake_tools.write(device=f"sleep 60 & echo $$ $! > {pids}.tmp; mv {pids}.tmp {pids}; wait")
    then = "import os\nif not os.fork(): time.sleep(30)\nos._exit(0)"
    code = EXIT.format(root=str(ROOT), pids=str(pids), then=then)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for(pids.exists)
    begin = time.monotonic()
    assert process.wait(timeout=20) == 0
    compilers = [int(pid) for pid in pids.read_text().split()]
    wait_for(lambda: not any(alive(pid) for pid in compilers))
    assert time.monotonic() - begin < 20


def test_many_at_a_time(tools: Any) -> None:
    specs = [QuantSpec(SM80, source, target) for source in OUTPUT_DTYPES for target in OPERAND_DTYPES]
    found = list(batch.outcomes(specs, 2))
    assert {outcome.spec for outcome in found} == set(specs) and len(found) == len(specs)
    assert all(outcome.compiled and not outcome.error for outcome in found)


def test_abandoning_ends_what_runs(fake_tools: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    fake_tools.write(device=f"sleep 60 & echo $$ $! > {pids}.tmp; mv {pids}.tmp {pids}; wait")
    running = batch.outcomes([SPEC, QuantSpec(SM80, DType.BF16, DType.INT8)], 1)

    class Stop(Exception):  # noqa: N818
        pass

    def interrupt(*_: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        alarm = threading.Thread(target=lambda: (wait_for(pids.exists), os.kill(os.getpid(), signal.SIGALRM)))
        alarm.start()
        with pytest.raises(Stop):
            next(running)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not any(alive(int(pid)) for pid in pids.read_text().split())
    assert len(fake_tools.calls) == 1
