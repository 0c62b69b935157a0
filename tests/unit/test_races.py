"""Many processes and one cold kernel: one compilation, also when some of them are killed; nothing is left running."""

from __future__ import annotations

import multiprocessing
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
from cutlass_w8a8.arch import SM90
from cutlass_w8a8.cache.store import Store
from cutlass_w8a8.config import KernelConfig, Schedule
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.spec import KernelSpec

ROOT = Path(__file__).parents[2]
ROUNDS = int(os.environ.get("W8A8_TEST_ROUNDS", "15"))


def spec(number: int) -> KernelSpec:
    """One kernel of many, all alike to the fake compiler."""
    config = KernelConfig((64, 16 + 16 * (number % 15), 64), Schedule.PINGPONG, stages=2 + number // 15)
    return KernelSpec(SM90, DType.INT8, DType.BF16, EpilogueSpec.of(), config)


def build_in_threads(number: int, threads: int, results: Any) -> None:
    """Build one kernel in several threads at once, with an emitter that takes no time."""
    files = {"kernel.cu": f"// {number}\n", "stubs/cutlass/arch/wmma.h": ""}
    errors: list[str] = []
    libraries: list[bytes] = []

    def work() -> None:
        try:
            libraries.append(pipeline.build(spec(number)).library.read_bytes())
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    with mock.patch.object(pipeline.emit, "render", return_value=files):
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    results.put((errors, libraries == [b"library\n"] * threads))


def start(number: int, processes: int, threads: int) -> tuple[list[Any], Any]:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [
        context.Process(target=build_in_threads, args=(number, threads, results), daemon=True) for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    return workers, results


def test_sixteen_processes_of_four_threads_compile_once(fake_tools: Any) -> None:
    fake_tools.write(device="sleep 0.3")
    workers, results = start(0, 16, 4)
    outcomes = [results.get(timeout=60) for _ in workers]
    assert [errors for errors, _ in outcomes] == [[]] * 16 and all(right for _, right in outcomes)
    assert len(fake_tools.calls) == 1


def test_killed_processes_neither_block_nor_mislead_the_others(fake_tools: Any, tmp_path: Path) -> None:
    """One of four is killed at a random moment: the others end, and at most one more compilation was needed."""
    fake_tools.write(device="sleep 0.05", host="sleep 0.02")
    chance = random.Random(0)
    calls = 0
    for number in range(ROUNDS):
        workers, results = start(number, 4, 2)
        time.sleep(chance.uniform(0, 0.25))
        victim = chance.choice(workers)
        os.kill(victim.pid, signal.SIGKILL)
        for worker in workers:
            worker.join(timeout=60)
            assert worker.exitcode == (-signal.SIGKILL if worker is victim else 0) or worker is victim
        outcomes = []
        while not results.empty():
            outcomes.append(results.get(timeout=5))
        assert len(outcomes) >= 3 and all(errors == [] and right for errors, right in outcomes)
        made, calls = len(fake_tools.calls) - calls, len(fake_tools.calls)
        assert made <= 2, f"round {number}: {made} compilations"
        entry = pipeline.find(spec(number))
        assert entry is not None and entry.library.read_bytes() == b"library\n"
    assert len(list(Store(tmp_path / "cache").entries())) == ROUNDS


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
from tests.unit.test_races import spec
with mock.patch.object(pipeline.emit, "render", lambda _: {{"kernel.cu": "", "stubs/cutlass/arch/wmma.h": ""}}):
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
    workers, results = start(0, 1, 1)
    assert results.get(timeout=20) == ([], True) and workers


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        # A zombie has ended; only its parent has not looked yet.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
