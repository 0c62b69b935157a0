"""Every step of publishing fails in turn: the call succeeds or says one thing, and the cache is none the worse."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cutlass_w8a8 import counters, pipeline
from cutlass_w8a8.cache import chain, location, lock, temporary, upkeep, users
from cutlass_w8a8.cache import store as store_module
from cutlass_w8a8.cache.store import Store
from cutlass_w8a8.errors import CacheError, CompileError, UnwritableError, W8A8Error
from cutlass_w8a8.toolchain.nvcc import CompileResult
from cutlass_w8a8.toolchain.resources import Resources
from tests.fake_tools import FakeTools
from tests.stress import LIBRARY, files, spec

ROOT = Path(__file__).parents[2]
OLD, NEW = spec(0), spec(1)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.ENOLCK)


class Disk:
    """Counts what is done to the files under some directories, and has it fail from one event on."""

    def __init__(self, *roots: Path) -> None:
        self.roots = [str(root) for root in roots]
        self.events: list[str] = []
        self.first, self.last, self.error = sys.maxsize, sys.maxsize, errno.EIO

    def _concerns(self, target: object) -> str | None:
        try:
            path = str(Path(f"/proc/self/fd/{target}").readlink()) if isinstance(target, int) else os.fspath(target)  # type: ignore[call-overload]
        except (OSError, TypeError):
            return None
        return path if any(str(path).startswith(root) for root in self.roots) else None

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, **options: Any) -> Any:
            path = None if name == "open" and not arguments[0] & WRITING else self._concerns(target)
            if path is not None:
                number = len(self.events)
                self.events.append(f"{name} {path}")
                if self.first <= number <= self.last:
                    raise OSError(self.error, os.strerror(self.error), path)
            # Waiting for a real disk is all that these would add.
            return None if name == "fsync" else real(target, *arguments, **options)

        return call

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within this context, count and fail."""
        self.events.clear()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "write", "fsync", "rename", "replace", "mkdir", "chmod", "unlink", "utime"):
                patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            patch.setattr(fcntl, "flock", self._wrapped("flock", fcntl.flock))
            patch.setattr(store_module, "exchange", self._wrapped("exchange", store_module.exchange))
            yield


def fake_compile(sources: Any, flags: Any, toolkit: Any, headers: Any, workdir: Path, **options: Any) -> CompileResult:
    """A compiler that takes no time."""
    library = workdir / "kernel.so"
    library.write_bytes(LIBRARY)
    return CompileResult(library, 0.1, Resources(1, 0, 0, 0), "log\n", ("nvcc",))


def fresh_process() -> None:
    """Forget what a process remembers of the cache."""
    for path, _ in temporary._made:
        shutil.rmtree(path, ignore_errors=True)
    temporary._made.clear()
    users.leave()
    location._warned.clear()
    chain._fell_back = False


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if there is such a place: these tests make and remove directories by the ten thousand."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="w8a8-test-", dir=memory) as folder:
        yield Path(folder)


@pytest.fixture
def cache(fake_tools: Any, fast: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A cache with one good entry, and a temporary folder of its own."""
    monkeypatch.setattr(pipeline, "compile_kernel", fake_compile)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(pipeline.emit, "render", lambda asked: files(asked.config.tile[1]))
    (fast / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(fast / "tmp"))
    monkeypatch.setenv(location.ROOT_VARIABLE, str(fast / "cache"))
    fresh_process()
    assert pipeline.build(OLD).compiled
    yield Store(fast / "cache")
    fresh_process()


@contextmanager
def copied(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The cache as it was, for one experiment."""
    with tempfile.TemporaryDirectory(dir=store.root.parent) as folder:
        copy = Path(folder) / "cache"
        shutil.copytree(store.root, copy, ignore=shutil.ignore_patterns("*.use"))
        monkeypatch.setenv(location.ROOT_VARIABLE, str(copy))
        fresh_process()
        yield Store(copy)


def attempt(work: Callable[[], Any]) -> tuple[Any, W8A8Error | None]:
    """What ``work`` gives, or the one error it may raise."""
    try:
        return work(), None
    except W8A8Error as error:
        return None, error


def unsupported(one: Path, other: Path) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


def good(entry: pipeline.Entry | None) -> bool:
    return entry is not None and entry.library.read_bytes() == LIBRARY


def events_of(work: Callable[[], Any], store: Store, *others: Path) -> list[str]:
    disk = Disk(store.root, *others)
    with disk.watched():
        work()
    return list(disk.events)


def every_fault(
    store: Store, monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any], kinds: tuple[bool, ...] = (False, True)
) -> Iterator[tuple[Disk, Store]]:
    """Each event of ``work`` fails, with each error: once (False) and from then on (True)."""
    with copied(store, monkeypatch) as copy:
        events = events_of(work, copy)
    names = {event.split()[0] for event in events}
    assert {"open", "mkdir"} <= names
    for error in ERRORS:
        for lasting in kinds:
            for number in range(len(events)):
                with copied(store, monkeypatch) as copy:
                    disk = Disk(copy.root)
                    disk.error, disk.first, disk.last = error, number, sys.maxsize if lasting else number
                    yield disk, copy


def test_publishing_takes_the_steps_that_are_made_to_fail(cache: Store) -> None:
    events = events_of(lambda: pipeline.build(NEW), cache)
    assert {event.split()[0] for event in events} == {
        "open",
        "write",
        "fsync",
        "rename",
        "mkdir",
        "chmod",
        "flock",
        "unlink",
    }
    # Files and directories of the object, the entry, and the directories that list them.
    assert sum(event.startswith("fsync") for event in events) >= 8
    assert sum(event.startswith("rename") for event in events) == 2


def test_a_build_survives_every_fault(cache: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for disk, store in every_fault(cache, monkeypatch, lambda: pipeline.build(NEW)):
        compiles = counters.stats.compiles
        with disk.watched():
            assert good(pipeline.build(NEW)), disk.events
            # The same process never compiles the same again.
            assert good(pipeline.build(NEW)), disk.events
        assert counters.stats.compiles == compiles + 1, disk.events
        assert upkeep.verify(store) == [], disk.events
        assert good(pipeline.find(OLD)), disk.events
        fresh_process()
        assert good(pipeline.build(NEW)), disk.events
        entry = pipeline.find(NEW)
        assert entry is not None and entry.directory.is_relative_to(store.root), disk.events


@pytest.mark.parametrize("exchange", [True, False])
def test_a_forced_build_loses_nothing_to_any_fault(
    cache: Store, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """Nor where directories cannot change places, unless the disk fails for good just between two renames."""
    if not exchange:
        monkeypatch.setattr(store_module, "exchange", unsupported)
    kinds = (False, True) if exchange else (False,)
    for disk, store in every_fault(cache, monkeypatch, lambda: pipeline.build(OLD, force=True), kinds):
        with disk.watched():
            assert good(pipeline.build(OLD, force=True)), disk.events
        fresh_process()
        assert upkeep.verify(store) == [], disk.events
        assert good(pipeline.find(OLD)), disk.events


def test_a_broken_object_is_replaced_or_the_call_served_otherwise(
    cache: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Store(cache.root).lookup(pipeline.kernel_key(OLD)).library  # type: ignore[union-attr]
    library.write_bytes(b"broken\n")
    for disk, store in every_fault(cache, monkeypatch, lambda: pipeline.build(OLD)):
        with disk.watched():
            assert good(pipeline.build(OLD)), disk.events
        fresh_process()
        assert good(pipeline.build(OLD)), disk.events
        assert upkeep.verify(store) == [], disk.events


def test_an_explicit_build_that_cannot_be_kept_is_one_error(cache: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 0
    for disk, store in every_fault(cache, monkeypatch, lambda: pipeline.build(NEW, explicit=True)):
        with disk.watched():
            entry, error = attempt(lambda: pipeline.build(NEW, explicit=True))
        if error is None:
            assert entry.directory.is_relative_to(store.root) and good(entry)
        else:
            failures += 1
            assert str(store.root) in str(error) and location.ROOT_VARIABLE in str(error), error
        assert upkeep.verify(store) == [], disk.events
    assert failures


def test_with_the_temporary_folder_gone_too_it_is_one_error(cache: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 0
    folder = Path(tempfile.gettempdir())
    for disk, store in every_fault(cache, monkeypatch, lambda: pipeline.build(NEW)):
        disk.roots.append(str(folder))
        with disk.watched():
            entry, error = attempt(lambda: pipeline.build(NEW))
        if error is None:
            assert good(entry)
        else:
            failures += 1
            assert str(store.root) in str(error) and "TMPDIR" in str(error), error
        assert upkeep.verify(store) == [], disk.events
        assert good(pipeline.find(OLD)), disk.events
    assert failures


@pytest.mark.parametrize("limit", [None, 1])
def test_upkeep_loses_nothing_to_any_fault(cache: Store, monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    pipeline.build(NEW)
    (cache.layout.objects / ("f" * 64)).mkdir()
    (cache.layout.entries / ("e" * 64 + ".json")).write_text("{")
    (cache.layout.work / ("d" * 64 + ".x")).mkdir()
    for disk, store in every_fault(cache, monkeypatch, lambda: upkeep.prune(Store(location.cache_root()), limit)):
        with disk.watched():
            _, error = attempt(lambda store=store: upkeep.prune(store, limit))
        assert error is None or str(store.root) in str(error)
        upkeep.prune(store, limit)
        assert upkeep.verify(store) == [], disk.events
        assert limit is not None or (good(pipeline.find(OLD)) and good(pipeline.find(NEW))), disk.events
        assert good(pipeline.build(OLD)) and good(pipeline.build(NEW)), disk.events


# Disks that fill up ---------------------------------------------------------------------------------------------------


def test_files_that_end_at_any_byte(cache: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """RLIMIT_FSIZE has every file end after so many bytes, in the temporary folder as well."""

    def child() -> int:
        limits = [*range(0, 80, 7), *range(80, 2000, 61)]
        served = 0
        for limit in limits:
            with copied(cache, monkeypatch) as store:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                try:
                    entry, _ = attempt(lambda: pipeline.build(NEW))
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                assert entry is None or good(entry)
                served += entry is not None
                assert upkeep.verify(store) == []
                assert good(pipeline.find(OLD))
        return 0 if 0 < served < len(limits) else 1

    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = child()
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def fill(folder: Path, tools: Path) -> None:
    """On a small file system at ``folder``: build with ever more pages free; runs in a process of its own."""
    fake = FakeTools(tools)
    os.environ |= {**fake.environment, location.ROOT_VARIABLE: str(folder / "cache"), location.PACKS_VARIABLE: "none"}
    page = os.sysconf("SC_PAGE_SIZE")
    kept = 0
    with mock.patch.object(pipeline.emit, "render", lambda asked: files(asked.config.tile[1])):
        assert pipeline.build(OLD).directory.is_relative_to(folder)
        filler = folder / "filler"
        for free in range(60):
            status = os.statvfs(folder)
            filler.write_bytes(bytes(max(0, status.f_bavail - free) * page))
            entry = pipeline.build(NEW)
            assert good(entry), free
            kept += entry.directory.is_relative_to(folder)
            filler.unlink()
            store = Store(folder / "cache")
            assert upkeep.verify(store) == [], free
            fresh_process()
            assert good(pipeline.find(OLD)), free
            assert good(pipeline.build(NEW)), free
            assert pipeline.find(NEW).directory.is_relative_to(folder)  # type: ignore[union-attr]
            store.remove(pipeline.kernel_key(NEW))
    print(f"kept {kept} of 60")
    assert 0 < kept < 60


def test_a_disk_that_is_full_after_any_page(fake_tools: Any, tmp_path: Path) -> None:
    fake_tools.write()
    folder = tmp_path / "small"
    folder.mkdir()
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path; "
        f"from tests.unit.test_cache_faults import fill; fill(Path({str(folder)!r}), Path({str(fake_tools.root)!r}))"
    )
    mount = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=1m none "{folder}" && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system to fill up")
    done = subprocess.run(
        [*mount, sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Particular faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOTSUP, errno.ESTALE, errno.ENOSYS])
def test_without_locks_kernels_are_published_all_the_same(
    cache: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    real = fcntl.flock

    def refuse(descriptor: int, operation: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(cache.root):
            raise OSError(error, os.strerror(error))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    for kernel in (NEW, spec(2)):
        entry = pipeline.build(kernel)
        assert entry.compiled and entry.directory.is_relative_to(cache.root)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2 and all("without the lock" in text and os.strerror(error) in text for text in warnings)


@pytest.mark.parametrize("writable", [True, False])
def test_with_locks_refused_everywhere_kernels_are_served(
    cache: Store, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    if not writable:
        monkeypatch.setenv(location.ROOT_VARIABLE, "/dev/null/cache")
    entry = pipeline.build(NEW)
    assert good(entry) and entry.compiled and entry.directory.is_relative_to(cache.root) is writable
    assert not pipeline.build(NEW).compiled


def test_whoever_holds_a_lock_for_ever_does_not_hold_up_others_for_ever(
    cache: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_COMPILE_TIMEOUT", "0.1")
    monkeypatch.setattr(pipeline, "_PATIENCE_SECONDS", 0.1)
    acquired = []
    monkeypatch.setattr(chain.Chain, "adopt", lambda self, *_: acquired.append(held()) or None)

    def held() -> bool:
        return any(path.suffix == ".lock" for path in cache.layout.locks.iterdir())

    # A process that was stopped in the middle: find out the lock's name, and hold it.
    pipeline.build(NEW)
    (digest_of_new,) = {path.name for path in cache.layout.objects.iterdir()} - {
        pipeline.find(OLD).directory.name  # type: ignore[union-attr]
    }
    cache.remove(pipeline.kernel_key(NEW))
    with cache.lock(digest_of_new):
        assert pipeline.build(NEW).directory.is_relative_to(cache.root)
    assert "has been held by others" in caplog.text and acquired == [True, True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("explicit", [False, True])
def test_a_read_only_cache_serves_and_what_is_new_goes_elsewhere(
    fake_tools: Any, tmp_path: Path, explicit: bool
) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from unittest import mock
from cutlass_w8a8 import pipeline, stats
from cutlass_w8a8.errors import CacheError
from tests.stress import files, spec
with mock.patch.object(pipeline.emit, "render", lambda asked: files(asked.config.tile[1])):
    assert not pipeline.build(spec(0)).compiled
    if {explicit}:
        try:
            pipeline.build(spec(1), explicit=True)
        except CacheError as error:
            print(error)
    else:
        entry = pipeline.build(spec(1))
        again = pipeline.build(spec(1))
        assert entry.compiled and not again.compiled and again.directory == entry.directory
        folder = entry.directory.parents[2]
        assert folder.name.startswith("cutlass_w8a8-") and folder.stat().st_mode & 0o777 == 0o700
        assert stats().temporary == stats().compiles == 1, stats()
        print(folder)
"""
    with mock.patch.object(pipeline.emit, "render", lambda asked: files(asked.config.tile[1])):
        cached = pipeline.build(OLD)
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    mount = ["unshare", "-rm", "sh", "-c", script, str(tmp_path / "cache")]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system read-only")
    before = snapshot(tmp_path / "cache")
    done = subprocess.run(
        [*mount, sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert snapshot(tmp_path / "cache") == before and good(cached)
    if explicit:
        assert "Read-only file system" in done.stdout and location.ROOT_VARIABLE in done.stdout
    else:
        # One warning, and nothing left.
        assert done.stderr.count("cannot take") == 1 and "Read-only file system" in done.stderr
        assert not Path(done.stdout.strip()).exists()


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(root)): (path.lstat().st_mtime_ns, path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_a_user_without_home(cache: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(location.ROOT_VARIABLE)
    monkeypatch.setattr(location.platformdirs, "user_cache_path", lambda name: Path("~") / ".cache" / name)
    with pytest.raises(UnwritableError, match=r"no home directory.*set CUTLASS_W8A8_CACHE_DIR"):
        location.cache_root()
    assert pipeline.find(NEW) is None
    entry = pipeline.build(NEW)
    assert good(entry) and pipeline.build(NEW).directory == entry.directory and pipeline.find(NEW) is not None
    assert caplog.text.count("no home directory") == 1
    with pytest.raises(CacheError, match="no home directory"):
        pipeline.build(spec(2), explicit=True)


def test_a_home_out_of_reach(cache: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As below a directory that only root may enter."""
    real = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.is_relative_to("/closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, **options)

    def open_(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).startswith("/closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_open(path, *arguments, **options)

    def mkdir(path: Any, mode: int = 0o777, **options: Any) -> None:
        if str(path).startswith("/closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        real_mkdir(path, mode, **options)

    real_mkdir, real_open = os.mkdir, os.open
    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setenv(location.ROOT_VARIABLE, "/closed/cache")
    assert pipeline.find(NEW) is None
    assert good(pipeline.build(NEW))
    with pytest.raises(CacheError, match="/closed/cache cannot be created"):
        pipeline.build(spec(2), explicit=True)


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EPERM])
def test_directories_that_cannot_be_renamed_are_replaced_where_they_are(
    cache: Store, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """As on overlay file systems, for what comes from a lower layer."""
    entry = pipeline.find(OLD)
    assert entry is not None
    entry.library.write_bytes(b"broken\n")
    lower = entry.directory.stat().st_ino
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        if Path(source).stat().st_ino == lower:
            raise OSError(error, os.strerror(error))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    again = pipeline.build(OLD)
    assert again.compiled and good(again) and again.directory.is_relative_to(cache.root)
    assert upkeep.verify(cache) == []


def test_a_compiler_let_down_by_the_disk_runs_again_elsewhere(
    cache: Store, monkeypatch: pytest.MonkeyPatch, fast: Path
) -> None:
    tried = []

    def compile_(
        sources: Any, flags: Any, toolkit: Any, headers: Any, workdir: Path, *, keep: Path, seconds: float
    ) -> Any:
        tried.append(workdir)
        if workdir.is_relative_to(cache.root):
            raise CompileError("failed", command="nvcc", log="ld: final link: No space left on device", source=keep)
        return fake_compile(sources, flags, toolkit, headers, workdir)

    monkeypatch.setattr(pipeline, "compile_kernel", compile_)
    assert good(pipeline.build(NEW))
    assert len(tried) == 2 and tried[1].is_relative_to(fast / "tmp")

    def wrong(*arguments: Any, **options: Any) -> Any:
        raise CompileError("failed", command="nvcc", log="error: expected a ;", source=fast)

    monkeypatch.setattr(pipeline, "compile_kernel", wrong)
    with pytest.raises(CompileError):
        pipeline.build(spec(2))


def test_a_lock_file_that_changes_all_the_time_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    with pytest.raises(lock.NoLocksError, match="another file each time"):
        lock.acquire(tmp_path / "x.lock", seconds=60)


def test_warnings_come_once(cache: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(location.ROOT_VARIABLE, "/proc/nowhere")
    for kernel in (NEW, spec(2), spec(3), NEW):
        assert good(pipeline.build(kernel))
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "/proc/nowhere" in warnings[0].getMessage()
    assert location.ROOT_VARIABLE in warnings[0].getMessage()
