"""The compile steps around the compilers: commands, failures, logs, leftovers."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cutlass_w8a8.arch import SM80, SM90, Arch
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ArgumentError, CompileError, ToolchainError
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.spec import KernelSpec
from cutlass_w8a8.toolchain import progress
from cutlass_w8a8.toolchain.discover import find_toolkit
from cutlass_w8a8.toolchain.flags import flags_for
from cutlass_w8a8.toolchain.headers import require_headers
from cutlass_w8a8.toolchain.nvcc import CompileResult, compile_kernel
from cutlass_w8a8.toolchain.process import TIMEOUT_VARIABLE, Finished, compile_timeout
from cutlass_w8a8.toolchain.resources import Resources, parse_resources

FILES = {"kernel.cu": "// text\n", "host_prelude.h": "", "stubs/cutlass/arch/wmma.h": ""}


def spec(arch: Arch = SM90, config: str = "128x128x128_2x1_pingpong") -> KernelSpec:
    return KernelSpec(arch, DType.INT8, DType.BF16, EpilogueSpec.of(), KernelConfig.parse(config))


def compile_with(tmp_path: Path, files: dict[str, str] | None = None) -> CompileResult:
    workdir = tmp_path / "work"
    workdir.mkdir()
    return compile_kernel(
        files or FILES,
        flags_for(spec()),
        find_toolkit(),
        require_headers(),
        workdir,
        keep=tmp_path / "failed" / "name",
    )


def test_success(fake_tools: Any, tmp_path: Path) -> None:
    result = compile_with(tmp_path)
    assert result.library.read_text() == "library\n"
    assert result.resources == Resources(registers=168, stack=16, spill_stores=4, spill_loads=8)
    assert not (tmp_path / "failed").exists()
    # The compilers ran in the work directory and kept their temporary files there.
    workdir = str(tmp_path / "work")
    assert fake_tools.calls[0].startswith(f"{workdir} . -fatbin -gencode arch=compute_90a,code=sm_90a ")


def test_record_names_no_machine_path(fake_tools: Any, tmp_path: Path) -> None:
    fake_tools.write(device=f'echo "note: see {fake_tools.cutlass}/include/cute/x.h and {fake_tools.nvcc}x and $PWD/k"')
    result = compile_with(tmp_path)
    device, host, link = result.commands
    assert device.startswith("$NVCC -fatbin ") and "-ccbin=$CXX -I$CUTLASS kernel.cu" in device
    assert host.startswith("$CXX ")
    assert "-Istubs -I$CUTLASS -I$CUDA/include -isystem $CUDA/include/cccl " in host
    assert "-D__CUDACC_VER_MAJOR__=13 -D__CUDACC_VER_MINOR__=0" in host
    assert link.startswith("$CXX host.o image.s -o kernel.so -shared ")
    assert "note: see $CUTLASS/cute/x.h and $CUDA/bin/nvccx and ./k" in result.log
    assert str(tmp_path) not in result.log + "".join(result.commands)


@pytest.mark.parametrize("step", ["device", "host", "link"])
def test_failure_carries_command_log_and_source(fake_tools: Any, tmp_path: Path, step: str) -> None:
    fake_tools.write(**{step: "echo first; echo 'kernel.cu(7): error: wrong' >&2; exit 2;"})
    with pytest.raises(CompileError) as caught:
        compile_with(tmp_path)
    error = caught.value
    compiler = fake_tools.nvcc if step == "device" else fake_tools.cxx
    assert error.command.startswith(f"{compiler} ")
    assert "first\nkernel.cu(7): error: wrong\n" in error.log
    assert error.source == tmp_path / "failed" / "name" / "kernel.cu"
    assert error.source.read_text() == "// text\n"
    kept = error.source.with_name("build.log").read_text()
    assert error.command in kept and "error: wrong" in kept
    for part in ("failed with status 2", "kernel.cu(7): error: wrong", str(error.source.parent)):
        assert part in str(error)
    assert os.listdir(tmp_path / "failed") == ["name"]


def test_a_later_failure_replaces_what_was_kept(fake_tools: Any, tmp_path: Path) -> None:
    fake_tools.write(device="exit 1")
    (tmp_path / "failed" / "name").mkdir(parents=True)
    (tmp_path / "failed" / "name" / "old").touch()
    with pytest.raises(CompileError):
        compile_with(tmp_path)
    assert sorted(os.listdir(tmp_path / "failed" / "name")) == ["build.log", "host_prelude.h", "kernel.cu", "stubs"]


def test_a_failure_is_told_even_if_its_record_cannot_be_kept(fake_tools: Any, tmp_path: Path) -> None:
    fake_tools.write(device="echo 'error: the real one'; exit 1")
    (tmp_path / "failed").write_text("a file where a directory belongs")
    with pytest.raises(CompileError, match=r"could not be kept in .*(?s:.)*error: the real one"):
        compile_with(tmp_path)


@pytest.mark.parametrize(("failing", "other"), [("host", "device"), ("device", "host")])
def test_one_half_failing_kills_the_other(fake_tools: Any, tmp_path: Path, failing: str, other: str) -> None:
    # The sleeping half starts a child, as nvcc does, and both must go.
    pids = tmp_path / "pids"
    sleeping = f"sleep 60 & echo $$ $! > {pids}; wait"
    failure = f"while [ ! -s {pids} ]; do sleep 0.01; done; exit 1"
    fake_tools.write(**{failing: failure, other: sleeping})
    begin = time.monotonic()
    with pytest.raises(CompileError, match="failed with status 1"):
        compile_with(tmp_path)
    assert time.monotonic() - begin < 30
    for pid in map(int, pids.read_text().split()):
        assert is_gone(pid)


def is_gone(pid: int) -> bool:
    for _ in range(200):
        try:
            # A killed grandchild stays a zombie until its new parent collects it.
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    "command", ["kill -9 $$", "echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\"; exit 9"]
)
def test_killed_compiler_suggests_memory(fake_tools: Any, tmp_path: Path, command: str) -> None:
    fake_tools.write(device=command)
    with pytest.raises(CompileError, match=r"killed by signal 9.*memory.*3\.5 GB"):
        compile_with(tmp_path)


def test_killed_host_compiler_is_recognised() -> None:
    output = "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\n"
    assert Finished(("g++",), 1, output, 0.0).killing_signal == signal.SIGKILL
    assert Finished(("g++",), 1, "error: no", 0.0).killing_signal is None


def test_source_without_the_kernel(fake_tools: Any, tmp_path: Path) -> None:
    fake_tools.write(device="echo image > kernel.fatbin; exit 0")
    with pytest.raises(CompileError, match="defines no kernel named w8a8_kernel"):
        compile_with(tmp_path)


def test_compiler_that_cannot_run(fake_tools: Any, tmp_path: Path) -> None:
    find_toolkit()
    fake_tools.nvcc.chmod(0o644)
    with pytest.raises(ToolchainError, match=r"cannot be run.*is it an executable file"):
        compile_with(tmp_path)


def test_environment_flags_do_not_reach_nvcc(fake_tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O0")
    fake_tools.write(device='echo "append=$NVCC_APPEND_FLAGS; lc=$LC_ALL"')
    assert "append=; lc=C\n" in compile_with(tmp_path).log


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x"])
def test_source_files_stay_in_their_directory(fake_tools: Any, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="stay inside"):
        compile_with(tmp_path, {**FILES, name: ""})


def test_flags() -> None:
    plain = flags_for(spec())
    sm80 = flags_for(spec(SM80, "128x128x64_w64x64x64_multistage_s5"))
    assert "arch=compute_90a,code=sm_90a" in plain.device
    assert "arch=compute_80,code=[sm_80,compute_80]" in sm80.device
    assert plain.to_json() != sm80.to_json()
    # Both halves or neither: the types they share depend on it.
    macro = "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"
    wide = flags_for(spec(config="128x160x128_2x1_cooperative"))
    assert [macro in half for flags in (plain, wide, sm80) for half in (flags.device, flags.host)] == [
        *(False, False),
        *(True, True),
        *(False, False),
    ]


def test_resources_are_those_of_the_entry() -> None:
    log = (
        "ptxas info    : Compiling entry function 'other' for 'sm_80'\n"
        "ptxas info    : Function properties for other\n"
        "    1 bytes stack frame, 2 bytes spill stores, 3 bytes spill loads\n"
        "ptxas info    : Used 4 registers\n"
        "ptxas info    : Compiling entry function 'w8a8_kernel' for 'sm_80'\n"
        "ptxas info    : Function properties for helper\n"
        "    5 bytes stack frame, 6 bytes spill stores, 7 bytes spill loads\n"
        "ptxas info    : Function properties for w8a8_kernel\n"
        "    8 bytes stack frame, 9 bytes spill stores, 10 bytes spill loads\n"
        "ptxas info    : Used 254 registers, used 1 barriers\n"
    )
    assert parse_resources(log, "w8a8_kernel") == Resources(registers=254, stack=8, spill_stores=9, spill_loads=10)
    assert parse_resources(log, "w8a8") is None


@pytest.mark.parametrize(("terminal", "quiet", "shown"), [(True, "", True), (True, "1", False), (False, "", False)])
def test_progress_only_for_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, quiet: str, shown: bool
) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_QUIET", quiet)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: terminal)
    with progress.compiling("sm90_[x]"):
        pass
    captured = capsys.readouterr()
    assert ("compiling sm90_[x]" in captured.err) == shown
    assert captured.out == ""


def test_progress_stays_on_one_line_and_shows_the_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUTLASS_W8A8_QUIET", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    with progress.compiling("sm90_int8_bf16_azp-token-bias_token_channel_128x128x128_2x1_pingpong_streamk"):
        pass
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    assert lines
    for line in lines:
        assert re.fullmatch(r"\S 0:00:0\d compiling sm90_int8_bf16_azp-token-bias_token_\S*…", line) and len(line) <= 80


# Compilers that misbehave ---------------------------------------------------------------------------------------------


def test_a_compiler_that_hangs_is_stopped_with_all_it_started(
    fake_tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    fake_tools.write(device=f"echo on the way; sleep 60 & echo $$ $! > {pids}; wait")
    workdir = tmp_path / "work"
    workdir.mkdir()
    begin = time.monotonic()
    with pytest.raises(CompileError) as caught:
        compile_kernel(
            FILES, flags_for(spec()), find_toolkit(), require_headers(), workdir, keep=tmp_path / "kept", seconds=1.0
        )
    assert time.monotonic() - begin < 30
    for part in ("nvcc did not end within 1 s", "--jobs", TIMEOUT_VARIABLE, str(tmp_path / "kept"), "on the way"):
        assert part in str(caught.value)
    assert (tmp_path / "kept" / "kernel.cu").exists()
    for pid in map(int, pids.read_text().split()):
        assert is_gone(pid)


@pytest.mark.parametrize(("text", "seconds"), [("", 3600), ("7200", 7200), ("0.5", 0.5)])
def test_timeout_variable(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    assert compile_timeout() == seconds


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_timeout_variable_is_checked(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    with pytest.raises(ArgumentError, match=f"{TIMEOUT_VARIABLE}={text} is no positive number of seconds"):
        compile_timeout()


@pytest.mark.parametrize("victim", ["kill -9 $$", "exit 137"])
def test_a_compiler_killed_for_memory_is_told_with_the_remedy(fake_tools: Any, tmp_path: Path, victim: str) -> None:
    """Itself, or below a wrapper script."""
    fake_tools.write(device=victim)
    with pytest.raises(CompileError, match=r"killed by signal 9.*out of memory.*fewer kernels at once \(--jobs\)"):
        compile_with(tmp_path)


@pytest.mark.parametrize("made", ["exit 0", "echo -n > kernel.so; exit 0"])
def test_a_linker_that_leaves_nothing(fake_tools: Any, tmp_path: Path, made: str) -> None:
    fake_tools.write(link=made)
    with pytest.raises(CompileError, match=r"reported success, but left no kernel\.so(?s:.)*Source and full log"):
        compile_with(tmp_path)


def test_a_compiler_that_prints_nothing(fake_tools: Any, tmp_path: Path) -> None:
    fake_tools.write(device="exit 0")
    with pytest.raises(CompileError, match="defines no kernel named w8a8_kernel"):
        compile_with(tmp_path)


def test_a_compiler_without_room_is_told_with_the_remedy(fake_tools: Any, tmp_path: Path) -> None:
    fake_tools.write(link="echo 'ld: final link failed: No space left on device'; exit 1")
    with pytest.raises(CompileError, match=r"failed with status 1; its disk is full: free some space.*TMPDIR"):
        compile_with(tmp_path)
