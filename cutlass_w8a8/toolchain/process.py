"""Running compilers: several at once, in their own process groups, none left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutlass_w8a8.errors import ArgumentError, ToolchainError
from cutlass_w8a8.forks import close_private, guard, private_pipe

TIMEOUT_VARIABLE = "CUTLASS_W8A8_COMPILE_TIMEOUT"
# The largest kernels take a minute on an idle core: an hour is a compiler that hangs, or a machine that might as well.
DEFAULT_TIMEOUT = 3600.0
_POLL_SECONDS = 0.02
_PROBE_SECONDS = 60
# What cannot be killed is waiting for a disk or a network.
_KILL_SECONDS = 10
# Runs a command beside a watcher, which waits at a pipe whose other end our process alone holds, and kills the command
# and all it started when that end is closed: by the system, should our process be killed. The watcher is there first.
_WATCHED = 'exec 3<&0 </dev/null; { read _ <&3; kill -9 0; } & exec "$@" 3<&-'
_SHELL = 128
# These would add flags that no cache key knows of.
_DROPPED = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


@dataclass(frozen=True)
class Finished:
    """A command that ran to its end.

    Attributes:
        argv: the command.
        returncode: exit status; negative is the number of the signal that ended it.
        output: everything it printed.
        seconds: how long it ran.
        timed_out: whether it was stopped because it ran too long.
    """

    argv: tuple[str, ...]
    returncode: int
    output: str
    seconds: float
    timed_out: bool = False

    @property
    def killing_signal(self) -> int | None:
        """The signal that ended the command, or one of the processes it started; None if there was none."""
        if self.returncode < 0:
            return -self.returncode
        # A wrapper script's shell adds this to the number.
        if _SHELL < self.returncode < _SHELL + 32:
            return self.returncode - _SHELL
        # nvcc and g++ survive their own children and only print what happened to them.
        if match := re.search(r"died due to signal (\d+)", self.output):
            return int(match[1])
        if "Killed signal terminated program" in self.output:
            return int(signal.SIGKILL)
        return None


def compile_timeout() -> float:
    """Seconds that compiling one kernel may take: ``CUTLASS_W8A8_COMPILE_TIMEOUT``, else an hour.

    Raises:
        ArgumentError: the variable holds no positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "").strip()
    try:
        seconds = float(text) if text else DEFAULT_TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ArgumentError(f"{TIMEOUT_VARIABLE}={text} is no positive number of seconds; write one, such as 3600")
    return seconds


def compiler_environment(scratch: Path | None = None) -> dict[str, str]:
    """The environment compilers run in: ours, with temporary files in ``scratch`` and messages in English."""
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    environment["LC_ALL"] = "C"
    if scratch is not None:
        # Relative, as the compilers run there: nvcc pastes it into shell commands.
        environment["TMPDIR"] = "."
    return environment


def probe(argv: Sequence[str]) -> str:
    """What a quick command prints.

    Raises:
        ToolchainError: it cannot be run or fails; the message holds the command and its output.
    """
    try:
        with _start(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=compiler_environment()) as process:
            try:
                printed, _ = process.communicate(timeout=_PROBE_SECONDS)
            except BaseException:
                _kill(process)
                raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"{argv[0]} cannot be run: {error}; point to a working compiler") from error
    output = printed.decode(errors="replace")
    if process.returncode != 0:
        raise ToolchainError(f"`{' '.join(argv)}` failed with status {process.returncode}: {output.strip()[-2000:]}")
    return output


def run_together(
    commands: Mapping[str, Sequence[str]], workdir: Path, seconds: float = DEFAULT_TIMEOUT
) -> dict[str, Finished]:
    """Run named commands at once in ``workdir``.

    Returns when all have ended, one has failed, or ``seconds`` have passed. In the second case the others are killed,
    and are missing from the result; in the third those that still run are killed, and are in it. All are killed too if
    this process is, by whatever signal. Output is kept in ``workdir/<name>.log``.

    Raises:
        ToolchainError: a command could not be started.
    """
    environment = compiler_environment(workdir)
    running: dict[str, subprocess.Popen[bytes]] = {}
    finished: dict[str, Finished] = {}
    begin = time.monotonic()
    # A forked child that kept the held end would keep the watchers waiting.
    watched, held = private_pipe()
    try:
        for name, argv in commands.items():
            if shutil.which(argv[0]) is None:
                raise ToolchainError(f"{argv[0]} cannot be run; is it an executable file?")
            with (workdir / f"{name}.log").open("wb") as log:
                try:
                    running[name] = _start(
                        ["/bin/sh", "-c", _WATCHED, "sh", *argv],
                        cwd=workdir,
                        env=environment,
                        stdin=watched,
                        stdout=log,
                    )
                except OSError as error:
                    raise ToolchainError(f"{argv[0]} cannot be run: {error}; is it an executable file?") from error
        while running:
            for name, process in list(running.items()):
                returncode = process.poll()
                if returncode is None:
                    continue
                del running[name]
                output = _read_log(workdir, name)
                finished[name] = Finished(tuple(commands[name]), returncode, output, time.monotonic() - begin)
                if returncode != 0:
                    return finished
            if running and time.monotonic() - begin > seconds:
                for name, process in list(running.items()):
                    del running[name]
                    _kill(process)
                    output = _read_log(workdir, name)
                    ran = time.monotonic() - begin
                    finished[name] = Finished(tuple(commands[name]), -signal.SIGKILL, output, ran, timed_out=True)
                return finished
            time.sleep(_POLL_SECONDS)
        return finished
    finally:
        for process in running.values():
            _kill(process)
        close_private(watched)
        # Ends the watchers of the commands that have ended.
        close_private(held)


def _start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a command, in a session of its own, so that it is killed together with what it started."""
    # A child forked meanwhile would keep the pipe on which Popen waits for news of its own child, and keep it waiting.
    with guard:
        return subprocess.Popen(argv, stderr=subprocess.STDOUT, start_new_session=True, **options)


def _read_log(workdir: Path, name: str) -> str:
    return (workdir / f"{name}.log").read_text(errors="replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_SECONDS)
