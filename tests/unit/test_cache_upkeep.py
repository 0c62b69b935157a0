"""Keeping a cache in order: what is evicted and what never is; verify, prune and clear, and the commands for them."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cutlass_w8a8 import pipeline
from cutlass_w8a8.cache import location, lock, upkeep, users
from cutlass_w8a8.cache.key import digest
from cutlass_w8a8.cache.store import Store
from cutlass_w8a8.cli import main
from cutlass_w8a8.errors import ArgumentError, CacheError
from tests.stress import files, spec

ROOT = Path(__file__).parents[2]
DAY = 86400
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def publish(store: Store, number: int, size: int = 1000, age_days: float = 0) -> str:
    """An object of ``size`` bytes and its entry, last used so long ago. Returns the object's digest."""
    name, fields = digest({"object": str(number)}), {"number": str(number)}
    store.publish_object(name, {"kernel.so": bytes(size), "kernel.cu": b""}, {"name": f"kernel {number}"})
    store.publish_entry(digest(fields), fields, name)
    date = time.time() - age_days * DAY
    os.utime(store.layout.objects / name / "build.json", (date, date))
    return name


def numbers(store: Store) -> set[int]:
    return {int(entry.fields["number"]) for entry in store.entries()}


def used_elsewhere(store: Store, name: str) -> subprocess.Popen[str]:
    """Another process that uses an object, until it is killed."""
    code = (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path; from cutlass_w8a8.cache import location, users\n"
        f"assert users.mark(location.Layout(Path({str(store.root)!r})), {name!r}); print('marked', flush=True)\n"
        "time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "marked\n"
    return process


# The size limit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2 * 10**9), ("500 mb", 5 * 10**8), ("1.5GiB", 3 * 2**29), ("0", 0), ("1000000", 10**6), ("NONE", None),
     ("1k", 1000), ("", location.DEFAULT_LIMIT)],
)  # fmt: skip
def test_sizes(monkeypatch: pytest.MonkeyPatch, text: str, size: int | None) -> None:
    monkeypatch.setenv(location.LIMIT_VARIABLE, text)
    assert location.size_limit() == size


@pytest.mark.parametrize("text", ["2 GBs", "-1", "lots", "1e9", "GB"])
def test_what_is_no_size_is_told_before_anything_is_compiled(
    fake_tools: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(location.LIMIT_VARIABLE, text)
    with pytest.raises(ArgumentError, match=rf"CUTLASS_W8A8_CACHE_LIMIT={text} is no size; write it like 2GB"):
        pipeline.build(spec(0))
    assert fake_tools.calls == []


def test_the_least_recently_used_go(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    for number, age in enumerate((3, 9, 1, 7, 5)):
        publish(store, number, 10_000, age)
    total = upkeep.total_bytes(store)
    assert upkeep.evict(store, None) == [] and upkeep.evict(store, total) == [] and numbers(store) == set(range(5))
    with caplog.at_level(logging.INFO, "cutlass_w8a8"):
        removed = upkeep.evict(store, 30_000)
    assert numbers(store) == {0, 2}
    assert [item.path.name for item in removed] == [digest({"object": str(number)}) for number in (1, 3, 4)]
    assert sum(item.bytes for item in removed) == total - upkeep.total_bytes(store)
    assert caplog.text.count("evicted") == 3
    assert upkeep.verify(store) == [] and list(store.layout.work.iterdir()) == []


def test_dates_in_the_future_and_in_1970_keep_nothing_for_ever(store: Store) -> None:
    for number, age in enumerate((1, -400, 20000)):
        publish(store, number, 10_000, age)
    upkeep.evict(store, 15_000)
    assert numbers(store) == {0}


@pytest.mark.parametrize("age", [2, -400, 20000])
def test_a_use_is_noted_to_the_day(store: Store, age: float) -> None:
    manifest = store.layout.objects / publish(store, 0, age_days=age) / "build.json"
    key = digest({"number": "0"})
    store.lookup(key)
    assert abs(manifest.stat().st_mtime - time.time()) > DAY
    store.lookup(key, use=True)
    noted = manifest.stat().st_mtime
    assert abs(noted - time.time()) < 60
    store.lookup(key, use=True)
    assert manifest.stat().st_mtime == noted


def test_nothing_in_use_is_evicted_until_its_process_is_killed(store: Store) -> None:
    names = [publish(store, number, 10_000, age) for number, age in enumerate((9, 1))]
    process = used_elsewhere(store, names[0])
    try:
        upkeep.evict(store, 15_000)
        assert numbers(store) == {0}
        assert upkeep.evict(store, 1) == [] and numbers(store) == {0}
    finally:
        process.kill()
        process.wait()
    upkeep.evict(store, 1)
    assert numbers(store) == set() and list(store.layout.users.iterdir()) == []


def test_a_process_that_ends_takes_its_list_along_unless_its_children_share_it(store: Store) -> None:
    name = publish(store, 0)
    child = os.fork()
    if child == 0:
        users.mark(store.layout, name)
        grandchild = os.fork()
        if grandchild == 0:
            time.sleep(100)
        users.leave()
        kept = len(list(store.layout.users.iterdir()))
        os.kill(grandchild, 9)
        os.waitpid(grandchild, 0)
        users.mark(store.layout, name)
        users.leave()
        os._exit(10 * kept + len(list(store.layout.users.iterdir())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10


def test_children_by_fork_go_on_using_what_their_parent_used(store: Store) -> None:
    name = publish(store, 0, 10_000)
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        users.mark(store.layout, name)
        child = os.fork()
        if child == 0:
            time.sleep(100)
        os.write(writer, f"{child}\n".encode())
        os._exit(0)
    os.waitpid(parent, 0)
    child = int(os.read(reader, 100))
    try:
        assert upkeep.evict(store, 1) == []
    finally:
        os.kill(child, 9)
    deadline = time.monotonic() + 20
    while not upkeep.evict(store, 1):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_being_built_is_not_evicted(store: Store) -> None:
    names = [publish(store, number, 10_000, age) for number, age in enumerate((9, 1))]
    with store.lock(names[0]):
        upkeep.evict(store, 15_000)
    assert numbers(store) == {0}


def test_whoever_begins_to_use_waits_for_a_removal_and_then_sees_a_miss(store: Store) -> None:
    """Between the look at the entry and the look at the object, so a miss; not between that and the loading."""
    publish(store, 0)
    key = digest({"number": "0"})
    store.layout.locks.mkdir(exist_ok=True)
    held = lock.acquire(store.layout.locks / users.REMOVAL)
    assert held is not None
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(store.lookup(key, use=True)))
    reader.start()
    time.sleep(0.2)
    assert reader.is_alive()
    store.discard(digest({"object": "0"}))
    lock.release(held)
    reader.join(10)
    assert found == [None]


def test_two_do_not_remove_at_once(store: Store) -> None:
    publish(store, 0, 10_000)
    store.layout.locks.mkdir(exist_ok=True)
    held = lock.acquire(store.layout.locks / users.REMOVAL, shared=True)
    assert held is not None
    assert upkeep.evict(store, 1, seconds=0.1) == [] and numbers(store) == {0}
    lock.release(held)
    assert len(upkeep.evict(store, 1)) == 1


def test_builds_keep_the_cache_within_its_size_and_readers_and_builders_never_fail(
    fake_tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes build and read more kernels than fit, for a while; each always gets its kernel, and can load it."""
    monkeypatch.setenv(location.LIMIT_VARIABLE, "9000")
    monkeypatch.setattr(pipeline.emit, "render", lambda asked: files(asked.config.tile[1]))
    children = []
    for seed in range(4):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for step in range(12):
                    entry = pipeline.build(spec((seed + step * (seed + 1)) % 7))
                    time.sleep(0.002)
                    assert entry.library.read_bytes() == b"library\n"
                    # As a process that ends: what it used may go.
                    users.leave()
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
    store = Store(tmp_path / "cache")
    assert upkeep.verify(store) == []
    pipeline.build(spec(8))
    assert upkeep.total_bytes(store) <= 9000 and list(store.entries())


# verify, prune, clear -------------------------------------------------------------------------------------------------


def damage(store: Store) -> dict[str, Path]:
    """One of everything that may be wrong, beside the good object 0."""
    publish(store, 0)
    tampered, gone, orphan = publish(store, 1), publish(store, 2), publish(store, 3)
    (store.layout.objects / tampered / "kernel.so").write_bytes(b"x" * 1000)
    store.discard(gone)
    (store.entry_path(digest({"number": "3"}))).unlink()
    garbled = store.entry_path(digest({}))
    garbled.write_text("{")
    (abandoned := store.layout.work / f"{orphan}.abc").mkdir()
    (stale := store.lock_path(gone)).parent.mkdir(exist_ok=True)
    stale.touch()
    (dead := store.layout.users / "1.use").parent.mkdir(exist_ok=True)
    dead.write_text(tampered)
    failed = store.failed("kernel")
    failed.mkdir(parents=True)
    (failed / "kernel.cu").touch()
    old = time.time() - 8 * DAY
    os.utime(failed, (old, old))
    return {
        "tampered": store.layout.objects / tampered,
        "entry of tampered": store.entry_path(digest({"number": "1"})),
        "entry of gone": store.entry_path(digest({"number": "2"})),
        "orphan": store.layout.objects / orphan,
        "garbled": garbled,
        "abandoned": abandoned,
        "stale": stale,
        "dead": dead,
        "failed": failed,
    }


def strangers(store: Store) -> dict[Path, bytes]:
    """Files that the layout does not know, everywhere."""
    paths = [store.root / "notes", store.layout.entries / "README", store.layout.objects / "mine" / "x"]
    paths += [
        store.layout.work / "x" / "y",
        store.layout.locks / "x.lock",
        store.failed("mine") / "x",
        store.failed("z"),
    ]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
        os.utime(path.parent, (1, 1))
        os.utime(path, (1, 1))
    return {path: path.read_bytes() for path in paths}


def test_verify_names_what_is_broken_and_changes_nothing(store: Store) -> None:
    paths = damage(store)
    before = sorted(store.root.rglob("*"))
    found = {broken.path: broken.cause for broken in upkeep.verify(store)}
    assert found.keys() == {paths[name] for name in ("tampered", "entry of tampered", "entry of gone", "garbled")}
    assert "kernel.so has the wrong checksum" in found[paths["tampered"]]
    assert found[paths["entry of gone"]].endswith("is missing")
    assert sorted(store.root.rglob("*")) == before


def test_prune_removes_what_is_not_needed_and_nothing_else(store: Store) -> None:
    paths = damage(store)
    kept = strangers(store)
    recent = store.failed("recent")
    recent.mkdir()
    (recent / "kernel.cu").touch()
    removed = upkeep.prune(store, None)
    assert not any(path.exists() for path in paths.values())
    assert {item.path for item in removed} >= set(paths.values()) - {paths["dead"], paths["stale"]}
    assert numbers(store) == {0} and upkeep.verify(store) == [] and recent.exists()
    assert {path: path.read_bytes() for path in kept} == kept
    assert upkeep.prune(store, None) == []


def test_clear_removes_all_but_strangers_and_what_is_in_use(store: Store) -> None:
    damage(store)
    kept = strangers(store)
    used = publish(store, 4)
    users.mark(store.layout, used)
    building = publish(store, 5)
    with store.lock(building):
        cleared = upkeep.clear(store)
    assert numbers(store) == {4, 5}
    assert cleared.kept == sorted(store.layout.objects / name for name in (used, building))
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_good_entry_that_comes_while_a_broken_one_is_removed_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, 0)
    path = store.entry_path(digest({"number": "0"}))
    good = path.read_bytes()
    path.write_text("{")
    real = upkeep.rename

    def mended(source: Path, target: Path) -> None:
        if source == path:
            path.write_bytes(good)
        real(source, target)

    monkeypatch.setattr(upkeep, "rename", mended)
    assert upkeep.prune(store, None) == [] and numbers(store) == {0}


def test_upkeep_of_what_is_not_there(store: Store) -> None:
    assert upkeep.verify(store) == [] and upkeep.prune(store, 0) == [] and upkeep.evict(store, 0) == []
    assert upkeep.clear(store) == upkeep.Cleared([], []) and not store.root.exists()


def test_without_locks_nothing_is_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, 0)

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    assert upkeep.evict(store, 0) == []
    for work in (lambda: upkeep.prune(store, 0), lambda: upkeep.clear(store)):
        with pytest.raises(CacheError, match="No locks available"):
            work()
    assert numbers(store) == {0}


# The commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(fake_tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A cache with two kernels, and a pack with one."""
    monkeypatch.setattr(pipeline.emit, "render", lambda asked: files(asked.config.tile[1]))
    monkeypatch.setenv(location.ROOT_VARIABLE, str(tmp_path / "pack"))
    pipeline.build(spec(2))
    monkeypatch.setenv(location.ROOT_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(location.PACKS_VARIABLE, str(tmp_path / "pack"))
    for number in (0, 1):
        pipeline.build(spec(number))
    users.leave()
    return Store(tmp_path / "cache")


def out(capsys: Capture, *words: str, status: int = 0) -> str:
    assert main(["cache", *words]) == status
    return capsys.readouterr().out


def test_ls(kernels: Store, tmp_path: Path, capsys: Capture) -> None:
    text = out(capsys, "ls")
    assert main(["list"]) == 0 and capsys.readouterr().out == text
    assert text.count(spec(0).name) == 1
    assert re.search(
        rf"^2 kernels, \d KB, in {kernels.root}\n(?s:.)*^1 kernels, \d KB, in pack {tmp_path / 'pack'}$", text, re.M
    )
    rows = json.loads(out(capsys, "ls", "--json"))
    assert [row["kernel"] for row in rows] == [spec(number).name for number in (0, 1, 2)]
    assert [row["pack"] for row in rows] == [False, False, True]
    assert rows[0]["key"] == pipeline.kernel_key(spec(0)) and rows[0]["bytes"] > 100
    assert rows[0]["compiler"] == "nvcc 13.0.7, CUTLASS 4.2.0" and rows[0]["place"] == str(kernels.root)
    assert time.strptime(rows[0]["used"], "%Y-%m-%d")


def test_verify(kernels: Store, tmp_path: Path, capsys: Capture) -> None:
    assert "6 entries and objects in " in (text := out(capsys, "verify")) and text.endswith(": all intact\n")
    pipeline.find(spec(0)).library.write_bytes(b"LIBRARY\n")  # type: ignore[union-attr]
    next((tmp_path / "pack").rglob("build.json")).write_text("[]")
    lines = out(capsys, "verify", status=1).splitlines()
    assert len(lines) == 5 and lines[-1].endswith("4 are broken")
    assert sum("cache prune removes it" in line and str(kernels.root) in line for line in lines) == 2
    assert sum("install or copy the pack again" in line and str(tmp_path / "pack") in line for line in lines) == 2
    report = json.loads(out(capsys, "verify", "--json", status=1))
    assert report["checked"] == 6 and len(report["broken"]) == 4
    assert all(row.keys() == {"path", "cause", "remedy"} for row in report["broken"])


def test_prune(kernels: Store, tmp_path: Path, capsys: Capture) -> None:
    assert out(capsys, "prune") == f"0 removed, 0 KB freed, in {kernels.root}\n"
    pipeline.find(spec(0)).library.write_bytes(b"LIBRARY\n")  # type: ignore[union-attr]
    report = json.loads(out(capsys, "prune", "--json"))
    assert len(report["removed"]) == 2 and report["bytes"] > 100 and report["kept"] == []
    assert "over the limit" in out(capsys, "prune", "--limit", "0")
    assert len(list(kernels.entries())) == 0 and len(list((tmp_path / "pack").rglob("kernel.so"))) == 1
    assert main(["cache", "prune", "--limit", "much"]) == 1
    assert "--limit=much is no size" in capsys.readouterr().err


def test_clear_asks(kernels: Store, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["cache", "clear"]) == 1
    assert "2 kernels" in (error := capsys.readouterr().err) and "--yes" in error and len(list(kernels.entries())) == 2

    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return answers.pop()

    answers = ["y\n", "\n"]
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["cache", "clear"]) == 1 and len(list(kernels.entries())) == 2
    assert "[y/N]" in capsys.readouterr().err
    assert main(["cache", "clear"]) == 0 and list(kernels.entries()) == []


def test_clear_keeps_what_is_used(kernels: Store, capsys: Capture) -> None:
    pipeline.build(spec(0))
    assert "1 kernels are used by running processes" in out(capsys, "clear", "--yes")
    report = json.loads(out(capsys, "clear", "--yes", "--json"))
    assert report["removed"] == [] and len(report["kept"]) == 1
    assert pipeline.find(spec(0)) is not None and pipeline.find(spec(1)) is None


def test_a_use_is_listed_again_after_the_cache_was_deleted(kernels: Store) -> None:
    pipeline.build(spec(0))
    shutil.rmtree(kernels.root)
    assert pipeline.build(spec(0)).compiled
    assert len(upkeep.clear(kernels).kept) == 1
