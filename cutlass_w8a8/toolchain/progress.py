"""Telling a waiting person that a kernel is being compiled."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_VARIABLE = "CUTLASS_W8A8_QUIET"


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Show ``0:00:12 compiling <name>``, on one line, on standard error while the body runs.

    Shows nothing unless standard error is a terminal, or if ``CUTLASS_W8A8_QUIET`` is set.
    """
    if os.environ.get(QUIET_VARIABLE) or not sys.stderr.isatty():
        yield
        return
    # Imported here: inference servers, where nothing is ever shown, need not pay for it.
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    # The name comes last and takes what room is left: it alone is cut where the terminal is narrow.
    name_column = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    text = TextColumn("compiling {task.description}", markup=False, table_column=name_column)
    columns = (SpinnerColumn(), TimeElapsedColumn(), text)
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as progress:
        progress.add_task(name, total=None)
        yield
