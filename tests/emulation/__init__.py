"""The device half of a quantisation kernel, compiled by a plain C++ compiler and run on the CPU.

Thread by thread, as its text says; the few PTX instructions in it, and CUDA's intrinsics, are replaced by C++. So every
index, tail, reduction and rounding of the text is tested where there is no GPU; the compiler's and the hardware's part,
and how kernels follow one another, are not.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from cutlass_w8a8 import emit
from cutlass_w8a8.dispatch import quant_symbols
from cutlass_w8a8.quant_calls import launches
from cutlass_w8a8.quant_request import check_quantize
from cutlass_w8a8.request import ALIGNMENT
from cutlass_w8a8.runtime.device import Device
from cutlass_w8a8.spec import QuantSpec
from cutlass_w8a8.toolchain.discover import find_cxx

_HERE = Path(__file__).resolve().parent
_PTX = (
    (
        r'asm\("cvt\.pack\.sat\.s8\.s32\.b32 [^"]*"\s*: "=r"\(packed\)\s*: "r"\((.*?)\), "r"\((.*?)\), "r"\(0\)\);',
        r"packed = pack_int8(\1, \2);",
    ),
    (r'asm\("cvt\.rni\.sat\.s16\.f32 [^"]*" : "=h"\(code\) : "f"\((.*?)\)\);', r"code = float_to_int16(\1);"),
)
_ENTRY = """
{call}
extern "C" int emulate(QuantCall const* call) {{
  static void (*const kernels[])(Params) = {{{symbols}}};
  static Params params;
  static void (*kernel)(Params);
  params = call->params;
  kernel = kernels[reinterpret_cast<uintptr_t>(call->function)];
  {blocks}
  gridDim = {{static_cast<unsigned>(blocks), 1, 1}};
  blockDim = {{static_cast<unsigned>(call->threads), static_cast<unsigned>(call->rows), 1}};
  emulation::body = [] {{ kernel(params); }};
  for (unsigned at = 0; at < gridDim.x; ++at) emulation::block({{at, 0, 0}});
  return 0;
}}
"""
_ROWS = "(int64_t(params.m) + call->rows - 1) / call->rows"


class Emulated:
    """A kernel on the CPU, launched as the package launches it.

    Args:
        spec: which.
        folder: where to compile it.
        sm_count: multiprocessors of the device that launches are planned for.

    Attributes:
        launched: the entry points that have been launched.
    """

    def __init__(self, spec: QuantSpec, folder: Path, sm_count: int = 4) -> None:
        self.spec = spec
        self.launched: set[str] = set()
        self._where = Device(0, spec.arch.capability, sm_count, "emulated")
        symbols = quant_symbols(spec.scheme)
        library = ctypes.CDLL(str(_compiled(spec, symbols, folder)))
        library.emulate.argtypes = (ctypes.c_void_p,)
        self._kernels: dict[str, Any] = {
            symbol: SimpleNamespace(function=number, library=SimpleNamespace(launch=self._launch(library, symbol)))
            for number, symbol in enumerate(symbols)
        }

    def _launch(self, library: ctypes.CDLL, symbol: str) -> Callable[[int], int]:
        def launch(address: int) -> int:
            self.launched.add(symbol)
            return int(library.emulate(address))

        return launch

    def __call__(self, x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, azp: torch.Tensor | None) -> None:
        """Quantise x into ``out`` as `cutlass_w8a8.quant_calls.run` would on a GPU; scale and azp as there."""
        request = check_quantize(x, out.dtype, self.spec.scheme, out, scale, azp, "none", ("scale", "azp"))
        aligned = x.data_ptr() % ALIGNMENT == 0 and out.data_ptr() % (ALIGNMENT // x.element_size()) == 0
        scan, call, words = launches(request, aligned, self._kernels, self._where, early=False)
        pointers = [tensor.data_ptr() for tensor in (x, out, scale, azp) if tensor is not None]
        # More than is written, to find out about that.
        partial = torch.full((words + 16,), -1, dtype=torch.int32)
        if self.spec.scheme.scans:
            pointers.append(partial.data_ptr() if scan else 0)
        if scan:
            scan(0, *pointers)
        call(0, *pointers)
        assert (partial[words:] == -1).all()


def _compiled(spec: QuantSpec, symbols: Sequence[str], folder: Path) -> Path:
    text = emit.render(spec)["kernel.cu"]
    found = re.search(r"^struct QuantCall \{.*?^\};$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    for pattern, replacement in _PTX:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    blocks = f"int64_t const blocks = {f'call->blocks ? call->blocks : {_ROWS}' if spec.scheme.scans else _ROWS};"
    entry = _ENTRY.format(call=found[0], symbols=", ".join(symbols), blocks=blocks)
    for header in ("cuda_fp16.h", "cuda_fp8.h"):
        (folder / header).touch()
    source, library = folder / f"{spec.name}.cpp", folder / f"{spec.name}.so"
    source.write_text(f'#define __CUDACC__\n#include "device.h"\n{text}{entry}')
    command = [str(find_cxx()[0]), "-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-w"]
    subprocess.run([*command, f"-I{_HERE}", f"-I{folder}", str(source), "-o", str(library)], check=True)
    return library
