"""Telling a waiting person that a kernel is being compiled."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_VARIABLE = "CUTLASS_W8A8_QUIET"


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Show ``compiling <name> … 12 s`` on standard error while the body runs.

    Shows nothing unless standard error is a terminal, or if ``CUTLASS_W8A8_QUIET`` is set.
    """
    if os.environ.get(QUIET_VARIABLE) or not sys.stderr.isatty():
        yield
        return
    # Imported here: inference servers, where nothing is ever shown, need not pay for it.
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("compiling {task.description} …", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(name, total=None)
        yield
