"""Packs: read-only caches that are searched besides one's own, from a variable and from installed wheels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cutlass_w8a8
from cutlass_w8a8 import counters, pipeline
from cutlass_w8a8.cache import location
from cutlass_w8a8.errors import ArgumentError, CacheError
from tests.stress import files, spec

PACKED, OTHER = spec(0), spec(1)
Log = pytest.LogCaptureFixture


@pytest.fixture
def pack(fake_tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack with one kernel, and a cache that is empty and counted anew."""
    monkeypatch.setattr(pipeline.emit, "render", lambda asked: files(asked.config.tile[1]))
    monkeypatch.setenv(location.ROOT_VARIABLE, str(tmp_path / "packs" / "one"))
    pipeline.build(PACKED)
    monkeypatch.setenv(location.ROOT_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(counters, "stats", counters.Stats())
    location._advertised.cache_clear()
    fake_tools.write(device="echo compiled >> ../../../../compiled")
    return tmp_path / "packs" / "one"


def state(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything about the files and directories under ``root`` that a writer would change."""
    return {
        str(path.relative_to(root)): (
            path.stat().st_mtime_ns,
            path.stat().st_ctime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in (root, *sorted(root.rglob("*")))
    }


def test_a_named_pack_serves_and_is_never_written(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(location.PACKS_VARIABLE, str(pack))
    monkeypatch.setenv(pipeline.JIT_VARIABLE, "off")
    # So old that a cache would note the day.
    for path in pack.rglob("build.json"):
        os.utime(path, (1, 1))
    before = state(pack)
    for entry in (pipeline.build(PACKED), pipeline.find(PACKED)):
        assert entry is not None and entry.directory.is_relative_to(pack) and not entry.compiled
    assert state(pack) == before and not (tmp_path / "cache").exists()
    assert counters.snapshot() == counters.Stats(lookups=2, hits=2, pack_hits=2)
    with pytest.raises(CacheError, match=rf"not in the cache {pack} or {tmp_path / 'cache'}, and CUTLASS_W8A8_JIT=off"):
        pipeline.build(OTHER)
    monkeypatch.delenv(pipeline.JIT_VARIABLE)
    assert pipeline.build(OTHER).directory.is_relative_to(tmp_path / "cache")
    assert state(pack) == before


def test_packs_go_first_in_their_order(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = pipeline.build(PACKED)
    assert own.compiled
    other = Path(shutil.copytree(pack, tmp_path / "packs" / "two"))
    monkeypatch.setenv(location.PACKS_VARIABLE, f"{other}{os.pathsep}{os.pathsep}{pack}")
    assert pipeline.build(PACKED).directory.is_relative_to(other)
    shutil.rmtree(other / "v1" / "entries")
    assert pipeline.build(PACKED).directory.is_relative_to(pack)
    monkeypatch.setenv(location.PACKS_VARIABLE, "none")
    assert pipeline.build(PACKED).directory == own.directory


def test_what_was_forced_goes_before_packs(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(location.PACKS_VARIABLE, str(pack))
    forced = pipeline.build(PACKED, force=True)
    assert forced.compiled and not forced.directory.is_relative_to(pack)
    assert pipeline.build(PACKED).directory == forced.directory
    assert pipeline.find(PACKED).directory == forced.directory  # type: ignore[union-attr]


def test_an_object_in_a_pack_serves_another_key(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(location.PACKS_VARIABLE, str(pack))
    monkeypatch.setattr(pipeline.emit, "digest", lambda: "edited")
    before = state(pack)
    entry = pipeline.build(PACKED)
    assert not entry.compiled and entry.directory.is_relative_to(tmp_path / "cache")
    assert (counters.stats.compiles, counters.stats.reused) == (0, 1)
    monkeypatch.setenv(location.PACKS_VARIABLE, "")
    assert pipeline.find(PACKED) is not None and state(pack) == before


DAMAGE: dict[str, Callable[[Path], object]] = {
    "library": lambda pack: next(pack.rglob("kernel.so")).write_bytes(b"tampered"),
    "library cut off": lambda pack: next(pack.rglob("kernel.so")).write_bytes(b""),
    "entry": lambda pack: next(pack.glob("v1/entries/*.json")).write_text("{}"),
    "manifest": lambda pack: next(pack.rglob("build.json")).unlink(),
    "pipe": lambda pack: (next(pack.rglob("kernel.cu")).unlink(), os.mkfifo(pack / "fifo"),
                          (pack / "fifo").rename(next(pack.glob("v1/objects/*")) / "kernel.cu")),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_broken_entry_of_a_pack_is_a_miss_with_a_warning(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log, name: str
) -> None:
    monkeypatch.setenv(location.PACKS_VARIABLE, str(pack))
    DAMAGE[name](pack)
    entry = pipeline.build(PACKED)
    # Without its entry the object is as good as ever, and found by what it was compiled from.
    assert entry.compiled is (name != "entry") and entry.directory.is_relative_to(tmp_path / "cache")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(str(pack) in text for text in warnings)
    assert counters.stats.pack_hits == 0


def test_packs_that_cannot_be_used_are_left_out_with_one_warning(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(location.PACKS_VARIABLE, os.pathsep.join(map(str, (tmp_path / "no", tmp_path / "file", pack))))
    for _ in range(3):
        assert pipeline.build(PACKED).directory.is_relative_to(pack)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2 and all("is left out: it is no directory" in text for text in warnings)


@pytest.mark.parametrize("value", ["packs/one", "/here:there"])
def test_relative_packs_are_refused(pack: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(location.PACKS_VARIABLE, value)
    with pytest.raises(ArgumentError, match=r"CUTLASS_W8A8_PACKS names .*, a relative path.*give absolute paths"):
        pipeline.build(PACKED)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("place", ["", "v1/objects", "library"])
def test_packs_of_other_users_are_not_loaded(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "cache").mkdir()
    os.chown(next(pack.rglob("kernel.so")) if place == "library" else pack / place, 4242, 4242)
    monkeypatch.setenv(location.PACKS_VARIABLE, str(pack))
    monkeypatch.setattr(os, "geteuid", lambda: 5353)
    assert pipeline.find(PACKED) is None
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert pipeline.find(PACKED) is not None


# Installed packs ------------------------------------------------------------------------------------------------------


def install(site: Path, pack: Path, name: str = "kernels", value: str = "w8a8_kernels_test.data") -> None:
    """What a wheel with a pack leaves in site-packages: a package that must not be imported, and an entry point."""
    package = site / "w8a8_kernels_test"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise SystemError('imported')\n")
    shutil.copytree(pack, package / "data", dirs_exist_ok=True)
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{location.PACKS_GROUP}]\n{name} = {value}\n")


def test_installed_packs_serve_without_being_imported(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    install(site, pack)
    monkeypatch.syspath_prepend(str(site))
    before = state(site)
    entry = pipeline.build(PACKED)
    assert entry.directory.is_relative_to(site / "w8a8_kernels_test" / "data") and not entry.compiled
    assert "w8a8_kernels_test" not in sys.modules and state(site) == before
    assert counters.stats.pack_hits == 1
    monkeypatch.setenv(location.PACKS_VARIABLE, "none")
    assert pipeline.build(PACKED).compiled


def test_installed_packs_are_looked_for_on_a_miss_only_and_once(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(location, "entry_points", lambda group: looked.append(group) or [])
    monkeypatch.setenv(location.PACKS_VARIABLE, str(pack))
    assert pipeline.build(PACKED) is not None and looked == []
    assert pipeline.build(OTHER).compiled and looked == [location.PACKS_GROUP]
    assert pipeline.build(spec(2)).compiled and not pipeline.build(OTHER).compiled and len(looked) == 1


def test_wheels_whose_pack_is_missing_are_left_out_with_a_warning(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log
) -> None:
    site = tmp_path / "site"
    install(site, pack)
    install(site, pack, "absent", "no_such_package_at_all")
    install(site, pack, "vanished", "w8a8_kernels_test.nothing")
    monkeypatch.syspath_prepend(str(site))
    assert pipeline.build(PACKED).directory.is_relative_to(site)
    assert pipeline.find(OTHER) is None
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2 and all("reinstall its wheel" in text for text in warnings)
    assert "no_such_package_at_all" in warnings[0] and "w8a8_kernels_test.nothing" in warnings[1]


def test_importing_the_package_looks_for_no_packs(tmp_path: Path) -> None:
    code = (
        "import importlib.metadata, sys\n"
        "def refuse(**options):\n"
        "    assert options.get('group') != 'cutlass_w8a8.packs', 'looked up'\n"
        "    return real(**options)\n"
        "real, importlib.metadata.entry_points = importlib.metadata.entry_points, refuse\n"
        "import cutlass_w8a8\n"
        "print(cutlass_w8a8.stats())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(cutlass_w8a8.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Stats(lookups=0, hits=0,")
