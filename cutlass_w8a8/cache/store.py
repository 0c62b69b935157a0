"""The cache's two levels.

``objects/<digest>/`` holds one compiled kernel and everything about it; its name is the digest of what was compiled
and with what. ``entries/<key>.json`` says which object serves a key. So a change of the emitter gives new keys,
yet kernels whose text it leaves alone are not compiled again.

Reading never raises: whatever is wrong with an artefact makes it a miss. Nor does it write, unless what is found is
to be used, which is noted. Writing is atomic: an object is renamed into place as a whole directory, and its entry,
written last, makes it visible. No file holds an absolute path, so that a cache directory can be copied to another
machine, user or place.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cutlass_w8a8.cache import lock, users
from cutlass_w8a8.cache.files import (
    exchange,
    is_directory,
    is_link,
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
from cutlass_w8a8.cache.key import digest
from cutlass_w8a8.cache.location import ROOT_VARIABLE, Layout, ensure_root, refuse_foreign
from cutlass_w8a8.errors import CacheError, UnwritableError

LIBRARY = "kernel.so"
SOURCE = "kernel.cu"
MANIFEST = "build.json"
# For a file system without locks: no compilation lasts so long.
ABANDONED_SECONDS = 24 * 3600
# An object's last use is told by its manifest's date, to the day.
_DAY_SECONDS = 24 * 3600
_MOST_REPLACEMENTS = 10
# Stands for an object where there is none.
_NOBODYS = "0" * 64
_WRONG = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, CacheError)
_log = logging.getLogger("cutlass_w8a8")


class BrokenError(Exception):
    """An entry or an object is not what was published."""


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

    @property
    def size(self) -> int:
        """Bytes in the object's files."""
        return sum(int(file["bytes"]) for file in self.manifest["files"].values())


class Shelf:
    """Kernels under ``root``, to read: a pack, or what others make of a cache. Need not exist."""

    def __init__(self, root: Path) -> None:
        self.layout = Layout(root)

    @property
    def root(self) -> Path:
        """The directory."""
        return self.layout.root

    def lookup(self, key: str, *, use: bool = False) -> Entry | None:
        """The entry for ``key``, or None if it is missing or anything about it is wrong.

        Args:
            key: what it was published under.
            use: whether this process is about to use the object, which then must stay.
        """
        path = self.entry_path(key)
        try:
            fields, object_digest, _ = self.read_entry(path)
        except FileNotFoundError:
            return None
        except BrokenError as error:
            _log.warning("ignoring the cache entry %s: %s", path, error)
            return None
        if use:
            self.about_to_use(object_digest)
        manifest = self.find_object(object_digest)
        if manifest is None:
            _log.info("the cache entry %s has no usable object", path)
            return None
        return Entry(key, fields, self.layout.objects / object_digest, manifest)

    def find_object(self, object_digest: str) -> Mapping[str, Any] | None:
        """The manifest of an object whose files are all there, unaltered and this user's or root's; else None."""
        if not is_digest(object_digest):
            return None
        try:
            return self.read_object(object_digest)
        except FileNotFoundError:
            return None
        except BrokenError as error:
            _log.warning("ignoring the cached object %s: %s", self.layout.objects / object_digest, error)
            return None

    def entries(self) -> Iterator[Entry]:
        """All usable entries, in the order of their keys."""
        for path in self.entry_files():
            with contextlib.suppress(FileNotFoundError, BrokenError):
                fields, object_digest, _ = self.read_entry(path)
                manifest = self.read_object(object_digest)
                yield Entry(path.stem, fields, self.layout.objects / object_digest, manifest)

    def prefers(self, key: str) -> bool:
        """Whether the entry for ``key`` was made on demand, to be used in place of others."""
        try:
            return self.read_entry(self.entry_path(key))[2]
        except (FileNotFoundError, BrokenError):
            return False

    def entry_files(self) -> list[Path]:
        """The files of all entries, in the order of their keys, whatever is in them."""
        return [path for path in _listed(self.layout.entries) if path.suffix == ".json" and is_digest(path.stem)]

    def object_digests(self) -> list[str]:
        """The digests of all objects, in order, whatever is in them."""
        return [path.name for path in _listed(self.layout.objects) if is_digest(path.name)]

    def entry_path(self, key: str) -> Path:
        """The file of the entry for ``key``.

        Raises:
            CacheError: that is no key.
        """
        if not is_digest(key):
            raise CacheError(f"{key!r} is not a cache key, which is 64 hexadecimal digits; see cutlass-w8a8 cache ls")
        return self.layout.entries / f"{key}.json"

    def read_entry(self, path: Path) -> tuple[Mapping[str, str], str, bool]:
        """The fields of an entry, the object it names, and whether it was forced.

        Raises:
            FileNotFoundError: it is not there.
            BrokenError: it is not one that was published under this name.
        """
        try:
            entry = json.loads(read_regular(path).decode())
            fields, object_digest, forced = entry["fields"], entry["object"], entry.get("forced") is True
            if entry["key"] != path.stem or digest(fields) != path.stem:
                raise ValueError("its fields do not belong to its key")
            if not is_digest(object_digest):
                raise ValueError(f"it names {object_digest!r}, which is no object")
        except FileNotFoundError:
            # A dangling link is there, and wrong.
            if is_link(path):
                raise BrokenError("it is a link to nowhere") from None
            raise
        except _WRONG as error:
            raise BrokenError(_cause(error)) from error
        return fields, object_digest, forced

    def read_object(self, object_digest: str) -> Mapping[str, Any]:
        """The manifest of an object whose files are all there, unaltered and this user's or root's.

        Raises:
            FileNotFoundError: there is no such object.
            BrokenError: something about it is wrong.
        """
        directory = self.layout.objects / object_digest
        try:
            directory.lstat()
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"there is no {directory}") from None
        except OSError as error:
            raise BrokenError(_cause(error)) from error
        try:
            for path in (self.layout.objects.parent, self.layout.objects, directory, directory / LIBRARY):
                refuse_foreign(path)
            manifest: Mapping[str, Any] = json.loads(read_regular(directory / MANIFEST).decode())
            files = manifest["files"]
            if manifest["object"] != object_digest or not {LIBRARY, SOURCE} <= files.keys():
                raise ValueError("its manifest is another object's")
            for name, expected in files.items():
                if sha256(read_regular(directory / name, expected["bytes"])) != expected["sha256"]:
                    raise ValueError(f"{name} has the wrong checksum")
        except _WRONG as error:
            raise BrokenError(_cause(error)) from error
        return manifest

    def about_to_use(self, object_digest: str) -> None:
        """What to do before an object is looked for in order to be used: nothing, where nothing is ever removed."""


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
        for path in _listed(self.layout.work):
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


def is_digest(text: object) -> bool:
    """Whether ``text`` is a SHA-256 in hex, as keys and objects are named."""
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{64}", text) is not None


def _listed(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, CacheError | ValueError) else f"{type(error).__name__}: {error}"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
