"""The cache's two levels.

``objects/<digest>/`` holds one compiled kernel and everything about it; its name is the digest of what was compiled
and with what. ``entries/<key>.json`` says which object serves a key. So a change of the emitter gives new keys,
yet kernels whose text it leaves alone are not compiled again.

Reading never raises and never writes: whatever is wrong with an artefact makes it a miss. Writing is atomic: an object
is renamed into place as a whole directory, and its entry, written last, makes it visible. No file holds an
absolute path, so that a cache directory can be copied to another machine, user or place.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import filelock

from cutlass_w8a8.cache.files import sha256, sync_directory, write_synced
from cutlass_w8a8.cache.key import digest
from cutlass_w8a8.cache.location import ensure_root, refuse_foreign
from cutlass_w8a8.errors import CacheError

LIBRARY = "kernel.so"
SOURCE = "kernel.cu"
MANIFEST = "build.json"
_LAYOUT = "v1"
# Compiling takes minutes at most.
_ABANDONED_SECONDS = 24 * 3600
_log = logging.getLogger("cutlass_w8a8")


@dataclass(frozen=True)
class Entry:
    """A usable cached kernel.

    Attributes:
        key: the key it was found under.
        fields: the labelled fields the key is the digest of.
        directory: the object's directory.
        manifest: what ``build.json`` records: flags, compilers, commands, seconds, resources, file digests.
        compiled: whether the call that returned this ran the compiler.
    """

    key: str
    fields: Mapping[str, str]
    directory: Path
    manifest: Mapping[str, Any]
    compiled: bool = False

    @property
    def library(self) -> Path:
        """The shared library."""
        return self.directory / LIBRARY

    @property
    def source(self) -> Path:
        """The emitted source it was compiled from."""
        return self.directory / SOURCE


class Store:
    """A cache under ``root``, which need not exist until something is published."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._objects = root / _LAYOUT / "objects"
        self._entries = root / _LAYOUT / "entries"
        self._locks = root / _LAYOUT / "locks"
        self._work = root / _LAYOUT / "work"

    def lookup(self, key: str) -> Entry | None:
        """The entry for ``key``, or None if it is missing or anything about it is wrong."""
        path = self._entry_path(key)
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            fields, object_digest = entry["fields"], entry["object"]
            if entry["key"] != key or digest(fields) != key:
                raise ValueError("its fields do not belong to its key")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, CacheError) as error:
            _log.warning("ignoring the cache entry %s: %s", path, error)
            return None
        manifest = self.find_object(object_digest)
        if manifest is None:
            _log.info("the cache entry %s has no usable object", path)
            return None
        return Entry(key, fields, self._objects / object_digest, manifest)

    def find_object(self, object_digest: str) -> Mapping[str, Any] | None:
        """The manifest of an object whose files are all there, unaltered and this user's or root's; else None."""
        if not _is_digest(object_digest):
            return None
        directory = self._objects / object_digest
        try:
            for path in (self._objects.parent, self._objects, directory, directory / LIBRARY):
                refuse_foreign(path)
            manifest: Mapping[str, Any] = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
            files = manifest["files"]
            if manifest["object"] != object_digest or not {LIBRARY, SOURCE} <= files.keys():
                raise ValueError("its manifest is another object's")
            for name, expected in files.items():
                if sha256((directory / name).read_bytes()) != expected["sha256"]:
                    raise ValueError(f"{name} has the wrong checksum")
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, CacheError) as error:
            if directory.exists():
                _log.warning("ignoring the cached object %s: %s", directory, error)
            return None
        return manifest

    def publish_object(
        self, object_digest: str, files: Mapping[str, bytes], manifest: Mapping[str, Any], *, force: bool = False
    ) -> None:
        """Store an object: ``files`` (relative names; ``kernel.so`` and ``kernel.cu`` among them) and its manifest.

        The manifest gets the digest and size of every file, and the date. An intact object of the same digest is
        kept, unless ``force`` is given; a broken one is replaced.

        Raises:
            CacheError: the cache cannot be written.
        """
        complete = {
            **manifest,
            "object": object_digest,
            "created": _now(),
            "files": {name: {"bytes": len(data), "sha256": sha256(data)} for name, data in sorted(files.items())},
        }
        text = json.dumps(complete, indent=2, sort_keys=True) + "\n"
        target = self._objects / object_digest
        with self._writing():
            self._objects.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=self._objects))
            try:
                fresh.chmod(0o755)
                for name, data in {**files, MANIFEST: text.encode()}.items():
                    path = fresh / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_synced(path, data)
                    path.chmod(0o644)
                for directory in (*(path for path in fresh.rglob("*") if path.is_dir()), fresh):
                    sync_directory(directory)
                self._install(fresh, target, force)
                sync_directory(self._objects)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)

    def publish_entry(self, key: str, fields: Mapping[str, str], object_digest: str) -> Entry:
        """Make a stored object the one that serves ``key``.

        Raises:
            CacheError: the cache cannot be written, or the object is not there.
        """
        text = json.dumps(
            {"key": key, "fields": dict(fields), "object": object_digest, "created": _now()}, indent=2, sort_keys=True
        )
        with self._writing():
            self._entries.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=".new-", dir=self._entries)
            os.close(descriptor)
            try:
                write_synced(Path(name), (text + "\n").encode())
                Path(name).chmod(0o644)
                Path(name).replace(self._entry_path(key))
                sync_directory(self._entries)
            finally:
                Path(name).unlink(missing_ok=True)
        entry = self.lookup(key)
        if entry is None:
            raise CacheError(
                f"the cache {self.root} does not give back what was just written under {key}; something else is "
                "changing it, or the disk is failing"
            )
        return entry

    def entries(self) -> Iterator[Entry]:
        """All usable entries, in the order of their keys."""
        for path in sorted(self._entries.glob("*.json")):
            if _is_digest(path.stem) and (entry := self.lookup(path.stem)) is not None:
                yield entry

    def remove(self, key: str) -> bool:
        """Remove an entry, and its object if no other entry uses it. Returns whether there was one.

        Raises:
            CacheError: it cannot be removed.
        """
        with self._writing():
            path = self._entry_path(key)
            object_digest = self._object_of(path)
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            if object_digest and all(self._object_of(other) != object_digest for other in self._entries.glob("*.json")):
                self._discard(self._objects / object_digest)
            return True

    @contextmanager
    def lock(self, object_digest: str) -> Iterator[None]:
        """Hold the right to build an object, against other threads and processes.

        Raises:
            CacheError: the lock file cannot be made.
        """
        with self._writing():
            self._locks.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self._locks / f"{object_digest}.lock")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def workdir(self) -> Iterator[Path]:
        """An empty private directory on the cache's file system, removed afterwards.

        What killed processes left behind is removed on the way.

        Raises:
            CacheError: it cannot be made, or cannot be written by the caller: the disk is full, or somebody has removed
                the cache.
        """
        with self._writing():
            self._work.mkdir(parents=True, exist_ok=True)
            self._sweep()
            directory = Path(tempfile.mkdtemp(dir=self._work))
        try:
            with self._writing():
                yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove working directories so old that no compilation can be using them."""
        oldest = time.time() - _ABANDONED_SECONDS
        for directory in self._work.iterdir():
            with contextlib.suppress(OSError):
                if directory.stat().st_mtime < oldest:
                    shutil.rmtree(directory, ignore_errors=True)

    def failed(self, name: str) -> Path:
        """Where to leave the source and log of a kernel that does not compile."""
        return self.root / "failed" / name

    def _install(self, fresh: Path, target: Path, force: bool) -> None:
        while True:
            try:
                fresh.rename(target)
                return
            except OSError:
                if not target.exists():
                    raise
            # Someone else was faster, or what is there is broken, or it is to be replaced.
            if not force and self.find_object(target.name) is not None:
                return
            self._discard(target)

    def _discard(self, directory: Path) -> None:
        # Renamed first, so that no reader meets a directory with some files already gone.
        grave = Path(tempfile.mkdtemp(prefix=".old-", dir=self._objects))
        try:
            directory.rename(grave / "object")
        except FileNotFoundError:
            pass
        finally:
            shutil.rmtree(grave, ignore_errors=True)

    def _entry_path(self, key: str) -> Path:
        if not _is_digest(key):
            raise CacheError(f"{key!r} is not a cache key, which is 64 hexadecimal digits; see cutlass-w8a8 list")
        return self._entries / f"{key}.json"

    def _object_of(self, path: Path) -> str | None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["object"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return found if _is_digest(found) else None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        ensure_root(self.root)
        try:
            yield
        except OSError as error:
            raise CacheError(
                f"the cache {self.root} cannot be written ({error}); free space, fix its permissions, or set "
                "CUTLASS_W8A8_CACHE_DIR to another directory"
            ) from error


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{64}", text) is not None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
