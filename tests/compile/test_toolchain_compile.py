"""The real compilers, on a kernel small enough to take a second."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from cutlass_w8a8 import dispatch
from cutlass_w8a8.arch import ARCHS, Arch
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import CompileError
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.spec import KernelSpec
from cutlass_w8a8.toolchain.discover import find_toolkit
from cutlass_w8a8.toolchain.flags import flags_for
from cutlass_w8a8.toolchain.headers import find_headers
from cutlass_w8a8.toolchain.nvcc import CompileResult, compile_kernel

pytestmark = pytest.mark.compile

FILES = {
    "kernel.cu": """
#include "cutlass/version.h"
#include "cutlass/arch/wmma.h"
#ifdef __CUDACC__
extern "C" __global__ void w8a8_kernel(float* p) { p[threadIdx.x] *= 2.f; }
#else
static_assert(STUB == 1 && __CUDACC_VER_MAJOR__ >= 12);
extern "C" unsigned char const w8a8_image[], w8a8_image_end[];
extern "C" void hidden() {}
extern "C" EXPORT long image_bytes() { return w8a8_image_end - w8a8_image; }
extern "C" EXPORT char const* file() { return __FILE__; }
#endif
""",
    "host_prelude.h": '#include <cuda_runtime.h>\n#define EXPORT __attribute__((visibility("default")))\n',
    "stubs/cutlass/arch/wmma.h": "#define STUB 1\n",
}


def compile_files(arch: Arch, tmp_path: Path, files: dict[str, str]) -> CompileResult:
    headers = find_headers()
    if headers is None:
        pytest.skip("the CUTLASS headers are not installed")
    workdir = tmp_path / "work"
    workdir.mkdir()
    config = dispatch.rows_of(arch, DType.INT8)[0].config
    flags = flags_for(KernelSpec(arch, DType.INT8, DType.BF16, EpilogueSpec.of(), config))
    return compile_kernel(files, flags, find_toolkit(), headers, workdir, keep=tmp_path / "failed")


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_library_holds_both_halves(arch: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "cwd"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    result = compile_files(arch, tmp_path, FILES)
    assert os.listdir(elsewhere) == []
    assert 0 < result.resources.registers < 64 and result.resources.spill_stores == 0

    # RTLD_NOW: an undefined symbol would show here, not at the first launch.
    library = ctypes.CDLL(str(result.library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    library.image_bytes.restype = ctypes.c_long
    library.file.restype = ctypes.c_char_p
    image = (tmp_path / "work" / "kernel.fatbin").read_bytes()
    begin, end = (ctypes.addressof(ctypes.c_char.in_dll(library, name)) for name in ("w8a8_image", "w8a8_image_end"))
    assert begin % 64 == 0 and end - begin == library.image_bytes() == len(image)
    assert ctypes.string_at(begin, len(image)) == image
    assert image[:4] == bytes.fromhex("50ed55ba")  # the fat binary magic number, little-endian
    assert library.file() == b"kernel.cu"
    with pytest.raises(AttributeError):
        library.hidden  # noqa: B018
    binary = result.library.read_bytes()
    for path in (str(tmp_path), str(find_toolkit().includes[0])):
        assert path.encode() not in binary and path not in result.log


def test_ptx_is_embedded_only_where_a_newer_device_may_run_it(tmp_path: Path) -> None:
    for arch in ARCHS.values():
        directory = tmp_path / arch.name
        directory.mkdir()
        compile_files(arch, directory, FILES)
        image = (directory / "work" / "kernel.fatbin").read_bytes()
        assert kinds(image) == ({1, 2} if arch.portable else {2})


def kinds(image: bytes) -> set[int]:
    """Kinds of the entries of a fat binary: 1 is PTX, 2 is machine code."""
    header_bytes = int.from_bytes(image[6:8], "little")
    end = header_bytes + int.from_bytes(image[8:16], "little")
    found, at = set(), header_bytes
    while at < end:
        found.add(int.from_bytes(image[at : at + 2], "little"))
        at += int.from_bytes(image[at + 4 : at + 8], "little") + int.from_bytes(image[at + 8 : at + 16], "little")
    return found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#ifdef __CUDACC__\n#error in the device half\n#endif\n", "in the device half"),
        ("#ifndef __CUDACC__\n#error in the host half\n#endif\n", "in the host half"),
        (
            '#ifdef __CUDACC__\nextern "C" __global__ void w8a8_kernel() {}\n#else\nextern "C" int missing();\n'
            'extern "C" EXPORT int call() { return missing(); }\n#endif\n',
            "undefined reference to `missing'",
        ),
    ],
    ids=["device", "host", "link"],
)
def test_failure_has_the_log_and_the_source(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        compile_files(ARCHS["sm90"], tmp_path, {**FILES, "kernel.cu": text})
    assert message in caught.value.log and message in str(caught.value)
    assert caught.value.source.read_text() == text
