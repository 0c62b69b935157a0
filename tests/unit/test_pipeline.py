"""From spec to library: what changes the key, when the compiler runs, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import cutlass_w8a8
from cutlass_w8a8 import counters, pipeline
from cutlass_w8a8.arch import SM80, SM90
from cutlass_w8a8.cache import location, shelf
from cutlass_w8a8.cache.location import Layout
from cutlass_w8a8.config import CONFIG_FIELDS, KernelConfig, Raster, Schedule, Scheduler
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ArgumentError, CacheError, CompileError, ToolchainError
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.pipeline import build, find, kernel_key, key_fields
from cutlass_w8a8.spec import KernelSpec
from cutlass_w8a8.toolchain import discover, headers
from cutlass_w8a8.toolchain.flags import Flags

SPEC = KernelSpec(
    arch=SM90,
    operand=DType.E4M3,
    out=DType.BF16,
    epilogue=EpilogueSpec.of(),
    config=KernelConfig((128, 128, 128), Schedule.PINGPONG),
)


@pytest.fixture
def tools(fake_tools: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fake compilers, a fake emitter, fresh counters."""
    monkeypatch.setattr(pipeline.emit, "digest", lambda: "emitter")
    monkeypatch.setattr(
        pipeline.emit, "render", lambda spec: {"kernel.cu": f"// {spec.name}\n", "stubs/cutlass/arch/wmma.h": ""}
    )
    monkeypatch.setattr(counters, "stats", counters.Stats())
    return fake_tools


# The key ------------------------------------------------------------------------------------------------------------

SPEC_CHANGES: dict[str, object] = {
    "arch": SM80,
    "operand": DType.INT8,
    "out": DType.FP16,
    "epilogue": EpilogueSpec.of(bias=True),
    "config": replace(SPEC.config, tile=(64, 128, 128)),
}
CONFIG_CHANGES: dict[str, object] = {
    "tile": (128, 256, 128),
    "schedule": Schedule.COOPERATIVE,
    "cluster": (2, 1),
    "warp": (64, 64, 64),
    "stages": 3,
    "swap_ab": True,
    "scheduler": Scheduler.STREAM_K,
    "fast_accum": False,
    "slices": 2,
}
LAUNCH_CHANGES: dict[str, object] = {"splits": 2, "swizzle": 4, "raster": Raster.ALONG_N}


def test_tables_name_every_field() -> None:
    assert {field.name for field in fields(KernelSpec)} == SPEC_CHANGES.keys()
    assert set(CONFIG_FIELDS) == CONFIG_CHANGES.keys() | LAUNCH_CHANGES.keys()
    assert set(key_fields(SPEC)) == {"schema", "version", "spec", "formula", "emitter", "flags", "headers"}


@pytest.mark.parametrize("name", SPEC_CHANGES)
def test_spec_fields_change_the_key(tools: Any, name: str) -> None:
    assert kernel_key(replace(SPEC, **{name: SPEC_CHANGES[name]})) != kernel_key(SPEC)


@pytest.mark.parametrize("name", CONFIG_CHANGES)
def test_config_fields_change_the_key(tools: Any, name: str) -> None:
    config = replace(SPEC.config, **{name: CONFIG_CHANGES[name]})
    assert kernel_key(replace(SPEC, config=config)) != kernel_key(SPEC)


@pytest.mark.parametrize("name", LAUNCH_CHANGES)
def test_launch_choices_share_the_key(tools: Any, name: str) -> None:
    config = replace(SPEC.config, **{name: LAUNCH_CHANGES[name]})
    assert kernel_key(replace(SPEC, config=config)) == kernel_key(SPEC)


def test_epilogue_choices_change_the_key(tools: Any) -> None:
    specs = [
        replace(SPEC, operand=DType.INT8, epilogue=EpilogueSpec.of(scale_a, scale_b, azp, bias))
        for scale_a in ("tensor", "token")
        for scale_b in ("tensor", "channel")
        for azp in ("none", "tensor", "token")
        for bias in (False, True)
    ]
    assert len({kernel_key(spec) for spec in specs}) == len(specs) == 24


@pytest.mark.parametrize(
    "name", ["schema", "version", "emitter", "headers", "flags device", "flags host", "flags link"]
)
def test_everything_else_changes_the_key(tools: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = kernel_key(SPEC)
    flags = pipeline.flags_for(SPEC)
    if name == "headers":
        tools.write_headers("edited")
        headers._read.cache_clear()
    elif name.startswith("flags"):
        half = name.split()[1]
        changed: Flags = replace(flags, **{half: (*getattr(flags, half), "-g")})
        monkeypatch.setattr(pipeline, "flags_for", lambda spec: changed)
    else:
        target = {
            "schema": (pipeline, "SCHEMA"),
            "version": (pipeline, "VERSION"),
            "emitter": (pipeline.emit, "digest"),
        }
        value = (lambda: "edited") if name == "emitter" else "edited"
        monkeypatch.setattr(*target[name], value)
    assert kernel_key(SPEC) != before


def test_key_is_the_same_in_another_process(fake_tools: Any, tmp_path: Path) -> None:
    code = (
        "import sys; from cutlass_w8a8.pipeline import kernel_key; from cutlass_w8a8.spec import KernelSpec; "
        "print(kernel_key(KernelSpec.from_json(sys.argv[1])))"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = shutil.copytree(fake_tools.cutlass, tmp_path / "moved")
    environment = {
        "PYTHONPATH": str(Path(cutlass_w8a8.__file__).parents[1]),
        "HOME": str(elsewhere),
        "PATH": "",
        "PYTHONHASHSEED": "7",
        "CUTLASS_W8A8_CUTLASS_DIR": str(moved),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, SPEC.to_json()],
        cwd=elsewhere,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == kernel_key(SPEC)
    assert os.listdir(elsewhere) == []


# Building -----------------------------------------------------------------------------------------------------------


def test_build_once_then_hit(tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    assert find(SPEC) is None
    first = build(SPEC)
    assert first.compiled and first.key == kernel_key(SPEC)
    assert first.library.read_text() == "library\n"
    assert first.source.read_text() == f"// {SPEC.name}\n"
    for again in (build(SPEC), find(SPEC)):
        assert again is not None and not again.compiled and again.library == first.library
    assert len(tools.calls) == 1
    assert counters.stats.compile_seconds > 0
    assert replace(counters.stats, compile_seconds=0) == counters.Stats(lookups=4, hits=2, compiles=1)
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "cache"])


def test_manifest_says_what_was_built_and_how(tools: Any, tmp_path: Path) -> None:
    entry = build(SPEC)
    manifest = entry.manifest
    assert manifest["name"] == SPEC.name
    assert KernelSpec.from_json(entry.fields["spec"]) == SPEC
    assert manifest["nvcc"]["version"] == "13.0.7"
    assert "release 13.0" in manifest["nvcc"]["identity"]
    assert manifest["cxx"]["identity"] == "g++ 12.2.0\n"
    assert manifest["headers"] == {"digest": headers.headers_digest(), "version": "4.2.0"}
    assert manifest["resources"] == {"registers": 168, "stack": 16, "spill_stores": 4, "spill_loads": 8}
    assert manifest["commands"][0].startswith("$NVCC -fatbin")
    assert manifest["seconds"] > 0 and manifest["created"]
    everything = b"".join(path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert str(tmp_path).encode() not in everything


def test_reading_needs_no_tools(tools: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = build(SPEC)
    shutil.move(tmp_path / "cache", tmp_path / "copied")
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", str(tmp_path / "copied"))
    monkeypatch.setenv("CUTLASS_W8A8_JIT", "off")
    monkeypatch.setenv("PATH", "")
    for path in (tools.nvcc, tools.cxx):
        path.unlink()
    discover._find.cache_clear()
    monkeypatch.setattr(pipeline.emit, "render", lambda spec: pytest.fail("rendered on a hit"))
    entry = build(SPEC)
    assert not entry.compiled
    assert entry.library.relative_to(tmp_path / "copied") == built.library.relative_to(tmp_path / "cache")


def test_missing_tools_name_the_kernel_and_the_command(tools: Any) -> None:
    tools.nvcc.unlink()
    with pytest.raises(ToolchainError) as caught:
        build(SPEC)
    for part in (SPEC.name, "CUTLASS_W8A8_NVCC=", SPEC.command("build")):
        assert part in str(caught.value)


def test_too_old_toolkit_never_compiles(tools: Any) -> None:
    tools.write(version="11.8")
    with pytest.raises(ToolchainError, match=r"need CUDA 12\.0"):
        build(SPEC)
    assert tools.calls == []


def test_emitter_edit_that_changes_no_text_does_not_compile(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(SPEC)
    monkeypatch.setattr(pipeline.emit, "digest", lambda: "edited")
    second = build(SPEC)
    assert second.key != first.key and second.library == first.library and not second.compiled
    assert (len(tools.calls), counters.stats.reused) == (1, 1)
    monkeypatch.setattr(pipeline.emit, "digest", lambda: "edited again")
    monkeypatch.setattr(pipeline.emit, "render", lambda spec: {"kernel.cu": "// other text\n"})
    third = build(SPEC)
    assert third.compiled and third.library != first.library
    assert len(tools.calls) == 2


@pytest.mark.parametrize("changed", [{"version": "13.5"}, {"cxx_version": "g++ 14"}])
def test_another_compiler_rebuilds_only_when_forced(tools: Any, changed: dict[str, str]) -> None:
    first = build(SPEC)
    tools.write(link="echo other > kernel.so; exit 0", **changed)
    discover._find.cache_clear()
    again = build(SPEC)
    assert (again.library, again.compiled) == (first.library, False)
    assert again.library.read_text() == "library\n"
    forced = build(SPEC, force=True)
    assert (forced.key, forced.compiled) == (first.key, True)
    assert forced.library.read_text() == "other\n"
    identities = {name: forced.manifest[name]["identity"] for name in ("nvcc", "cxx")}
    assert identities != {name: first.manifest[name]["identity"] for name in ("nvcc", "cxx")}
    assert len(tools.calls) == 2


def test_an_object_of_another_compiler_serves_a_new_emitter(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(SPEC)
    monkeypatch.setattr(pipeline.emit, "digest", lambda: "edited")
    tools.write(version="13.5")
    discover._find.cache_clear()
    assert build(SPEC).library == first.library
    assert counters.stats.reused == 1


def test_force_replaces_the_object(tools: Any) -> None:
    first = build(SPEC)
    tools.write(link="echo again > kernel.so; exit 0")
    second = build(SPEC, force=True)
    assert second.directory == first.directory and second.library.read_text() == "again\n"


def test_broken_library_is_compiled_again(tools: Any) -> None:
    build(SPEC).library.write_text("broken!\n")
    assert find(SPEC) is None
    again = build(SPEC)
    assert again.compiled and again.library.read_text() == "library\n"
    assert len(tools.calls) == 2


def test_threads_compile_once(tools: Any) -> None:
    tools.write(device="sleep 0.2")
    entries = []
    threads = [threading.Thread(target=lambda: entries.append(build(SPEC))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(tools.calls) == 1
    assert sorted(entry.compiled for entry in entries) == [False, False, False, True]
    assert (counters.stats.compiles, counters.stats.reused) == (1, 0)


def test_compile_failure_keeps_the_source_and_publishes_nothing(tools: Any, tmp_path: Path) -> None:
    tools.write(device="echo 'kernel.cu(1): error: no' >&2; exit 1")
    with pytest.raises(CompileError) as caught:
        build(SPEC)
    kept = tmp_path / "cache" / "failed" / SPEC.name
    assert caught.value.source == kept / "kernel.cu"
    assert str(kept) in str(caught.value) and "error: no" in caught.value.log
    assert (kept / "kernel.cu").read_text() == f"// {SPEC.name}\n"
    assert "error: no" in (kept / "build.log").read_text()
    layout = Layout(tmp_path / "cache")
    assert not any(folder.exists() and os.listdir(folder) for folder in (layout.objects, layout.entries, layout.work))
    assert counters.stats.compiles == 0
    tools.write()
    assert build(SPEC).compiled


# Headers that change -------------------------------------------------------------------------------------------------


def key_with(marker: str, tools: Any) -> str:
    tools.write_headers(marker)
    headers.forget()
    return kernel_key(SPEC)


def test_headers_edited_since_they_were_read_are_read_again_before_a_compilation(tools: Any) -> None:
    new, old = key_with("new", tools), key_with("old", tools)
    tools.write_headers("new")
    # The process still believes in the old ones, and so would find kernels made with these.
    assert kernel_key(SPEC) == old
    entry = build(SPEC)
    assert entry.key == new == kernel_key(SPEC) and len(tools.calls) == 1
    assert entry.manifest["headers"]["digest"] == headers.headers_digest()


@pytest.mark.parametrize("fails", [False, True])
def test_headers_edited_during_a_compilation_have_it_done_again(tools: Any, fails: bool) -> None:
    """Whatever came of it: what was compiled, or failed to, was neither version."""
    new, old = key_with("new", tools), key_with("old", tools)
    header = tools.cutlass / "include" / "cute" / "tensor.hpp"
    seen = tools.root / "seen"
    # The first run of the compiler finds the headers edited under its hands.
    edit = f"if [ ! -e {seen} ]; then touch {seen}; echo '// new' > {header}; {'exit 1' if fails else ':'}; fi"
    tools.write(device=edit)
    entry = build(SPEC)
    assert entry.key == new and len(tools.calls) == 2
    tools.write_headers("old")
    headers.forget()
    assert kernel_key(SPEC) == old and find(SPEC) is None


def test_headers_edited_and_restored_during_a_compilation_have_it_done_again(tools: Any) -> None:
    header = tools.cutlass / "include" / "cute" / "tensor.hpp"
    seen = tools.root / "seen"
    tools.write(
        device=f"[ -e {seen} ] || {{ touch {seen}; cp {header} {seen}; echo x > {header}; cp {seen} {header}; }}"
    )
    assert build(SPEC).compiled and len(tools.calls) == 2


def test_headers_that_never_stay_the_same_are_an_error(tools: Any) -> None:
    header = tools.cutlass / "include" / "cute" / "tensor.hpp"
    tools.write(device=f"echo // >> {header}")
    with pytest.raises(
        ToolchainError, match=rf"{SPEC.name} cannot be compiled: the CUTLASS headers in .* changed while"
    ):
        build(SPEC)
    assert len(tools.calls) == 3 and find(SPEC) is None


# What is told ---------------------------------------------------------------------------------------------------------


def test_events_are_logged(tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "cutlass_w8a8")
    entry = build(SPEC)
    build(SPEC)
    told = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "cutlass_w8a8"]
    levels, messages = zip(*told, strict=True)
    assert levels == ("INFO", "INFO", "INFO", "DEBUG")
    assert all(SPEC.name in message for message in messages)
    assert "not found" in messages[0] and entry.key in messages[0] and "compiling" in messages[1]
    assert re.search(r"compiled in \d+\.\d s", messages[2]) and f"found in {entry.directory}" in messages[3]


def test_counters_are_public_and_exact_with_threads(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    build(SPEC)
    before = cutlass_w8a8.stats()
    threads = [threading.Thread(target=lambda: [build(SPEC) for _ in range(20)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = cutlass_w8a8.stats()
    assert after == replace(before, lookups=before.lookups + 160, hits=before.hits + 160)
    assert after is not counters.stats and before != after


def test_a_hit_costs_no_more_than_its_files(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither compilers nor wheels' metadata, and each file is read once."""
    entry = build(SPEC)
    read: list[Path] = []
    real = shelf.read_regular
    monkeypatch.setattr(shelf, "read_regular", lambda path, size=None: read.append(path) or real(path, size))
    monkeypatch.setattr(pipeline, "find_toolkit", lambda: pytest.fail("looked for a compiler"))
    monkeypatch.setattr(location, "entry_points", lambda group: pytest.fail("looked for packs"))
    assert build(SPEC).library == entry.library
    names = sorted(path.name for path in read)
    assert names == sorted([f"{entry.key}.json", "build.json", *(Path(name).name for name in entry.manifest["files"])])


# CUTLASS_W8A8_JIT ---------------------------------------------------------------------------------------------------


def test_jit_off_makes_a_miss_an_error(tools: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_JIT", "off")
    with pytest.raises(CacheError) as caught:
        build(SPEC)
    for part in (SPEC.name, str(tmp_path / "cache"), "CUTLASS_W8A8_JIT=off", SPEC.command("build")):
        assert part in str(caught.value)
    assert tools.calls == [] and not (tmp_path / "cache").exists()
    assert build(SPEC, explicit=True).compiled
    assert not build(SPEC).compiled


def test_jit_variable_is_checked(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    block, background, off = pipeline.Jit.BLOCK, pipeline.Jit.BACKGROUND, pipeline.Jit.OFF
    for words, expected in (
        (("", "block", "on", "1", "true", "yes", "ON"), block),
        (("background", "Background"), background),
        (("off", "OFF", "0", "no", "false"), off),
    ):
        for value in words:
            monkeypatch.setenv("CUTLASS_W8A8_JIT", value)
            assert pipeline.jit_policy() is expected
            assert pipeline.jit_enabled() is (expected is not off)
    monkeypatch.setenv("CUTLASS_W8A8_JIT", "perhaps")
    with pytest.raises(ArgumentError, match=r"perhaps is no policy; accepted: block, on, .*background, off"):
        build(SPEC)


def test_manifest_is_plain_json(tools: Any) -> None:
    entry = build(SPEC)
    assert json.loads((entry.directory / "build.json").read_text()) == entry.manifest
