"""Many processes that want one kernel, some of them killed: what tests and scripts/stress_cache.py have in common."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from unittest import mock

from cutlass_w8a8 import pipeline
from cutlass_w8a8.arch import SM90
from cutlass_w8a8.config import KernelConfig, Schedule
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.spec import KernelSpec
from tests.fake_tools import FakeTools

# What the fake compilers make.
LIBRARY = b"library\n"
# Whoever has not ended by then hangs.
WATCHDOG_SECONDS = 120.0


@dataclass(frozen=True)
class Outcome:
    """What one process met.

    Attributes:
        errors: of each thread that had one.
        intact: whether every thread got the right library.
        compiled: how many of its threads ran the compiler.
    """

    errors: tuple[str, ...]
    intact: bool
    compiled: int


@dataclass(frozen=True)
class Worker:
    """A process, and where its outcome comes from."""

    process: BaseProcess
    results: Connection

    def outcome(self) -> Outcome | None:
        """Wait for the process to end; None if it left no outcome.

        Raises:
            TimeoutError: it does not end.
        """
        self.process.join(WATCHDOG_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"process {self.process.pid} hangs")
        try:
            return self.results.recv() if self.results.poll() else None
        except EOFError:
            return None


def spec(number: int) -> KernelSpec:
    """One kernel of many, all alike to the fake compiler."""
    config = KernelConfig((64, 16 + 16 * (number % 15), 64), Schedule.PINGPONG, stages=2 + number // 15)
    return KernelSpec(SM90, DType.INT8, DType.BF16, EpilogueSpec.of(), config)


def files(number: int) -> dict[str, str]:
    """Its source, without what emitting costs."""
    return {"kernel.cu": f"// {number}\n", "stubs/cutlass/arch/wmma.h": ""}


def build_in_threads(number: int, threads: int, results: Connection) -> None:
    """Build one kernel in several threads at once."""
    errors: list[str] = []
    libraries: list[bytes] = []
    compiled: list[bool] = []

    def work() -> None:
        try:
            entry = pipeline.build(spec(number))
            libraries.append(entry.library.read_bytes())
            compiled.append(entry.compiled)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    with mock.patch.object(pipeline.emit, "render", return_value=files(number)):
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    results.send(Outcome(tuple(errors), libraries == [LIBRARY] * threads, sum(compiled)))


def start(number: int, processes: int, threads: int, method: str = "fork") -> list[Worker]:
    """Start processes that all want kernel ``number``. Each has a pipe of its own: a killed one cannot block others."""
    context = multiprocessing.get_context(method)
    workers = []
    for _ in range(processes):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(  # type: ignore[attr-defined]
            target=build_in_threads, args=(number, threads, writer), daemon=True
        )
        process.start()
        writer.close()
        workers.append(Worker(process, reader))
    return workers


@dataclass(frozen=True)
class Round:
    """What came of a round.

    Attributes:
        compiles: how often the compiler ran.
        seconds: how long all of it took.
        killed: whether the victim was still running when it was to be killed.
        faults: what must not be.
    """

    compiles: int
    seconds: float
    killed: bool
    faults: tuple[str, ...]


def play_round(tools: FakeTools, number: int, chance: random.Random, processes: int = 4, threads: int = 2) -> Round:
    """Start processes, kill one at a random moment, and see what the others get."""
    begin = time.monotonic()
    before = len(tools.calls)
    workers = start(number, processes, threads)
    time.sleep(chance.uniform(0, 0.3))
    victim = chance.choice(workers)
    pid = victim.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    faults = []
    for worker in workers:
        try:
            outcome = worker.outcome()
        except TimeoutError as error:
            faults.append(str(error))
            continue
        if worker is not victim and outcome is None:
            faults.append(f"a process ended with status {worker.process.exitcode} and no outcome")
        if outcome is not None and (outcome.errors or not outcome.intact):
            faults.append(f"a process got {outcome}")
    compiles = len(tools.calls) - before
    if compiles > 2:
        faults.append(f"{compiles} compilations")
    with mock.patch.object(pipeline.emit, "render", return_value=files(number)):
        entry = pipeline.find(spec(number))
    if entry is None or entry.library.read_bytes() != LIBRARY:
        faults.append("the kernel is not in the cache")
    killed = victim.process.exitcode == -signal.SIGKILL
    return Round(compiles, time.monotonic() - begin, killed, tuple(faults))
