"""Compiling in processes of their own: the caller's interpreter stays free, and neither waits for nor outlives them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cutlass_w8a8 import pipeline
from cutlass_w8a8.cache import users
from cutlass_w8a8.errors import W8A8Error
from cutlass_w8a8.evt import epilogues
from cutlass_w8a8.forks import guard
from cutlass_w8a8.runtime.abi import Library
from cutlass_w8a8.spec import KernelSpec, Spec, spec_from_json

# nvcc takes 3.5 GB for a Hopper kernel.
GB_PER_JOB = 4
# What a container is limited to: bytes, in two generations of cgroups; microseconds of cores in so many microseconds.
_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
# The search path as it is here, since what started this process may have changed it; then requests, one a line.
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from cutlass_w8a8.worker import serve; serve()"
# How long an interrupted compilation may take to clean up.
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel: its numbers, or the error."""

    spec: Spec
    compiled: bool = False
    seconds: float = 0.0
    registers: int = 0
    spills: int = 0
    smem: int = 0
    size: int = 0
    error: str = ""


def default_jobs() -> int:
    """As many compilations as cores and memory allow: the machine's, and those of the container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    for path in _MEMORY_LIMITS:
        # "max" where there is none, or in the older form a number beyond any memory.
        if (limit := _words(path)) and limit[0].isdecimal():
            memory = min(memory, int(limit[0]))
    if (quota := _words(_CPU_LIMIT)) and quota[0].isdecimal():
        cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    return max(1, min(cores, memory // (GB_PER_JOB * 10**9)))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def build(spec: Spec) -> Outcome:
    """Compile one kernel into the cache, in this process, unless it is there."""
    try:
        entry = pipeline.build(spec, explicit=True)
        info = Library(str(entry.library)).info
    except (W8A8Error, OSError, ValueError) as error:
        return Outcome(spec, error=str(error) or type(error).__name__)
    resources = entry.manifest["resources"]
    return Outcome(
        spec,
        compiled=entry.compiled,
        seconds=entry.manifest["seconds"],
        registers=resources["registers"],
        spills=resources["spill_stores"] + resources["spill_loads"],
        smem=info.smem_bytes,
        size=entry.library.stat().st_size,
    )


class Worker:
    """A process that compiles one kernel after the other, and ends with `close`, or with this one, however that ends.

    Args:
        nice: how much less urgent its work is than this process's.
    """

    def __init__(self, nice: int = 0) -> None:
        self._nice = nice
        self._process: subprocess.Popen[bytes] | None = None
        _workers.add(self)

    def build(self, spec: Spec) -> Outcome:
        """As `build`, but in the other process; whatever goes wrong there is the outcome's error."""
        if not sys.executable or not _known_elsewhere(spec):
            return build(spec)
        try:
            process = self._started()
            requests, answers = _pipes(process)
            requests.write(spec.to_json().encode() + b"\n")
            answer = answers.readline()
        except OSError as error:
            self.close()
            return Outcome(spec, error=f"the process that was to compile it cannot be run: {error}")
        if not answer.endswith(b"\n"):
            status = process.wait()
            self.close()
            return Outcome(
                spec,
                error=f"the process that compiled it ended with status {status}; if it was killed, memory may be "
                f"short: a compilation takes {GB_PER_JOB} GB",
            )
        return Outcome(spec, **json.loads(answer))

    def close(self) -> None:
        """End the process, and with it what it is compiling."""
        process, self._process = self._process, None
        if process is None:
            return
        requests, answers = _pipes(process)
        with contextlib.suppress(OSError):
            requests.close()
        try:
            process.wait(2 * _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # Only now: another thread may be reading.
        answers.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            path = json.dumps([str(Path(entry).absolute()) for entry in sys.path])
            # A child forked meanwhile would keep pipes that nobody knows of yet.
            with guard:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, path, str(self._nice)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    # Unbuffered: what is written must not wait, and nothing must be flushed twice after a fork.
                    bufsize=0,
                    # An interrupt at the terminal is for this process, which ends that one.
                    start_new_session=True,
                )
        return self._process

    def _abandon(self) -> None:
        """Forget a process that is another's child; its pipes must not be held open here."""
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # unknown here, and nobody's business
            for pipe in _pipes(process):
                with contextlib.suppress(OSError):
                    pipe.close()


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _abandon_all() -> None:
    for worker in list(_workers):
        worker._abandon()


os.register_at_fork(after_in_child=_abandon_all)


def _known_elsewhere(spec: Spec) -> bool:
    """Whether another process knows the formula: not if it was registered from outside of this package."""
    if not isinstance(spec, KernelSpec):
        return True
    return epilogues.FORMULAS[spec.epilogue.formula].__module__ == epilogues.__name__


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    if process.stdin is None or process.stdout is None:
        raise OSError("it has no pipes")
    return process.stdin, process.stdout


def serve() -> None:
    """The other process: compile what standard input names, a kernel a line, until it is closed."""
    os.nice(int(sys.argv[2]))
    # Who started us may ignore interrupts, which would be inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What anything prints must not get among the answers.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    try:
        while True:
            spec = spec_from_json(requests.get().decode())
            try:
                outcome = build(spec)
            except Exception as error:  # a defect, which the other side is to report
                outcome = Outcome(spec, error=f"{type(error).__name__}: {error}")
            numbers = {name: value for name, value in vars(outcome).items() if name != "spec"}
            answers.write(json.dumps(numbers).encode() + b"\n")
    except (KeyboardInterrupt, BrokenPipeError):
        # The compilers are stopped and their folder is removed by now.
        users.leave()
        os._exit(130)


def _read(requests: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    # Nobody waits for an answer any more. A real signal, which wakes a thread that waits.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    time.sleep(_GRACE_SECONDS)
    os._exit(130)
