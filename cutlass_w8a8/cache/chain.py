"""All places where kernels may be, as one: packs, the cache, and a temporary cache should that one not be writable."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cutlass_w8a8 import forks
from cutlass_w8a8.cache import temporary
from cutlass_w8a8.cache.files import read_regular, remove_file, write_synced
from cutlass_w8a8.cache.location import cache_root, installed_packs, named_packs, warn_once
from cutlass_w8a8.cache.lock import NoLocksError
from cutlass_w8a8.cache.shelf import Entry, Shelf
from cutlass_w8a8.cache.store import Store
from cutlass_w8a8.errors import CompileError, UnwritableError

Result = TypeVar("Result")
# How compilers tell of a disk that let them down. They run with messages in English.
_DISK_FAULT = re.compile(
    "No space left on device|Disk quota exceeded|Input/output error|Read-only file system|Stale file handle"
)
_PROBE_BYTES = 1 << 20
_log = logging.getLogger("cutlass_w8a8")
_fell_back = False


@dataclass(frozen=True)
class Found:
    """An entry, and whether it was in a pack."""

    entry: Entry
    pack: bool


class Chain:
    """The kernels within reach of this process, as its environment says now.

    Args:
        fall_back: whether kernels that the cache cannot take are kept until the process ends; else they are an error.

    Attributes:
        own: the cache; None if this user has no home and none is named.
        temporary: kernels that `publish` could only keep until this process ends.
    """

    def __init__(self, *, fall_back: bool = True) -> None:
        self._may_fall_back = fall_back
        self._packs = [Shelf(path) for path in named_packs()]
        self.own: Store | None = None
        self.temporary = 0
        self._refusal = ""
        try:
            self.own = Store(cache_root())
        except UnwritableError as error:
            self._refusal = str(error)

    def lookup(self, key: str, *, use: bool = False) -> Found | None:
        """The kernel for ``key``: from the packs that are named, the cache, or the packs that are installed.

        What `publish` was told to force goes first.
        """
        for shelf in self._shelves(key):
            if (entry := shelf.lookup(key, use=use)) is not None:
                return Found(entry, pack=not isinstance(shelf, Store))
        return None

    def failed(self, name: str) -> Path | None:
        """Where the last failed compilation of a kernel has left source and log, if there is a place for that."""
        return None if self.own is None else self.own.failed(name)

    def places(self) -> list[Path]:
        """The directories that `lookup` searches."""
        return [shelf.root for shelf in self._shelves()]

    def packs(self) -> list[Shelf]:
        """All packs, the named ones first."""
        return self._packs + [Shelf(path) for path in installed_packs()]

    @contextmanager
    def lock(self, object_digest: str, seconds: float) -> Iterator[None]:
        """Hold the right to build an object: in the cache, or within this process where that cannot be locked.

        Args:
            object_digest: the object.
            seconds: how long to wait for another process; then go ahead without the lock, with a warning.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(self._cache().lock(object_digest, seconds))
            except UnwritableError as error:
                store = self._fall_back(error)
                with suppress(NoLocksError):
                    stack.enter_context(store.lock(object_digest))
                # What is not locked is not to be written either: others would take it for abandoned.
                self._refusal = str(error)
            except (NoLocksError, TimeoutError) as error:
                warn_once(
                    f"going ahead without the lock: {error}; other processes may compile the same kernels, which are "
                    "published whole all the same"
                )
                with suppress(UnwritableError, NoLocksError):
                    # Threads of this process at least.
                    stack.enter_context(temporary.create().lock(object_digest))
            yield

    def with_workdir(self, object_digest: str, build: Callable[[Path, Path], Result], failed: str) -> Result:
        """What ``build`` makes of an empty directory, and of one where to keep what fails.

        In the cache; again in the temporary folder if it fails in the cache because of the disk.

        Raises:
            UnwritableError: neither can be written.
            Exception: whatever ``build`` raises.
        """
        try:
            cache = self._cache()
            with cache.workdir(object_digest) as directory:
                try:
                    return build(directory, cache.failed(failed))
                except CompileError as error:
                    if (cause := _disk_fault(error, directory)) is None:
                        raise
                    raise UnwritableError(f"{directory} cannot be written ({cause}): {error}") from error
        except UnwritableError as error:
            store = self._fall_back(error)
            with store.workdir(object_digest) as directory:
                return build(directory, store.failed(failed))

    def adopt(self, key: str, fields: Mapping[str, str], object_digest: str) -> Entry | None:
        """Have an object that is within reach serve ``key``; None if it is nowhere."""
        if self.own is not None:
            self.own.about_to_use(object_digest)
        for shelf in self._shelves():
            manifest = shelf.find_object(object_digest)
            if manifest is None:
                continue
            if isinstance(shelf, Store) and shelf is self.own:
                try:
                    return shelf.publish_entry(key, fields, object_digest)
                except UnwritableError as error:
                    self._fall_back(error)
            directory = shelf.layout.objects / object_digest
            try:
                files = {name: read_regular(directory / name) for name in manifest["files"]}
            except (OSError, ValueError):
                continue
            return self.publish(key, fields, object_digest, files, manifest)
        return None

    def publish(
        self,
        key: str,
        fields: Mapping[str, str],
        object_digest: str,
        files: Mapping[str, bytes],
        manifest: Mapping[str, Any],
        *,
        force: bool = False,
    ) -> Entry:
        """Store an object and the entry that makes it serve ``key``: in the cache, else until this process ends.

        Raises:
            UnwritableError: neither can be written.
        """

        def into(store: Store) -> Entry:
            # Before it can be seen, so that nobody removes it before it is used.
            store.about_to_use(object_digest)
            store.publish_object(object_digest, files, manifest, force=force)
            return store.publish_entry(key, fields, object_digest, forced=force)

        try:
            return into(self._cache())
        except UnwritableError as error:
            store = self._fall_back(error)
            self.temporary += 1
            return into(store)

    def _shelves(self, key: str | None = None) -> Iterator[Shelf]:
        # Temporary ones hold what the cache could not take: newer than what is there.
        temporary_ones = temporary.existing()
        own = [self.own] if self.own is not None else []
        if key is not None and (temporary_ones or self._packs):
            yield from (store for store in (*temporary_ones, *own) if store.prefers(key))
        yield from self._packs
        yield from own
        yield from temporary_ones
        yield from (Shelf(path) for path in installed_packs())

    def _cache(self) -> Store:
        if self.own is None or self._refusal:
            raise UnwritableError(self._refusal)
        return self.own

    def _fall_back(self, error: UnwritableError) -> Store:
        if not self._may_fall_back:
            raise error
        try:
            store = temporary.create()
        except UnwritableError as other:
            raise UnwritableError(f"{error}; {other}") from error
        global _fell_back
        with forks.guard:
            first, _fell_back = not _fell_back, True
        if first:
            _log.warning(
                "kernels that the cache cannot take are kept in %s until this process ends, and others compile them "
                "again: %s",
                store.root,
                error,
            )
        return store


def _disk_fault(error: CompileError, directory: Path) -> str | None:
    """How the disk of ``directory`` let down a compiler, if it did."""
    if match := _DISK_FAULT.search(error.log):
        return match[0]
    probe = directory / ".probe"
    try:
        # A log that could not be written either does not tell.
        write_synced(probe, bytes(_PROBE_BYTES))
    except OSError as fault:
        return str(fault)
    finally:
        with suppress(OSError):
            remove_file(probe)
    return None
