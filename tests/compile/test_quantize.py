"""Quantisation kernels through the real compilers: every entry point, without spills, loads without a GPU."""

from __future__ import annotations

import re

import pytest

from cutlass_w8a8 import pipeline
from cutlass_w8a8.arch import SM75, SM90, Arch
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.runtime.abi import ABI_VERSION, Library, quant_call
from cutlass_w8a8.spec import QUANT_HELD, QUANT_MAX_THREADS, QuantSpec, Scheme
from scripts import machine_code

pytestmark = pytest.mark.compile


@pytest.mark.parametrize(("scheme", "target"), [(scheme, target) for scheme in Scheme for target in scheme.targets])
@pytest.mark.parametrize(("arch", "source"), [(SM90, DType.BF16), (SM75, DType.FP16), (SM75, DType.FP32)])
def test_kernel_compiles_without_spills_and_loads(arch: Arch, source: DType, target: DType, scheme: Scheme) -> None:
    entry = pipeline.build(QuantSpec(arch, source, target, scheme))
    log = (entry.directory / "build.log").read_text()
    compiled = set(re.findall(r"Compiling entry function '(\w+)'", log))
    scan = {"w8a8_scan"} if scheme.scans else set()
    assert compiled == {"w8a8_kernel", *(f"w8a8_held_{held}" for held in QUANT_HELD), *scan}
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"} and "warning" not in log

    library = Library(str(entry.library))
    info = library.info
    assert (info.abi_version, info.smem_bytes, info.threads) == (ABI_VERSION, 0, QUANT_MAX_THREADS)
    # The call without function and stream before, and the four numbers of the launch behind.
    call = quant_call(3 + scheme.azp + scheme.scans, scheme.whole).size
    assert info.params_bytes == call - 2 * 8 - 4 * 4 and library.workspace(None) == 0

    cuobjdump = machine_code.find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("cuobjdump is not installed; it is among the dev dependencies")
    text, ptx = machine_code.disassemble(cuobjdump, bytes(library.image))
    assert ptx is arch.portable
    # One wait and one trigger for each entry point, and the conversion in hardware where there is one.
    assert text.count("ACQBULK") == text.count("PREEXIT") == (len(compiled) if arch is SM90 else 0)
    assert ("F2FP.SATFINITE.E4M3" in text) == (arch is SM90 and target is DType.E4M3)
    # Vectors of 16 bytes in; out what they become, 8 bytes or 4: 1 + 2 + 4 + 8 of those held, and the loop's.
    assert len(re.findall(r"LDG\.E\.128", text)) >= 16
    assert len(re.findall(r"STG\.E\.64" if source is not DType.FP32 else r"STG\.E(?:\.SYS)?[ ;]", text)) >= 16
