"""Nothing is ever written outside the cache, the temporary folder and the paths that were named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cutlass_w8a8.cache import location

ROOT = Path(__file__).parents[2]

# Runs everything there is under an audit hook, and prints what was written, as [event, path].
TRACED = """
import json, os, sys
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PATHS = {  # positions of paths in the arguments of an event, and of the descriptors that they are relative to
    "os.mkdir": [(0, 2)], "os.remove": [(0, 1)], "os.rmdir": [(0, 1)], "os.rename": [(0, 2), (1, 3)],
    "os.link": [(1, 3)], "os.symlink": [(1, 2)], "os.chmod": [(0, 2)], "os.chown": [(0, 3)], "os.utime": [(0, 3)],
    "os.truncate": [(0, None)], "os.setxattr": [(0, None)], "shutil.rmtree": [(0, None)],
    "shutil.move": [(0, None), (1, None)], "shutil.copyfile": [(1, None)], "tempfile.mkdtemp": [(0, None)],
    "tempfile.mkstemp": [(0, None)],
}
written = []

def note(event, arguments):
    if event == "open":
        if arguments[2] is None or not arguments[2] & WRITING:
            return
        places = [(0, None)]
    elif event in PATHS:
        places = PATHS[event]
    else:
        return
    for position, relative in places:
        path = arguments[position]
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        folder = arguments[relative] if relative is not None and relative < len(arguments) else -1
        base = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder >= 0 else os.getcwd()
        written.append((event, os.path.normpath(os.path.join(base, os.fsdecode(path)))))

sys.addaudithook(note)
from unittest import mock
from cutlass_w8a8 import pipeline
from cutlass_w8a8.cli import main
from cutlass_w8a8.errors import CompileError
from tests.fake_tools import FakeTools
from tests.stress import files, spec
from pathlib import Path

tools = FakeTools(Path(sys.argv[1]))
with mock.patch.object(pipeline.emit, "render", lambda asked: files(asked.config.tile[1])):
    assert pipeline.build(spec(0)).compiled and not pipeline.build(spec(0)).compiled
    assert pipeline.find(spec(0)) is not None and pipeline.build(spec(0), force=True).compiled
    pipeline.build(spec(1)).library.write_bytes(b"broken!\\n")
    assert not pipeline.build(spec(9)).compiled
    written_before = len(written)
    tools.write(device="echo 'error: no'; exit 1")
    written[written_before:] = []
    try:
        pipeline.build(spec(2))
        raise AssertionError("compiled")
    except CompileError:
        pass
    statuses = [main(["cache", *words.split()]) for words in
                ("ls", "ls --json", "verify", "verify --json", "prune --json --limit 1", "clear --yes", "ls")]
    assert statuses == [0, 0, 1, 1, 0, 0, 0], statuses
    os.environ["CUTLASS_W8A8_CACHE_DIR"] = "/dev/null/cache"
    tools.write()
    written[:] = [item for item in written if not item[1].startswith(sys.argv[1])]
    assert pipeline.build(spec(0)).compiled and not pipeline.build(spec(0)).compiled
print("TRACED", json.dumps(written))
"""


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(root)): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in (root, *sorted(root.rglob("*")))
    }


def test_only_the_cache_and_the_temporary_folder_are_written(fake_tools: Any, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("home", "cwd", "temp", "cache", "pack")}
    for name in ("home", "cwd", "temp"):
        folders[name].mkdir()
        (folders[name] / "mine").write_text("mine")
    environment = {
        **os.environ,
        "HOME": str(folders["home"]),
        "TMPDIR": str(folders["temp"]),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        location.ROOT_VARIABLE: str(folders["pack"]),
    }
    environment.pop("XDG_CACHE_HOME", None)
    fill = (
        "from unittest import mock; from cutlass_w8a8 import pipeline; from tests.stress import files, spec\n"
        "with mock.patch.object(pipeline.emit, 'render', lambda asked: files(9)): pipeline.build(spec(9))"
    )
    run([sys.executable, "-c", fill], folders["cwd"], environment)
    environment |= {location.ROOT_VARIABLE: str(folders["cache"]), location.PACKS_VARIABLE: str(folders["pack"])}
    before = {name: tree(folders[name]) for name in ("home", "cwd", "pack")}
    temporary = sorted(os.listdir(folders["temp"]))
    printed = run([sys.executable, "-c", TRACED, str(fake_tools.root)], folders["cwd"], environment)
    assert {name: tree(folders[name]) for name in before} == before
    # What was made there was removed.
    assert sorted(os.listdir(folders["temp"])) == temporary

    (line,) = [line for line in printed.splitlines() if line.startswith("TRACED ")]
    written = json.loads(line.removeprefix("TRACED "))
    allowed = [folders["cache"], folders["temp"], Path(os.devnull)]
    assert [item for item in written if not any(Path(item[1]).is_relative_to(folder) for folder in allowed)] == []
    # The hook has seen what there was to see.
    assert {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"} <= {event for event, _ in written}
    assert any(Path(path).is_relative_to(folders["temp"]) for _, path in written)


def run(command: list[str], cwd: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_without_a_variable_the_cache_is_where_the_platform_has_caches(
    fake_tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(location.ROOT_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert location.cache_root() == tmp_path / ".cache" / "cutlass_w8a8"
    assert not (tmp_path / ".cache").exists()
