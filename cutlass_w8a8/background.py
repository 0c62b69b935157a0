"""Kernels that are compiled behind calls which others serve meanwhile: a bounded number at a time, each once."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Hashable
from typing import Any

from cutlass_w8a8.memo import Memo
from cutlass_w8a8.spec import Spec
from cutlass_w8a8.worker import Outcome, Worker, default_jobs

# Calls come first.
_NICE = 10
_log = logging.getLogger("cutlass_w8a8")


class Compilation:
    """A kernel that is being compiled, and what is remembered only until it is there."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._lock = threading.Lock()
        self._ended = False
        self._kept: dict[tuple[int, Hashable], Memo[Any, Any]] = {}

    def keep(self, memo: Memo[Any, Any], key: Hashable, value: object) -> None:
        """Have ``memo`` remember ``value`` for ``key`` until the kernel is there; not at all if it is by now."""
        with self._lock:
            if not self._ended:
                memo.keep(key, value)
                self._kept[id(memo), key] = memo

    def end(self, *, succeeded: bool) -> None:
        """The compiler has ended: if it ``succeeded``, what serves instead is looked up in vain from now on."""
        with self._lock:
            self._ended = succeeded
            if succeeded:
                for (_, key), memo in self._kept.items():
                    memo.supersede(key)
            self._kept.clear()


class _Queue:
    """What is to be compiled and what is being compiled. A thread for each compilation at a time, none when idle."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: dict[Spec, Compilation] = {}
        self.failed: set[Spec] = set()
        self._waiting: deque[Compilation] = deque()
        self._threads = 0

    def add(self, spec: Spec) -> Compilation | None:
        with self.lock:
            if spec in self.failed:
                return None
            found = self.running.get(spec)
            if found is None:
                found = self.running[spec] = Compilation(spec)
                self._waiting.append(found)
                if self._threads < default_jobs():
                    self._threads += 1
                    # A daemon: the interpreter does not wait for it, and its worker ends with the interpreter.
                    threading.Thread(target=self._work, name="cutlass_w8a8 compiler", daemon=True).start()
            return found

    def _work(self) -> None:
        worker = Worker(_NICE)
        while True:
            with self.lock:
                if not self._waiting:
                    self._threads -= 1
                    break
                compilation = self._waiting.popleft()
            _log.info("compiling kernel %s in the background", compilation.spec.name)
            try:
                outcome = worker.build(compilation.spec)
            except Exception as error:  # a defect, which must not end the thread that others wait for
                outcome = Outcome(compilation.spec, error=f"{type(error).__name__}: {error}")
            self._end(compilation, outcome)
        worker.close()

    def _end(self, compilation: Compilation, outcome: Outcome) -> None:
        with self.lock:
            del self.running[compilation.spec]
            if outcome.error:
                self.failed.add(compilation.spec)
        compilation.end(succeeded=not outcome.error)
        if outcome.error:
            _log.warning(
                "kernel %s cannot be compiled in the background; the kernels that serve in its place stay, and this "
                "process does not try again: %s",
                outcome.spec.name,
                outcome.error,
            )


_queue = _Queue()


def compile_behind(spec: Spec) -> Compilation | None:
    """Have ``spec`` compiled into the cache while others serve; returns at once.

    Returns:
        The compilation, which may have been under way already; None if it has failed before in this process.
    """
    return _queue.add(spec)


def _forked() -> None:
    """In a child process: threads and compilers are the parent's, so nothing is under way here.

    What is remembered until they end would be remembered for ever.
    """
    global _queue
    abandoned, _queue = _queue, _Queue()
    _queue.failed = abandoned.failed
    for compilation in abandoned.running.values():
        compilation._lock = threading.Lock()
        compilation.end(succeeded=True)


os.register_at_fork(after_in_child=_forked)
