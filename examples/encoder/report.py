"""How close quantised embeddings are to fp32, and the tables and JSON that say so."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from .kernels import Built, Served
from .model import DemoError


@dataclass(frozen=True)
class Result:
    """One variant's embeddings measured against fp32.

    Attributes:
        variant: its name.
        cosine_mean: mean over sentences of the cosine similarity to the fp32 embedding.
        cosine_min: the smallest of them.
        neighbours_kept: share of sentences whose nearest other sentence is the same as under fp32.
        seconds: time to embed all sentences; None if it was not run here.
    """

    variant: str
    cosine_mean: float
    cosine_min: float
    neighbours_kept: float
    seconds: float | None


def nearest(embeddings: Tensor) -> Tensor:
    """For each unit row of ``embeddings`` [S, H], the index of the most similar other row: int64 [S]."""
    similarity = embeddings @ embeddings.t()
    return similarity.fill_diagonal_(float("-inf")).argmax(dim=1)


def compare(variant: str, embeddings: Tensor, reference: Tensor, seconds: float | None) -> Result:
    """Measure unit rows ``embeddings`` against ``reference``, both fp32 [S, H] on one device."""
    # float64: in fp32 the rounding of the dot product itself would show in the sixth digit.
    cosine = (embeddings.double() * reference.double()).sum(dim=1)
    kept = (nearest(embeddings) == nearest(reference)).double().mean()
    return Result(variant, float(cosine.mean()), float(cosine.min()), float(kept), seconds)


def console() -> Console:
    """Where the report is printed; wide enough for kernel names if the output is a file or a pipe."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=140)


def print_results(out: Console, results: Sequence[Result], sentences: int) -> None:
    """Print the table of variants."""
    table = Table(title=f"Embeddings of {sentences} sentences, compared with fp32", title_justify="left")
    table.add_column("variant")
    for heading in ("mean cosine", "min cosine", "same nearest neighbour", "time"):
        table.add_column(heading, justify="right")
    for r in results:
        took = "-" if r.seconds is None else f"{r.seconds * 1e3:.1f} ms" if r.seconds < 1 else f"{r.seconds:.2f} s"
        table.add_row(r.variant, f"{r.cosine_mean:.5f}", f"{r.cosine_min:.5f}", f"{r.neighbours_kept:.1%}", took)
    out.print(table)


def print_served(out: Console, rows: Sequence[Served], title: str) -> None:
    """Print which kernel serves which layer. Kernels have numbers in the table and their names below it."""
    names = list(dict.fromkeys(row.kernel for row in rows))
    table = Table(title=title, title_justify="left")
    table.add_column("variant")
    table.add_column("layer")
    table.add_column("M x N x K", justify="right", no_wrap=True)
    table.add_column("kernel", justify="right")
    for row in rows:
        table.add_row(row.variant, row.layer, f"{row.m} x {row.n} x {row.k}", str(names.index(row.kernel) + 1))
    out.print(table)
    for number, name in enumerate(names, 1):
        out.print(f"{number:3} {name}", markup=False, soft_wrap=True)
    out.print()


def print_built(out: Console, built: Built) -> None:
    """Print one line about how a kernel came to be, and one about where its source lies."""
    how = f"compiled in {built.seconds:.1f} s" if built.compiled else "found in the cache"
    out.print(f"  {built.name}: {how}, {built.registers} registers, {built.spill_bytes} bytes spilled", soft_wrap=True)
    out.print(f"  source: {built.source}", soft_wrap=True)


def write_json(
    path: Path,
    *,
    device: str,
    sentences: int,
    results: Sequence[Result],
    served: Sequence[Served],
    built: Sequence[Built],
) -> None:
    """Write everything the tables show as JSON, replacing ``path`` in one step.

    Raises:
        DemoError: the folder cannot be written to.
    """
    report: dict[str, Any] = {
        "device": device,
        "sentences": sentences,
        "variants": [asdict(result) for result in results],
        "kernels": [
            {
                "variant": row.variant,
                "layer": row.layer,
                "m": row.m,
                "n": row.n,
                "k": row.k,
                "kernel": row.kernel,
                "config": row.config,
            }
            for row in served
        ],
        "built": [asdict(one) for one in built],
    }
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            whole = Path(folder) / path.name
            whole.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            whole.replace(path)
    except OSError as error:
        raise DemoError(f"cannot write {path}: {error}; choose another --json") from error
