"""The cache as it is written.

Writing is atomic: an object is renamed into place as a whole directory, and its entry, written last, makes it visible.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cutlass_w8a8.cache import lock, users
from cutlass_w8a8.cache.files import (
    exchange,
    is_directory,
    make_directory,
    private_directory,
    read_regular,
    readable_to_all,
    remove_file,
    remove_tree,
    rename,
    sha256,
    sync_directory,
    write_synced,
)
from cutlass_w8a8.cache.location import ROOT_VARIABLE, ensure_root
from cutlass_w8a8.cache.shelf import MANIFEST, Entry, Shelf, is_digest, listed
from cutlass_w8a8.errors import UnwritableError

# For a file system without locks: no compilation lasts so long.
ABANDONED_SECONDS = 24 * 3600
# An object's last use is told by its manifest's date, to the day.
_DAY_SECONDS = 24 * 3600
_MOST_REPLACEMENTS = 10
# Stands for an object where there is none.
_NOBODYS = "0" * 64


class Store(Shelf):
    """A cache under ``root``, to write, which need not exist until something is published."""

    def publish_object(
        self, object_digest: str, files: Mapping[str, bytes], manifest: Mapping[str, Any], *, force: bool = False
    ) -> None:
        """Store an object: ``files`` (relative names; ``kernel.so`` and ``kernel.cu`` among them) and its manifest.

        The manifest gets the digest and size of every file, and the date. An intact object of the same digest is
        kept, unless ``force`` is given; a broken one is replaced.

        Raises:
            UnwritableError: the cache cannot be written.
        """
        complete = {
            **manifest,
            "object": object_digest,
            "created": _now(),
            "files": {name: {"bytes": len(data), "sha256": sha256(data)} for name, data in sorted(files.items())},
        }
        text = json.dumps(complete, indent=2, sort_keys=True) + "\n"
        with self._writing(), self.staging(object_digest) as stage:
            make_directory(self.layout.objects)
            fresh = stage / "object"
            make_directory(fresh)
            readable_to_all(fresh, 0o755)
            directories = {fresh}
            for name, data in {**files, MANIFEST: text.encode()}.items():
                path = fresh / name
                make_directory(path.parent)
                directories.add(path.parent)
                write_synced(path, data)
                readable_to_all(path, 0o644)
            for directory in sorted(directories, reverse=True):
                sync_directory(directory)
            self._install(fresh, self.layout.objects / object_digest, stage / "old", force)
            sync_directory(self.layout.objects)

    def publish_entry(self, key: str, fields: Mapping[str, str], object_digest: str, *, forced: bool = False) -> Entry:
        """Make a stored object the one that serves ``key``; ``forced`` ones go before what packs hold.

        Raises:
            UnwritableError: the cache cannot be written, or does not give back what was written.
        """
        entry = {"key": key, "fields": dict(fields), "object": object_digest, "created": _now()}
        text = json.dumps({**entry, "forced": True} if forced else entry, indent=2, sort_keys=True) + "\n"
        target = self.entry_path(key)
        with self._writing(), self.staging(object_digest) as stage:
            make_directory(self.layout.entries)
            fresh = stage / target.name
            write_synced(fresh, text.encode())
            readable_to_all(fresh, 0o644)
            rename(fresh, target)
            sync_directory(self.layout.entries)
        found = self.lookup(key)
        if found is None:
            raise UnwritableError(
                f"the cache {self.root} does not give back what was just written under {key}; something else is "
                "changing it, or the disk is failing"
            )
        return found

    def remove(self, key: str) -> bool:
        """Remove an entry, and its object if no other entry uses it. Returns whether there was one.

        Raises:
            UnwritableError: it cannot be removed.
        """
        with self._writing():
            path = self.entry_path(key)
            object_digest = self.object_of(path)
            if not remove_file(path):
                return False
            if object_digest and all(self.object_of(other) != object_digest for other in self.entry_files()):
                self.discard(object_digest)
            return True

    def object_of(self, path: Path) -> str | None:
        """The object that an entry's file names, however wrong the entry may be otherwise."""
        try:
            found = json.loads(read_regular(path).decode())["object"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        return found if is_digest(found) else None

    def discard(self, object_digest: str) -> None:
        """Remove an object, at once for all readers.

        Raises:
            OSError: it cannot be removed.
        """
        target = self.layout.objects / object_digest
        try:
            with self.staging(object_digest) as stage:
                self._move_away(target, stage / "old")
        except OSError:
            # A full disk has no room for another directory.
            _remove_in_place(target)

    @contextmanager
    def lock(self, object_digest: str, seconds: float = float("inf")) -> Iterator[None]:
        """Hold the right to build an object, against other threads and processes.

        Args:
            object_digest: the object.
            seconds: how long to wait for others.

        Raises:
            UnwritableError: the lock file cannot be made.
            NoLocksError: the file system refuses to lock it.
            TimeoutError: others held it all that time.
        """
        path = self.lock_path(object_digest)
        with self._writing():
            make_directory(self.layout.locks)
            held = lock.acquire(path, seconds=seconds)
        if held is None:
            raise TimeoutError(f"{path} has been held by others for {seconds:.0f} s")
        try:
            yield
        finally:
            lock.release(held, path)

    def lock_path(self, object_digest: str) -> Path:
        """The file that whoever builds or removes an object locks."""
        return self.layout.locks / f"{object_digest}.lock"

    @contextmanager
    def workdir(self, object_digest: str) -> Iterator[Path]:
        """An empty private directory on the cache's file system, in which to build an object; removed afterwards.

        What killed processes left behind is removed on the way.

        Raises:
            UnwritableError: it cannot be made, or cannot be written by the caller: the disk is full, or somebody has
                removed the cache.
        """
        with self._writing(), self.staging(object_digest) as directory:
            self.sweep(directory)
            yield directory

    def sweep(self, but: Path | None = None) -> list[Path]:
        """Remove the working directories of builds that have ended, ``but`` one; returns what was removed.

        A build holds its object's lock, so whoever gets that lock knows. Dates are asked only where there are no locks.
        """
        removed = []
        with contextlib.suppress(OSError):
            make_directory(self.layout.locks)
        for path in listed(self.layout.work):
            object_digest = path.name.partition(".")[0]
            if not is_digest(object_digest) or path == but:
                continue
            with contextlib.suppress(OSError):
                try:
                    with lock.attempt(self.lock_path(object_digest)) as ended:
                        if ended:
                            remove_tree(path)
                except lock.NoLocksError:
                    # By the clock of the file system: ours may be another.
                    if abs(self.now() - path.stat().st_mtime) > ABANDONED_SECONDS:
                        remove_tree(path)
                if not path.exists():
                    removed.append(path)
        return removed

    def now(self) -> float:
        """The time by which files of the cache are dated; this machine's where the cache cannot be written."""
        try:
            with self.staging() as fresh:
                return fresh.stat().st_mtime
        except OSError:
            return time.time()

    def failed(self, name: str) -> Path:
        """Where to leave the source and log of a kernel that does not compile."""
        return self.layout.failed / name

    def about_to_use(self, object_digest: str) -> None:
        """List the object as used by this process, and note the day."""
        users.mark(self.layout, object_digest)
        manifest = self.layout.objects / object_digest / MANIFEST
        # Refused on what is not ours to write, where nothing is evicted either.
        with contextlib.suppress(OSError):
            # A date in the future would never pass.
            if abs(time.time() - manifest.stat().st_mtime) > _DAY_SECONDS:
                os.utime(manifest)

    @contextmanager
    def staging(self, object_digest: str = _NOBODYS) -> Iterator[Path]:
        """A new directory on the cache's file system, removed afterwards; its name says whose lock protects it.

        Raises:
            OSError: it cannot be made.
        """
        directory = private_directory(self.layout.work, f"{object_digest}.")
        try:
            yield directory
        finally:
            remove_tree(directory)

    def _install(self, fresh: Path, target: Path, old: Path, force: bool) -> None:
        try:
            for _ in range(_MOST_REPLACEMENTS):
                try:
                    rename(fresh, target)
                    return
                except OSError:
                    if not os.path.lexists(target):
                        raise
                # Someone else was faster, or what is there is broken, or it is to be replaced.
                if not force and self.find_object(target.name) is not None:
                    return
                with contextlib.suppress(OSError):
                    # At no time is there none.
                    exchange(fresh, target)
                    return
                remove_tree(old)
                self._move_away(target, old)
            raise FileExistsError(errno.EEXIST, "comes back each time it is moved away", str(target))
        except OSError:
            # What was there may have been good. Does nothing where something is there.
            with contextlib.suppress(OSError):
                rename(old, target)
            raise

    def _move_away(self, target: Path, old: Path) -> None:
        """Take ``target`` out of sight as a whole, so that no reader meets it with some files already gone."""
        try:
            rename(target, old)
        except FileNotFoundError:
            pass
        except OSError:
            # Layered file systems do not rename directories of a lower layer.
            _remove_in_place(target)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        ensure_root(self.root)
        try:
            yield
        except OSError as error:
            raise UnwritableError(
                f"the cache {self.root} cannot be written ({error}); free space, fix its permissions, or set "
                f"{ROOT_VARIABLE} to another directory"
            ) from error


def _remove_in_place(target: Path) -> None:
    """Remove an object where it is: without its manifest it is none, whatever is still there.

    Raises:
        OSError: it cannot be removed.
    """
    if is_directory(target):
        remove_file(target / MANIFEST)
        remove_tree(target)
        if target.exists():
            target.rmdir()
    else:
        remove_file(target)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
