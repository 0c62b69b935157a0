"""``cutlass-w8a8 cache``: what the cache and the packs hold, whether it is intact, and keeping it small."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from cutlass_w8a8.cache import upkeep
from cutlass_w8a8.cache.chain import Chain
from cutlass_w8a8.cache.location import LIMIT_VARIABLE, cache_root, parse_size, size_limit
from cutlass_w8a8.cache.shelf import MANIFEST, Entry, Shelf
from cutlass_w8a8.cache.store import Store
from cutlass_w8a8.errors import ArgumentError

DESCRIPTION = """\
The cache holds the kernels that were compiled on this machine; packs hold kernels that were compiled elsewhere, and are
never changed. Only files that the layout of a cache knows are ever removed, and never a kernel that a running process
uses.
"""


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of ``cache``."""
    verbs = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = verbs.add_parser("ls", help="the kernels in the cache and in packs")
    listing.set_defaults(run=ls)
    check = verbs.add_parser("verify", help="read everything again and report what is broken; exit status 1 if any is")
    check.set_defaults(run=verify)
    tidy = verbs.add_parser(
        "prune", help="remove what is broken, left behind or not needed, and what exceeds the cache's size"
    )
    tidy.add_argument(
        "--limit",
        metavar="SIZE",
        help=f"such as 500MB, or none; the least recently used kernels go; default: {LIMIT_VARIABLE}, else 4GB",
    )
    tidy.set_defaults(run=prune)
    empty = verbs.add_parser("clear", help="remove all kernels that no running process uses; asks first")
    empty.add_argument("--yes", action="store_true", help="do not ask")
    empty.set_defaults(run=clear)
    for verb in (listing, check, tidy, empty):
        verb.add_argument("--json", action="store_true", help="print JSON instead of text")


def ls(options: argparse.Namespace) -> int:
    """Print the kernels in the cache, then those of each pack."""
    chain = Chain()
    shelves: list[Shelf] = [Store(cache_root()) if chain.own is None else chain.own, *chain.packs()]
    if options.json:
        rows = [_row(shelf, entry) for shelf in shelves for entry in _by_name(shelf)]
        print(json.dumps(rows, indent=1))
        return 0
    for shelf in shelves:
        _print_table(shelf)
    return 0


def verify(options: argparse.Namespace) -> int:
    """Report everything that is broken; the exit status is 1 if anything is."""
    chain = Chain()
    rows = []
    count = 0
    for shelf in ([] if chain.own is None else [chain.own]) + chain.packs():
        count += len(shelf.entry_files()) + len(shelf.object_digests())
        remedy = (
            "cutlass-w8a8 cache prune removes it, and it is compiled again when it is needed"
            if isinstance(shelf, Store)
            else "install or copy the pack again"
        )
        rows += [{"path": str(broken.path), "cause": broken.cause, "remedy": remedy} for broken in upkeep.verify(shelf)]
    if options.json:
        print(json.dumps({"checked": count, "broken": rows}, indent=1))
    else:
        for row in rows:
            print(f"{row['path']}: {row['cause']}; {row['remedy']}")
        where = ", ".join(map(str, chain.places()))
        print(f"{count} entries and objects in {where}: " + (f"{len(rows)} are broken" if rows else "all intact"))
    return 1 if rows else 0


def prune(options: argparse.Namespace) -> int:
    """Remove what is not needed, and say what."""
    limit = parse_size("--limit", options.limit) if options.limit is not None else size_limit()
    store = Store(cache_root())
    _report(options, store, upkeep.prune(store, limit), [])
    return 0


def clear(options: argparse.Namespace) -> int:
    """Remove everything that no process uses, after asking."""
    store = Store(cache_root())
    if not options.yes:
        question = (
            f"remove {len(store.object_digests())} kernels, {kilobytes(upkeep.total_bytes(store))}, in {store.root}?"
        )
        if not sys.stdin.isatty():
            raise ArgumentError(f"{question} Nobody can answer here; pass --yes to do it")
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing was removed", file=sys.stderr)
            return 1
    cleared = upkeep.clear(store)
    _report(options, store, cleared.removed, [str(path) for path in cleared.kept])
    return 0


def compiler(entry: Entry) -> str:
    """What a kernel was compiled with, in words."""
    nvcc, headers = (entry.manifest.get(name, {}).get("version", "unknown") for name in ("nvcc", "headers"))
    return f"nvcc {nvcc}, CUTLASS {headers}"


def kilobytes(size: int) -> str:
    """A size in words."""
    return f"{size / 1000:.0f} KB"


def _report(options: argparse.Namespace, store: Store, removed: Sequence[upkeep.Removed], kept: list[str]) -> None:
    freed = sum(item.bytes for item in removed)
    if options.json:
        rows = [{"path": str(item.path), "reason": item.reason, "bytes": item.bytes} for item in removed]
        print(json.dumps({"removed": rows, "bytes": freed, "kept": kept}, indent=1))
        return
    for item in removed:
        print(f"removed {item.path}: {item.reason}")
    print(f"{len(removed)} removed, {kilobytes(freed)} freed, in {store.root}")
    if kept:
        print(f"{len(kept)} kernels are used by running processes and stay; clear again when these have ended")


def _by_name(shelf: Shelf) -> list[Entry]:
    return sorted(shelf.entries(), key=lambda entry: (str(entry.manifest.get("name")), entry.key))


def _row(shelf: Shelf, entry: Entry) -> dict[str, Any]:
    return {
        "kernel": entry.manifest.get("name"),
        "key": entry.key,
        "object": entry.directory.name,
        "place": str(shelf.root),
        "pack": not isinstance(shelf, Store),
        "compiler": compiler(entry),
        "bytes": entry.size,
        "created": entry.manifest.get("created"),
        "used": datetime.fromtimestamp((entry.directory / MANIFEST).stat().st_mtime).date().isoformat(),
    }


def _print_table(shelf: Shelf) -> None:
    from rich.console import Console
    from rich.table import Table

    entries = _by_name(shelf)
    table = Table(box=None, pad_edge=False)
    table.add_column("kernel", overflow="fold")
    table.add_column("compiled with", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("date", no_wrap=True)
    for entry in entries:
        date = str(entry.manifest.get("created")).replace("T", " ")[:16]
        table.add_row(str(entry.manifest.get("name")), compiler(entry), kilobytes(entry.size), date)
    # A pipe has no width: lines as long as they need to be rather than folded names.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 250)
    if entries:
        console.print(table)
    # Several keys may share an object; count its bytes once.
    total = sum({entry.directory: entry.size for entry in entries}.values())
    what = "" if isinstance(shelf, Store) else "pack "
    console.print(f"{len(entries)} kernels, {kilobytes(total)}, in {what}{shelf.root}", soft_wrap=True)
