"""Compilers made of shell built-ins, so that everything around them is tested in milliseconds."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

NVCC = """\
#!/bin/sh
case "$*" in
  --version) echo "nvcc: fake"; echo "Cuda compilation tools, release {version}, V{version}.7";;
  --list-gpu-code) for n in 75 80 86 87 89 90 100 103 110 120 121; do echo "sm_$n"; done;;
  -dryrun*) echo '#$ INCLUDES="-I{include}"  ' >&2; echo '#$ SYSTEM_INCLUDES="-isystem" "{include}/cccl"  ' >&2;;
  *)
    echo "$PWD $TMPDIR $*" >> {calls}
    {device}
    echo "ptxas info    : Compiling entry function 'w8a8_kernel' for 'sm_90a'"
    echo "ptxas info    : Function properties for w8a8_kernel"
    echo "    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads"
    echo "ptxas info    : Used 168 registers, used 2 barriers"
    echo "image {include}" > kernel.fatbin;;
esac
"""
CXX = """\
#!/bin/sh
case "$*" in
  --version) echo "{cxx_version}";;
  *-shared*) {link}
    echo "library" > kernel.so;;
  *) {host}
    echo "object" > host.o;;
esac
"""

# What a kernel's library exports, in C.
LIBRARY = """
struct { int abi_version, smem_bytes, threads, params_bytes, operands; } w8a8_info = {2, 4096, 256, 0, 0};
char w8a8_image[8], w8a8_image_end;
int w8a8_launch(void* call) { return 0; }
long w8a8_workspace(void* call) { return 0; }
"""


@dataclass
class FakeTools:
    """A toolkit, a host compiler and a CUTLASS tree in one directory."""

    root: Path

    @property
    def nvcc(self) -> Path:
        return self.root / "cuda" / "bin" / "nvcc"

    @property
    def cxx(self) -> Path:
        return self.root / "bin" / "g++"

    @property
    def cutlass(self) -> Path:
        return self.root / "cutlass"

    @property
    def calls(self) -> list[str]:
        """One line for each device compilation."""
        log = self.root / "calls"
        return log.read_text().splitlines() if log.exists() else []

    def write(
        self,
        *,
        version: str = "13.0",
        cxx_version: str = "g++ 12.2.0",
        device: str = ":",
        host: str = ":",
        link: str = ":",
    ) -> None:
        """Install the compilers; ``device``, ``host`` and ``link`` are shell commands run by the three steps."""
        include = self.root / "cuda" / "include"
        values = {
            "version": version,
            "cxx_version": cxx_version,
            "include": include,
            "calls": self.root / "calls",
            "device": device,
            "host": host,
            "link": link,
        }
        (include / "cccl").mkdir(parents=True, exist_ok=True)
        (include / "cuda_runtime.h").touch()
        for path, text in ((self.nvcc, NVCC), (self.cxx, CXX)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(**values))
            path.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """What has these tools found."""
        return {
            "CUTLASS_W8A8_NVCC": str(self.nvcc),
            "CXX": str(self.cxx),
            "CUTLASS_W8A8_CUTLASS_DIR": str(self.cutlass),
        }

    def write_headers(self, marker: str = "") -> None:
        """Install a CUTLASS tree of two files."""
        for name, text in {
            "cutlass/version.h": "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n",
            "cute/tensor.hpp": f"// {marker}\n",
        }.items():
            path = self.cutlass / "include" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
