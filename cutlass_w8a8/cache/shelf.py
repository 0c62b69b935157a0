"""The cache's two levels, as they are read.

``objects/<digest>/`` holds one compiled kernel and everything about it; its name is the digest of what was compiled
and with what. ``entries/<key>.json`` says which object serves a key. So a change of the emitter gives new keys,
yet kernels whose text it leaves alone are not compiled again.

Reading never raises: whatever is wrong with an artefact makes it a miss. Nor does it write, unless what is found is
to be used, which is noted. No file holds an absolute path, so that a cache directory can be copied to another machine,
user or place.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutlass_w8a8.cache.files import is_link, read_regular, sha256
from cutlass_w8a8.cache.key import digest
from cutlass_w8a8.cache.location import Layout, refuse_foreign
from cutlass_w8a8.errors import CacheError

LIBRARY = "kernel.so"
SOURCE = "kernel.cu"
MANIFEST = "build.json"
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
        return [path for path in listed(self.layout.entries) if path.suffix == ".json" and is_digest(path.stem)]

    def object_digests(self) -> list[str]:
        """The digests of all objects, in order, whatever is in them."""
        return [path.name for path in listed(self.layout.objects) if is_digest(path.name)]

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


def is_digest(text: object) -> bool:
    """Whether ``text`` is a SHA-256 in hex, as keys and objects are named."""
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{64}", text) is not None


def listed(directory: Path) -> list[Path]:
    """What is in a directory, in order of names; nothing if it cannot be read."""
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, CacheError | ValueError) else f"{type(error).__name__}: {error}"
