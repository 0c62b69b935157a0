"""One kernel of each family through the whole pipeline: it compiles, spills nothing, loads without a GPU, and travels.

A kernel takes half a minute. They are kept in pytest's own cache under keys that cover everything they depend on, so
that running these tests again compiles only what has changed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cutlass_w8a8 import cli, pipeline
from cutlass_w8a8.arch import Family
from cutlass_w8a8.cache.store import Entry
from cutlass_w8a8.dispatch import smem_bytes
from cutlass_w8a8.errors import ToolchainError
from cutlass_w8a8.runtime.abi import ABI_VERSION, CALL, MAX_OPERANDS, Library
from cutlass_w8a8.spec import KernelSpec
from cutlass_w8a8.toolchain.discover import find_cxx, find_toolkit, require
from scripts import machine_code, regenerate

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
KERNELS = (
    "sm90 e4m3 bf16 scaled_token_channel 128x128x128_2x1_pingpong",
    "sm90 int8 fp16 azp-token-bias_token_channel 64x16x256_ws_swap_slices4",
    "sm75 int8 fp16 azp-token-bias_token_channel 64x128x128_w64x64x64_multistage_s2",
    "sm80 int8 bf16 azp-token-bias_token_channel 128x128x64_w64x64x64_multistage_s5",
    "sm89 e4m3 fp32 scaled-bias_token_channel 64x128x128_w32x64x128_multistage_s3",
    "sm100 e4m3 bf16 scaled_token_channel 128x32x128_4x1_2sm_swap",
    "sm110 int8 bf16 azp-token-bias_token_channel 64x64x128_1sm",
    "sm121 e4m3 bf16 scaled-bias_token_channel 128x128x128_cooperative",
)
SPECS = [regenerate.kernel(line) for line in KERNELS]
# Enough to show how a cache travels, and known to every toolkit.
TRAVELLING = [spec for spec in SPECS if spec.arch.min_toolkit == (12, 0)][:3]


def built(spec: KernelSpec) -> Entry:
    """The kernel, or a skipped test where this machine's toolkit is too old for its architecture."""
    try:
        require(find_toolkit(), spec.arch, spec.operand)
    except ToolchainError as error:
        pytest.skip(str(error))
    return pipeline.build(spec)


@pytest.fixture
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = Path(request.config.cache.mkdir("kernels"))  # type: ignore[union-attr]
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", str(directory))
    return directory


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_compiles_without_spills_and_loads(spec: KernelSpec, cache: Path) -> None:
    entry = built(spec)
    resources = entry.manifest["resources"]
    assert resources["spill_stores"] == resources["spill_loads"] == 0
    assert 0 < resources["registers"] <= 255

    library = Library(str(entry.library))
    info = library.info
    tree = spec.epilogue.tree(spec.operand.accumulator, spec.out)
    assert info.abi_version == ABI_VERSION and info.operands == len(tree.loads)
    assert info.threads % 32 == 0 and 0 < info.params_bytes <= 4096
    assert info.smem_bytes <= spec.arch.smem_bytes
    assert bytes(library.image[:4]) == bytes.fromhex("50ed55ba")  # a fat binary
    binary = entry.library.read_bytes()
    for path in (str(cache), str(ROOT), sys.prefix):
        assert path.encode() not in binary


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_machine_code_holds_the_instruction_of_the_architecture(spec: KernelSpec, cache: Path) -> None:
    """What cannot run here is looked into: a main loop may compile to a trap."""
    cuobjdump = machine_code.find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("cuobjdump is not installed; it is among the dev dependencies")
    report = machine_code.look(cuobjdump, built(spec), spec)
    assert report.problems == [] and report.in_mainloop == 0
    assert sum(report.instructions.values()) >= 4


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_rules_estimate_shared_memory(spec: KernelSpec, cache: Path) -> None:
    """The estimate that configurations are refused by, for as many stages as the kernel really has."""
    actual = Library(str(built(spec).library)).info.smem_bytes
    stages = spec.config.stages
    if stages is None:
        # The collective took as many as fit: so many that one more would not.
        stages = max(n for n in range(2, 33) if smem_bytes(spec, n) <= spec.arch.smem_bytes)
    estimate = smem_bytes(spec, stages)
    assert abs(estimate - actual) <= 0.02 * actual, (estimate, actual, stages)
    if spec.family is not Family.HOPPER:
        assert estimate == actual


def test_workspace_is_asked_of_the_host_half(cache: Path) -> None:
    """The host half runs: CUTLASS accepts an aligned problem, which needs no workspace, and refuses a bad stride."""
    library = Library(str(pipeline.build(SPECS[0]).library))
    assert workspace(library, lda=512) == 0
    assert workspace(library, lda=512, k=504) == -1


# A driver that says which boxes tensor maps have, and launches nothing.
DRIVER = """
#include <cstdint>
#include <cstdio>
extern "C" {
int cuTensorMapEncodeTiled(void*, int, unsigned rank, void*, uint64_t const* extents, uint64_t const*,
                           unsigned const* box, unsigned const*, int, int, int, int) {
  for (unsigned i = 0; i < rank; ++i) std::printf("%llu:%u ", (unsigned long long)extents[i], box[i]);
  std::printf("\\n");
  return 0;
}
int cuTensorMapReplaceAddress(void*, void*) { return 0; }
int cuLaunchKernelEx(...) { return 0; }
}
"""
LAUNCH = """
import ctypes, sys
from cutlass_w8a8.runtime.abi import CALL, Library
library = Library(sys.argv[1])
call = ctypes.create_string_buffer(bytes.fromhex(sys.argv[2]), CALL.size)
sys.exit(library.launch(ctypes.addressof(call), ctypes.addressof(call)))
"""


@pytest.mark.parametrize(
    ("spec", "m", "n", "boxes"),
    [
        (SPECS[0], 256, 1024, {(512, 256, 128), (512, 1024, 64)}),
        # Two blocks load half of the columns of a tile each.
        (SPECS[0], 129, 1064, {(512, 129, 128), (512, 129, 1), (512, 1064, 64), (512, 1064, 40)}),
        (SPECS[0], 3, 1024, {(512, 3, 128), (512, 3, 3), (512, 1024, 64)}),
        # Blocks divide K; the weights come first.
        (SPECS[1], 1, 1024, {(128, 1024, 64), (128, 1, 16), (128, 1, 1)}),
        (SPECS[1], 37, 1040, {(128, 1040, 64), (128, 1040, 16), (128, 37, 16), (128, 37, 5)}),
    ],
)
def test_the_last_rows_of_an_operand_have_a_box_of_their_own(
    spec: KernelSpec, m: int, n: int, boxes: set[tuple[int, int, int]], cache: Path, tmp_path: Path
) -> None:
    """So that no rows are loaded that do not exist: k and rows of each operand, and rows of a box, of 128 bytes."""
    (tmp_path / "driver.cpp").write_text(DRIVER)
    fake = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run([str(find_cxx()[0]), str(tmp_path / "driver.cpp"), *fake], check=True)
    entry = built(spec)
    command = [sys.executable, "-c", LAUNCH, str(entry.library), packed(Library(str(entry.library)), m, n).hex()]
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    maps = [[tuple(map(int, mode.split(":"))) for mode in line.split()] for line in run.stdout.splitlines()]
    operands = [modes for modes in maps if len(modes) == 3 and modes[0][1] == 128]
    assert {(k, rows, box) for (k, _), (rows, box), _ in operands} == boxes
    assert {slices for *_, slices in operands} == {(spec.config.slices, 1)}


def workspace(library: Library, *, lda: int, k: int = 512) -> int:
    buffer = ctypes.create_string_buffer(packed(library, lda=lda, k=k), CALL.size)
    return int(library.workspace(ctypes.addressof(buffer)))


def packed(library: Library, m: int = 256, n: int = 1024, *, lda: int = 512, k: int = 512) -> bytes:
    operands = library.info.operands
    pointers = (0, 16, 16, 1 << 30, 0) + (16,) * operands + (0,) * (MAX_OPERANDS - operands)
    launch, spans = (132, 1, 1, 1, 0, 0, 0), (0,) * (3 + MAX_OPERANDS)
    return CALL.pack(*pointers, 0, lda, lda, n, m, n, k, *launch, *spans)


def test_pregenerated_directory_serves_without_a_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([spec.to_json() for spec in TRAVELLING]))
    command = [sys.executable, str(ROOT / "scripts" / "pregenerate.py"), "--plan", str(plan), "--out", str(cache)]
    done = subprocess.run([*command, "--jobs", "1"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(spec.name in done.stdout for spec in TRAVELLING) and "0 failed" in done.stdout

    copied = tmp_path / "elsewhere" / "kernels"
    shutil.copytree(cache, copied)
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", str(copied))
    monkeypatch.setenv("CUTLASS_W8A8_JIT", "off")
    monkeypatch.setenv("CUTLASS_W8A8_NVCC", str(tmp_path / "no-such-nvcc"))
    for spec in TRAVELLING:
        entry = pipeline.build(spec)
        assert not entry.compiled and copied in entry.library.parents
        assert Library(str(entry.library)).info.operands == len(
            spec.epilogue.tree(spec.operand.accumulator, spec.out).loads
        )
    assert cli.main(["list"]) == 0
    assert all(spec.name in capsys.readouterr().out for spec in TRAVELLING[:1])
