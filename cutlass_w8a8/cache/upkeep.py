"""Looking after a cache: finding what is broken, removing what is not needed, keeping it within its size.

Nothing but what the layout knows is ever removed. Objects go while their own lock is held, so that nobody is building
them, and the lock of removals, so that nobody begins to use them; what running processes use stays.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cutlass_w8a8.cache import lock, users
from cutlass_w8a8.cache.files import is_directory, make_directory, remove_file, remove_tree, rename, tree_bytes
from cutlass_w8a8.cache.location import LIMIT_VARIABLE
from cutlass_w8a8.cache.shelf import MANIFEST, SOURCE, BrokenError, Shelf, is_digest
from cutlass_w8a8.cache.store import Store
from cutlass_w8a8.errors import CacheError

# Evicting goes this far below the limit, so that not every kernel that comes makes one go.
_TARGET = 0.9
_FAILURES_KEPT_SECONDS = 7 * 24 * 3600
_HOUR_SECONDS = 3600
_WAIT_SECONDS = 5.0
# Less than `users.mark` waits; the next compilation goes on.
_EVICTION_SECONDS = 2.0
_BATCH = 64
_log = logging.getLogger("cutlass_w8a8")


@dataclass(frozen=True)
class Broken:
    """Something in a cache that is not what was published.

    Attributes:
        path: what.
        cause: what is wrong with it.
    """

    path: Path
    cause: str


@dataclass(frozen=True)
class Removed:
    """Something that was removed.

    Attributes:
        path: what.
        reason: why.
        bytes: what that freed.
    """

    path: Path
    reason: str
    bytes: int


@dataclass(frozen=True)
class Cleared:
    """What `clear` did.

    Attributes:
        removed: what was removed.
        kept: objects that running processes use or build, which stay.
    """

    removed: list[Removed]
    kept: list[Path]


def verify(shelf: Shelf) -> list[Broken]:
    """Read everything under a cache or pack, and tell what is broken; changes nothing."""
    found = []
    faults: dict[str, str | None] = {}
    for object_digest in shelf.object_digests():
        faults[object_digest] = _fault_of_object(shelf, object_digest)
    for path in shelf.entry_files():
        try:
            _, object_digest, _ = shelf.read_entry(path)
        except FileNotFoundError:
            continue
        except BrokenError as error:
            found.append(Broken(path, str(error)))
            continue
        if object_digest not in faults:
            # It may have come while this was looking.
            faults[object_digest] = _fault_of_object(shelf, object_digest)
        if faults[object_digest] is not None:
            found.append(Broken(path, f"its object {object_digest} is {faults[object_digest]}"))
    directory = shelf.layout.objects
    found += [Broken(directory / name, fault) for name, fault in faults.items() if fault not in (None, _MISSING)]
    return found


def total_bytes(store: Store) -> int:
    """Bytes in the files of all objects."""
    return sum(tree_bytes(store.layout.objects / object_digest) for object_digest in store.object_digests())


def evict(store: Store, limit: int | None, seconds: float = _WAIT_SECONDS) -> list[Removed]:
    """Remove the objects whose last use is the longest ago until the rest fits in ``limit`` bytes; None: any size fits.

    Removes none at all where another process is removing some for so many seconds, or where it cannot be known what is
    in use.
    """
    if limit is None or total_bytes(store) <= limit:
        return []
    try:
        with _removing(store, seconds) as in_use:
            return _evict(store, limit, in_use, _EVICTION_SECONDS)
    except (OSError, CacheError, lock.NoLocksError) as error:
        _log.info("nothing is evicted from the cache %s: %s", store.root, error)
        return []


def prune(store: Store, limit: int | None) -> list[Removed]:
    """Remove what is broken, what no entry needs, what killed processes left, old failures, and what exceeds ``limit``.

    Raises:
        CacheError: something else is removing right now, or it cannot be known what is in use.
    """
    try:
        if not store.root.is_dir():
            return []
        with _removing(store) as in_use:
            removed = [*_broken_entries(store), *_broken_objects(store), *_orphans(store, in_use)]
            removed += [Removed(path, "left behind by a killed process", 0) for path in store.sweep()]
            removed += _stale_files(store)
            removed += _old_failures(store)
            return removed if limit is None else removed + _evict(store, limit, in_use)
    except (OSError, lock.NoLocksError) as error:
        raise CacheError(
            f"the cache {store.root} cannot be pruned: {error}; fix its permissions, or delete it when nothing uses it"
        ) from error


def clear(store: Store) -> Cleared:
    """Remove everything that no running process uses.

    Raises:
        CacheError: as for `prune`.
    """
    try:
        if not store.root.is_dir():
            return Cleared([], [])
        with _removing(store) as in_use:
            removed = [*_broken_entries(store)]
            kept = []
            for object_digest in store.object_digests():
                path = store.layout.objects / object_digest
                gone = None if object_digest in in_use else _remove_object(store, object_digest, "cleared")
                if gone is None:
                    kept.append(path)
                else:
                    removed.append(gone)
            removed += [*_broken_objects(store)]
            removed += [Removed(path, "left behind by a killed process", 0) for path in store.sweep()]
            removed += _stale_files(store)
            removed += _old_failures(store, 0)
            return Cleared(removed, kept)
    except (OSError, lock.NoLocksError) as error:
        raise CacheError(
            f"the cache {store.root} cannot be cleared: {error}; fix its permissions, or delete it when nothing uses it"
        ) from error


_MISSING = "missing"


def _fault_of_object(shelf: Shelf, object_digest: str) -> str | None:
    try:
        shelf.read_object(object_digest)
    except FileNotFoundError:
        return _MISSING
    except BrokenError as error:
        return f"broken: {error}"
    return None


@contextmanager
def _removing(store: Store, seconds: float = _WAIT_SECONDS) -> Iterator[set[str]]:
    """Hold the right to remove objects; gives what is in use, to which nothing is added meanwhile."""
    make_directory(store.layout.locks)
    held = lock.acquire(store.layout.locks / users.REMOVAL, seconds=seconds)
    if held is None:
        raise CacheError(f"another process is removing kernels from {store.root}; try again when it has ended")
    try:
        yield users.in_use(store.layout)
    finally:
        lock.release(held)


def _evict(store: Store, limit: int, in_use: set[str], seconds: float = float("inf")) -> list[Removed]:
    now, begin = store.now(), time.monotonic()
    sizes, used = {}, {}
    for object_digest in store.object_digests():
        directory = store.layout.objects / object_digest
        sizes[object_digest] = tree_bytes(directory)
        try:
            date = (directory / MANIFEST).stat().st_mtime
        except OSError:
            date = 0.0
        # A date in the future tells nothing, and must not keep anything for ever.
        used[object_digest] = date if date < now + _HOUR_SECONDS else 0.0
    total = sum(sizes.values())
    removed: list[Removed] = []
    if total <= limit:
        return removed
    users_of = _entries_by_object(store)
    for object_digest in sorted(sizes, key=lambda name: (used[name], name)):
        if total <= limit * _TARGET or time.monotonic() - begin > seconds:
            break
        if object_digest in in_use:
            continue
        gone = _remove_object(store, object_digest, f"over the limit of {limit} bytes", users_of.get(object_digest, ()))
        if gone is not None:
            _log.info("evicted %s, %d bytes, to keep %s within %s", gone.path, gone.bytes, store.root, LIMIT_VARIABLE)
            total -= sizes[object_digest]
            removed.append(gone)
    return removed


def _entries_by_object(store: Store) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in store.entry_files():
        if (object_digest := store.object_of(path)) is not None:
            found.setdefault(object_digest, []).append(path)
    return found


def _remove_object(
    store: Store, object_digest: str, reason: str, entries: Iterable[Path] | None = None
) -> Removed | None:
    """Remove an object and the entries that name it, unless it is being built."""
    directory = store.layout.objects / object_digest
    with lock.attempt(store.lock_path(object_digest)) as free:
        if not free:
            return None
        size = tree_bytes(directory)
        for path in _entries_by_object(store).get(object_digest, ()) if entries is None else entries:
            remove_file(path)
        store.discard(object_digest)
    return Removed(directory, reason, size)


def _broken_entries(store: Store) -> Iterator[Removed]:
    for path in store.entry_files():
        try:
            store.read_entry(path)
        except FileNotFoundError:
            continue
        except BrokenError as error:
            size = tree_bytes(path)
            with store.staging() as stage:
                aside = stage / path.name
                rename(path, aside)
                # Looked at again out of the others' sight: meanwhile a good one may have taken its place.
                with contextlib.suppress(FileNotFoundError, BrokenError):
                    store.read_entry(aside)
                    rename(aside, path)
                    continue
            yield Removed(path, f"broken: {error}", size)


def _broken_objects(store: Store) -> Iterator[Removed]:
    """Objects that are broken, and entries whose object is."""
    users_of = _entries_by_object(store)
    for object_digest in sorted({*store.object_digests(), *users_of}):
        if _fault_of_object(store, object_digest) is None:
            continue
        with lock.attempt(store.lock_path(object_digest)) as free:
            # Looked at again with the lock held: it may have been built meanwhile.
            if not free or (fault := _fault_of_object(store, object_digest)) is None:
                continue
            for path in users_of.get(object_digest, ()):
                if store.object_of(path) == object_digest and remove_file(path):
                    yield Removed(path, f"its object is {fault}", 0)
            directory = store.layout.objects / object_digest
            if fault != _MISSING:
                size = tree_bytes(directory)
                store.discard(object_digest)
                yield Removed(directory, fault, size)


def _orphans(store: Store, in_use: set[str]) -> Iterator[Removed]:
    """Objects that no entry names."""
    needed = _entries_by_object(store)
    orphans = iter([name for name in store.object_digests() if name not in needed and name not in in_use])
    while batch := list(islice(orphans, _BATCH)):
        with ExitStack() as stack:
            free = [name for name in batch if stack.enter_context(lock.attempt(store.lock_path(name)))]
            # Read again now that nobody can publish an entry for one of them.
            needed = _entries_by_object(store)
            for object_digest in free:
                if object_digest not in needed:
                    directory = store.layout.objects / object_digest
                    size = tree_bytes(directory)
                    store.discard(object_digest)
                    yield Removed(directory, "no entry needs it", size)


def _stale_files(store: Store) -> Iterator[Removed]:
    """Lock files that nobody holds, and what processes that were killed at once left under ``users``."""
    paths: Sequence[Path] = [*_glob(store.layout.locks, "*.lock"), *_glob(store.layout.users, f"*{users.UNLOCKED}")]
    for path in paths:
        if path.suffix == ".lock" and not is_digest(path.stem):
            continue
        with contextlib.suppress(OSError), lock.attempt(path) as stale:
            if stale:
                yield Removed(path, "left behind by a killed process", 0)


def _old_failures(store: Store, seconds: float = _FAILURES_KEPT_SECONDS) -> Iterator[Removed]:
    now = store.now()
    for path in _glob(store.layout.failed, "*"):
        with contextlib.suppress(OSError):
            if not _is_failure(path):
                continue
            # Of a date in the future nothing is known but that it is wrong.
            if abs(now - path.lstat().st_mtime) >= seconds:
                size = tree_bytes(path)
                remove_tree(path)
                yield Removed(path, "an old failure", size)


def _is_failure(path: Path) -> bool:
    """Whether a directory looks like what a failed compilation leaves, or like the beginnings of that."""
    if not is_directory(path):
        return False
    return (path / SOURCE).is_file() or (path.name.startswith(".") and not any(path.iterdir()))


def _glob(directory: Path, pattern: str) -> list[Path]:
    try:
        return sorted(directory.glob(pattern))
    except OSError:
        return []
