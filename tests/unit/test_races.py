"""Many processes and one cold kernel: one compilation, also when some of them are killed; nothing is left running."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cutlass_w8a8 import pipeline
from cutlass_w8a8.cache.key import digest
from cutlass_w8a8.cache.store import Store
from cutlass_w8a8.errors import CompileError
from scripts import stress_cache
from tests.stress import Outcome, files, spec, start

ROOT = Path(__file__).parents[2]
ROUNDS = int(os.environ.get("W8A8_TEST_ROUNDS", "8"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_sixteen_processes_of_four_threads_compile_once(fake_tools: Any, method: str) -> None:
    fake_tools.write(device="sleep 0.3")
    outcomes = [worker.outcome() for worker in start(0, 16, 4, method)]
    assert all(outcome is not None and outcome.errors == () and outcome.intact for outcome in outcomes), outcomes
    assert len(fake_tools.calls) == 1
    assert sum(outcome.compiled for outcome in outcomes if outcome is not None) == 1


def test_a_failed_compilation_fails_for_all_who_waited_and_for_nobody_else(fake_tools: Any) -> None:
    fake_tools.write(device="sleep 0.7; echo 'error: no'; exit 1")
    workers = start(0, 6, 2)
    outcomes = [worker.outcome() for worker in workers]
    assert all(outcome is not None and len(outcome.errors) == 2 for outcome in outcomes)
    errors = [error for outcome in outcomes if outcome is not None for error in outcome.errors]
    assert all(error.startswith("CompileError") and "error: no" in error and "failed/" in error for error in errors)
    # A process that starts late may not have waited for the first one.
    assert len(fake_tools.calls) <= 2
    calls = len(fake_tools.calls)
    with mock.patch.object(pipeline.emit, "render", return_value=files(0)):
        with pytest.raises(CompileError, match="failed with status 1"):
            pipeline.build(spec(0))
        assert len(fake_tools.calls) == calls + 1
        fake_tools.write()
        assert pipeline.build(spec(0)).compiled


def test_killed_processes_neither_block_nor_mislead_the_others(fake_tools: Any, tmp_path: Path, capsys: Any) -> None:
    """One of four is killed at a random moment: the others end, and at most one more compilation was needed."""
    fake_tools.write(device="sleep 0.05", host="sleep 0.02")
    assert stress_cache.run(fake_tools, Store(tmp_path / "cache"), ROUNDS, random.Random(0)) == 0, capsys.readouterr()


# Forks ----------------------------------------------------------------------------------------------------------------


def in_child(work: Any) -> int:
    """Fork; the child runs ``work`` and ends with what that returns. Returns its process id."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return pid


def status_of(pid: int, seconds: float = 30) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


def held_by_a_thread(store: Store, name: str) -> threading.Event:
    """Have a thread hold a lock until the event that is returned is set."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with store.lock(name):
            held.set()
            done.wait(30)

    threading.Thread(target=hold, daemon=True).start()
    assert held.wait(10)
    return done


def test_a_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    store, name = Store(tmp_path), digest({})
    done = held_by_a_thread(store, name)

    def child() -> int:
        try:
            with store.lock(name, 0.2):
                return 1
        except TimeoutError:
            pass
        # The parent gives it back, and this child has kept nothing of it.
        with store.lock(name, 20):
            return 0

    pid = in_child(child)
    time.sleep(0.5)
    done.set()
    assert status_of(pid) == 0


def test_a_child_that_lives_on_does_not_keep_the_lock_of_a_killed_parent(tmp_path: Path) -> None:
    store, name = Store(tmp_path), digest({})
    ready = tmp_path / "ready"

    def parent() -> int:
        held_by_a_thread(store, name)
        pid = in_child(lambda: time.sleep(20) or 0)
        ready.with_suffix(".new").write_text(str(pid))
        ready.with_suffix(".new").rename(ready)
        time.sleep(20)
        return 1

    pid = in_child(parent)
    wait_for(ready.exists)
    try:
        with pytest.raises(TimeoutError), store.lock(name, 0.05):
            pass
        os.kill(pid, signal.SIGKILL)
        assert status_of(pid) == -signal.SIGKILL
        with store.lock(name, 5):
            assert alive(int(ready.read_text()))
    finally:
        os.kill(int(ready.read_text()), signal.SIGKILL)


def test_a_child_that_lives_on_does_not_keep_compilers_waiting(fake_tools: Any, tmp_path: Path) -> None:
    """Forked while a compiler ran: nothing of that compiler remains once it has ended."""
    pids = tmp_path / "pids"
    fake_tools.write(device=f"echo $PPID $$ >> {pids}; sleep 0.6")
    with mock.patch.object(pipeline.emit, "render", return_value=files(0)):
        building = threading.Thread(target=pipeline.build, args=(spec(0),))
        building.start()
        wait_for(pids.exists)
        child = in_child(lambda: time.sleep(30) or 0)
        try:
            building.join(20)
            # Watchers are children of the shells that became the compilers, in sessions of these.
            session = int(pids.read_text().split()[1])
            wait_for(lambda: not any(session_of(path) == session for path in Path("/proc").glob("[0-9]*")))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def session_of(process: Path) -> int | None:
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[3])


def test_forks_while_threads_build_never_hang(fake_tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children build too, whatever the parent's threads held at the moment of the fork."""
    fake_tools.write(device="sleep 0.02")
    monkeypatch.setattr(pipeline.emit, "render", lambda spec: {"kernel.cu": f"// {spec.name}", "stubs/x.h": ""})
    building = [threading.Thread(target=pipeline.build, args=(spec(number),)) for number in range(6)]
    children = []
    for thread in building:
        thread.start()
        number = len(children)
        children.append(in_child(lambda number=number: 0 if pipeline.build(spec(number)).library.read_bytes() else 1))
    assert [status_of(pid) for pid in children] == [0] * 6
    for thread in building:
        thread.join(30)
    assert len(fake_tools.calls) == 6


# Compilers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_takes_its_compilers_along(fake_tools: Any, tmp_path: Path, number: int) -> None:
    pids = tmp_path / "pids"
    # As nvcc does, the fake one starts a child and waits for it.
    fake_tools.write(device=f"sleep 60 & echo $$ $! > {pids}.tmp; mv {pids}.tmp {pids}; wait")
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from unittest import mock
from cutlass_w8a8 import pipeline
from tests.stress import files, spec
with mock.patch.object(pipeline.emit, "render", lambda _: files(0)):
    pipeline.build(spec(0))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    wait_for(pids.exists)
    compilers = [int(pid) for pid in pids.read_text().split()]
    assert all(alive(pid) for pid in compilers)
    process.send_signal(number)
    assert process.wait(timeout=20) == -number
    wait_for(lambda: not any(alive(pid) for pid in compilers))
    # And the next one is not kept waiting by what is left.
    fake_tools.write()
    (worker,) = start(0, 1, 1)
    assert worker.outcome() == Outcome((), True, 1)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        # A zombie has ended; only its parent has not looked yet.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
