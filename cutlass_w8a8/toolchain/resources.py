"""What a compiled kernel uses, as ptxas reports it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel.

    Attributes:
        registers: per thread.
        stack: stack frame per thread, in bytes.
        spill_stores: registers spilled to local memory per thread, in bytes.
        spill_loads: and read back, in bytes.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def parse_resources(log: str, entry: str) -> Resources | None:
    """Resources of the kernel ``entry`` from the output of ``ptxas -v``; None if the log does not report it."""
    # The report of one entry ends where the next one begins; functions it calls are reported in between.
    begin = re.search(rf"Compiling entry function '{re.escape(entry)}' for ", log)
    if begin is None:
        return None
    report = log[begin.end() :].split("Compiling entry function", 1)[0]
    frame = re.search(
        rf"Function properties for {re.escape(entry)}\s*\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads",
        report,
    )
    registers = re.search(r"Used (\d+) registers", report)
    if frame is None or registers is None:
        return None
    return Resources(int(registers[1]), int(frame[1]), int(frame[2]), int(frame[3]))
