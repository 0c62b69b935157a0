"""The cache on disk: keys, atomic publication, and that nothing wrong in it is ever more than a miss."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest

from cutlass_w8a8.cache import location
from cutlass_w8a8.cache.key import digest
from cutlass_w8a8.cache.store import Store
from cutlass_w8a8.errors import ArgumentError, CacheError

FILES = {"kernel.cu": b"source", "kernel.so": b"library" * 100, "stubs/x.h": b"", "build.log": b"log"}
FIELDS = {"spec": "a", "flags": "b"}
KEY = digest(FIELDS)
OBJECT = digest({"object": "1"})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def publish(store: Store, object_digest: str = OBJECT, fields: dict[str, str] = FIELDS) -> str:
    store.publish_object(object_digest, FILES, {"seconds": 1.5})
    return store.publish_entry(digest(fields), fields, object_digest).key


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_digest_separates_fields() -> None:
    different = [
        {},
        {"a": ""},
        {"a": "b"},
        {"ab": ""},
        {"": "ab"},
        {"a": "", "b": ""},
        {"a": "b", "c": "d"},
        {"a": "b1:c1:d"},
        {"a": "d", "c": "b"},
    ]
    for one, other in combinations(different, 2):
        assert digest(one) != digest(other)
    assert digest({"a": "1", "b": "2"}) == digest({"b": b"2", "a": "1"})
    with pytest.raises(CacheError, match="'a' is a int"):
        digest({"a": 1})  # type: ignore[dict-item]


def test_publish_then_lookup(store: Store) -> None:
    assert store.lookup(KEY) is None
    assert publish(store) == KEY
    entry = Store(store.root).lookup(KEY)
    assert entry is not None
    assert entry.fields == FIELDS
    assert (entry.library.read_bytes(), entry.source.read_bytes()) == (FILES["kernel.so"], b"source")
    assert entry.manifest["seconds"] == 1.5
    assert entry.manifest["files"].keys() == FILES.keys()
    assert entry.manifest["files"]["kernel.so"]["bytes"] == 700
    assert not entry.compiled


def test_nothing_temporary_remains_and_the_root_is_private(store: Store) -> None:
    publish(store)
    names = {path.relative_to(store.root / "v1").as_posix() for path in store.root.rglob("*") if path.is_file()}
    assert names == {f"entries/{KEY}.json", *(f"objects/{OBJECT}/{name}" for name in (*FILES, "build.json"))}
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700


def test_copied_cache_still_hits(store: Store, tmp_path: Path) -> None:
    publish(store)
    shutil.copytree(store.root, tmp_path / "copy")
    assert not any(str(tmp_path).encode() in content for content in snapshot(store.root).values())
    shutil.rmtree(store.root)
    entry = Store(tmp_path / "copy").lookup(KEY)
    assert entry is not None and entry.library.is_relative_to(tmp_path / "copy")


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncate,
    "directory": replace_by_directory,
    "dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}
JSON_DAMAGE: dict[str, Callable[[Path], object]] = {
    "not utf-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "list": lambda path: path.write_text("[]"),
    "null": lambda path: path.write_text("null"),
    "other fields": lambda path: path.write_text("{}"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "wrong types": lambda path: path.write_text(
        json.dumps({"key": KEY, "fields": {"spec": 1}, "object": OBJECT, "files": [1]})
    ),
    "wrong file types": lambda path: path.write_text(
        json.dumps({"object": OBJECT, "files": {"kernel.so": 1, "kernel.cu": None}, "key": KEY, "fields": FIELDS})
    ),
}
CASES = [
    *(
        (name, damage)
        for name in (f"entries/{KEY}.json", f"objects/{OBJECT}/build.json")
        for damage in (*DAMAGE, *JSON_DAMAGE)
        # A complete entry, whatever else it holds, is a good one.
        if not (name.startswith("entries") and damage in ("truncated", "wrong file types"))
    ),
    *((f"objects/{OBJECT}/kernel.so", damage) for damage in (*DAMAGE, "flipped")),
    *((f"objects/{OBJECT}/kernel.cu", damage) for damage in ("missing", "empty", "truncated", "dangling link")),
]


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_damage_is_a_miss_and_is_repaired(store: Store, name: str, damage: str) -> None:
    publish(store)
    # The manifest ends in a newline, whose loss would go unnoticed; take the brace too.
    path = store.root / "v1" / name
    if name.endswith("build.json") and damage == "truncated":
        truncate(path)
    {**DAMAGE, **JSON_DAMAGE, "flipped": flip_last_byte}[damage](path)
    before = sorted(str(path) for path in store.root.rglob("*"))
    assert store.lookup(KEY) is None
    assert list(store.entries()) == []
    assert sorted(str(path) for path in store.root.rglob("*")) == before

    if path.is_dir() and name.startswith("entries"):
        path.rmdir()
    publish(store)
    entry = store.lookup(KEY)
    assert entry is not None and entry.library.read_bytes() == FILES["kernel.so"]


def test_an_entry_serves_only_its_own_fields(store: Store) -> None:
    publish(store)
    path = store.root / "v1" / "entries" / f"{KEY}.json"
    entry = json.loads(path.read_text())
    path.write_text(json.dumps({**entry, "fields": {**FIELDS, "flags": "c"}}))
    assert store.lookup(KEY) is None
    other = digest({"other": "key"})
    path.rename(path.with_name(f"{other}.json"))
    assert store.lookup(other) is None
    path.write_text(json.dumps({**entry, "object": "../objects/" + OBJECT}))
    assert store.lookup(KEY) is None


def test_unreadable_cache_is_a_miss(store: Store) -> None:
    store.root.write_text("a file")
    assert store.lookup(KEY) is None
    assert list(store.entries()) == []
    with pytest.raises(CacheError, match="cannot be created"):
        publish(store)


def test_an_intact_object_is_kept_unless_forced(store: Store) -> None:
    publish(store)
    store.publish_object(OBJECT, {**FILES, "kernel.so": b"second"}, {})
    entry = store.lookup(KEY)
    assert entry is not None and entry.library.read_bytes() == FILES["kernel.so"]
    store.publish_object(OBJECT, {**FILES, "kernel.so": b"second"}, {}, force=True)
    entry = store.lookup(KEY)
    assert entry is not None and entry.library.read_bytes() == b"second"


def test_failure_while_writing_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store)
    before = snapshot(store.root)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match="No space left"):
        store.publish_object(digest({"object": "2"}), FILES, {})
    with pytest.raises(CacheError, match="No space left"):
        store.publish_entry(digest({}), {}, OBJECT)
    assert snapshot(store.root) == before


def test_entry_without_object_is_refused(store: Store) -> None:
    with pytest.raises(CacheError, match="does not give back"):
        store.publish_entry(KEY, FIELDS, OBJECT)


def test_remove_keeps_a_shared_object(store: Store) -> None:
    second = {**FIELDS, "emitter": "2"}
    publish(store)
    publish(store, fields=second)
    assert [entry.key for entry in store.entries()] == sorted([KEY, digest(second)])
    assert store.remove(KEY)
    assert store.lookup(KEY) is None
    assert store.lookup(digest(second)) is not None
    assert not store.remove(KEY)
    assert store.remove(digest(second))
    assert snapshot(store.root) == {}
    with pytest.raises(CacheError, match="not a cache key"):
        store.remove("../../x")


def test_lock_excludes_threads(store: Store) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(5):
            with store.lock(OBJECT):
                with guard:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.005)
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (inside, most) == (0, 1)


def test_location(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", str(tmp_path / "here"))
    assert location.cache_root() == tmp_path / "here"
    assert not (tmp_path / "here").exists()
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", "~/there")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert location.cache_root() == tmp_path / "there"
    monkeypatch.delenv("CUTLASS_W8A8_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert location.cache_root() == tmp_path / "xdg" / "cutlass_w8a8"
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", "relative")
    with pytest.raises(CacheError, match="relative path"):
        location.cache_root()


def test_home_of_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", "~no-such-user/kernels")
    with pytest.raises(ArgumentError, match=r"CUTLASS_W8A8_CACHE_DIR=~no-such-user/kernels: .*write the path out"):
        location.cache_root()


def test_a_cache_that_vanishes_while_it_is_used_is_named(store: Store) -> None:
    def vanish() -> None:
        with store.workdir(OBJECT) as directory:
            shutil.rmtree(store.root)
            (directory / "kernel.cu").write_text("")

    with pytest.raises(CacheError, match=r"cannot be written .*No such file"):
        vanish()


@pytest.mark.parametrize("date", [0, 2**33], ids=["1970", "2242"])
def test_what_killed_processes_left_is_swept_away_and_dates_mean_nothing(store: Store, date: int) -> None:
    other, third = digest({"object": "2"}), digest({"object": "3"})
    with store.lock(other), store.workdir(other) as used:
        os.utime(used, (date, date))
        abandoned, unknown = used.with_name(f"{third}.abc"), used.with_name("somebody's")
        for path in (abandoned, unknown):
            path.mkdir()
            (path / "kernel.cu").touch()
        os.utime(unknown, (date, date))
        with store.lock(OBJECT), store.workdir(OBJECT) as directory:
            assert sorted(os.listdir(directory.parent)) == sorted([unknown.name, used.name, directory.name])
    assert os.listdir(unknown.parent) == [unknown.name]


@pytest.mark.parametrize(("age", "stays"), [(0, True), (3600, True), (2 * 86400, False), (-2 * 86400, False)])
def test_without_locks_the_file_systems_dates_tell_what_is_abandoned(
    store: Store, monkeypatch: pytest.MonkeyPatch, age: int, stays: bool
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    # This machine's clock is wrong, which must not matter.
    monkeypatch.setattr(time, "time", lambda: 1.0)
    with store.workdir(OBJECT) as directory:
        other = directory.with_name(f"{digest({})}.abc")
        other.mkdir()
        date = other.stat().st_mtime - age
        os.utime(other, (date, date))
        store.sweep()
        assert other.exists() is stays


def test_a_cache_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", str(tmp_path))
    owner = tmp_path.stat().st_uid
    # Root's directory is anyone's to read, so stand in another owner where the tests run as root.
    real = Path.stat
    if owner == 0:

        def owned(path: Path, **options: bool) -> os.stat_result:
            result = real(path, **options)
            return os.stat_result((*result[:4], 4000, *result[5:])) if path == tmp_path else result

        monkeypatch.setattr(Path, "stat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: 5000)
    with pytest.raises(CacheError, match=rf"belongs to user {owner or 4000}.*as user 5000"):
        location.cache_root()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("place", ["v1", "v1/objects", "object", "library"])
def test_what_another_user_could_have_planted_is_not_loaded(
    store: Store, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    entry = store.lookup(publish(store))
    assert entry is not None
    target = {"object": entry.directory, "library": entry.library}.get(place, store.root / place)
    os.chown(target, 4242, 4242)
    assert store.lookup(entry.key) is not None  # root trusts what it is given
    monkeypatch.setattr(os, "geteuid", lambda: 5353)
    assert store.lookup(entry.key) is None
    os.chown(target, 5353, 5353)
    assert store.lookup(entry.key) is not None
