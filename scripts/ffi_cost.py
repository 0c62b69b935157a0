#!/usr/bin/env python3
"""What one call into C costs, by foreign function interface. Needs a C++ compiler, no GPU.

    python scripts/ffi_cost.py --json ffi.json

The functions called do nothing but read their arguments: a GEMM launch takes about ten pointers and integers, either
as arguments or in a struct that was filled when the call was prepared and in which only the pointers change.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import statistics
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cutlass_w8a8.bench import machine

POINTERS = 10
POINTER_LIST = ", ".join(f"void* p{i}" for i in range(POINTERS))
STRUCT = f"typedef struct {{ {' '.join(f'void* p{i};' for i in range(POINTERS))} long extents[16]; }} Call;"
C_SOURCE = f"""
{STRUCT}
extern "C" int launch_struct(const Call* call) {{ return call->p0 == call->p{POINTERS - 1}; }}
extern "C" int launch_pointers({POINTER_LIST}) {{ return p0 == p{POINTERS - 1}; }}
"""
TVM_SOURCE = f"""
#include <cstdint>
#include <tvm/ffi/tvm_ffi.h>
static int64_t launch({", ".join(f"int64_t p{i}" for i in range(POINTERS))}) {{ return p0 == p{POINTERS - 1}; }}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch, launch);
"""
ADDRESSES = tuple(0x7F0000000000 + 4096 * i for i in range(POINTERS))
"""Addresses as large as a device's: small integers would be cheaper to pass."""


def compile_library(source: str, folder: Path, name: str, *flags: str) -> Path:
    """Compile C++ text to a shared library."""
    path = folder / f"{name}.cpp"
    path.write_text(source)
    library = folder / f"lib{name}.so"
    command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", str(path), "-o", str(library), *flags]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


# Default arguments named _ below keep alive what only C points to.


def nothing(_: Path) -> Callable[[], object]:
    """The loop and an empty Python call: what every other line contains."""
    return lambda: None


def ctypes_arguments(library: Path) -> Callable[[], object]:
    """ctypes, one argument for each pointer."""
    function = ctypes.CDLL(str(library)).launch_pointers
    function.argtypes = [ctypes.c_void_p] * POINTERS
    function.restype = ctypes.c_int
    arguments = ADDRESSES
    return lambda: function(*arguments)


def ctypes_struct(library: Path) -> Callable[[], object]:
    """ctypes, the address of a prepared struct into which the pointers are packed."""
    function = ctypes.CDLL(str(library)).launch_struct
    function.argtypes = [ctypes.c_void_p]
    function.restype = ctypes.c_int
    buffer = bytearray(8 * (POINTERS + 16))
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    pack = struct.Struct(f"{POINTERS}Q").pack_into
    pointers = ADDRESSES

    def call() -> object:
        pack(buffer, 0, *pointers)
        return function(address)

    return call


def ctypes_fixed_struct(library: Path) -> Callable[[], object]:
    """ctypes, a prepared struct that does not change: the least a ctypes call costs."""
    function = ctypes.CDLL(str(library)).launch_struct
    function.argtypes = [ctypes.c_void_p]
    function.restype = ctypes.c_int
    buffer = bytearray(8 * (POINTERS + 16))
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))

    def call(_: Any = buffer) -> object:
        return function(address)

    return call


def cffi_arguments(library: Path) -> Callable[[], object]:
    """cffi in ABI mode, one argument for each pointer."""
    ffi = importlib.import_module("cffi").FFI()
    ffi.cdef(f"int launch_pointers({', '.join(['uintptr_t'] * POINTERS)});")
    handle = ffi.dlopen(str(library))
    function, pointers = handle.launch_pointers, ADDRESSES

    def call(_: Any = handle) -> object:
        return function(*pointers)

    return call


def cffi_struct(library: Path) -> Callable[[], object]:
    """cffi in ABI mode, a prepared struct into which the pointers are packed."""
    ffi = importlib.import_module("cffi").FFI()
    ffi.cdef(f"{STRUCT} int launch_struct(const Call*);")
    handle = ffi.dlopen(str(library))
    function = handle.launch_struct
    record = ffi.new("Call*")
    buffer = ffi.buffer(record)
    pack = struct.Struct(f"{POINTERS}Q").pack_into
    pointers = ADDRESSES

    def call(_: Any = handle) -> object:
        pack(buffer, 0, *pointers)
        return function(record)

    return call


def tvm_ffi_arguments(library: Path) -> Callable[[], object]:
    """apache-tvm-ffi, one argument for each pointer, unpacked by its C++ side."""
    tvm_ffi = importlib.import_module("tvm_ffi")
    located = importlib.import_module("tvm_ffi.libinfo")
    includes = [f"-I{path}" for path in located.include_paths()]
    where = Path(located.find_libtvm_ffi())
    flags = [*includes, f"-L{where.parent}", f"-Wl,-rpath,{where.parent}", "-ltvm_ffi"]
    module = tvm_ffi.load_module(str(compile_library(TVM_SOURCE, library.parent, "tvm", *flags)))
    function, pointers = module.launch, ADDRESSES

    def call(_: Any = module) -> object:
        return function(*pointers)

    return call


CANDIDATES: dict[str, Callable[[Path], Callable[[], object]]] = {
    "empty Python call": nothing,
    "ctypes, 10 arguments": ctypes_arguments,
    "ctypes, struct patched by pack_into": ctypes_struct,
    "ctypes, struct as it is": ctypes_fixed_struct,
    "cffi (ABI mode), 10 arguments": cffi_arguments,
    "cffi (ABI mode), struct patched by pack_into": cffi_struct,
    "apache-tvm-ffi, 10 arguments": tvm_ffi_arguments,
}


def measure(calls: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, float]:
    """Median nanoseconds of a call; rounds interleaved, so that a slow moment touches all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter_ns()
            for _ in range(repeats):
                call()
            times[name].append((time.perf_counter_ns() - start) / repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--repeats", type=int, default=20000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    options = parser.parse_args()
    missing: dict[str, str] = {}
    calls: dict[str, Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(C_SOURCE, Path(folder), "null")
        for name, make in CANDIDATES.items():
            try:
                calls[name] = make(library)
                calls[name]()
            except (ImportError, OSError, AttributeError, subprocess.CalledProcessError) as error:
                calls.pop(name, None)
                missing[name] = f"{type(error).__name__}: {getattr(error, 'stderr', None) or error}"[:500]
        times = measure(calls, options.rounds, options.repeats)
    base = times["empty Python call"]
    print("| interface | ns per call | less the empty call |\n|---|---|---|")
    for name, nanoseconds in times.items():
        print(f"| {name} | {nanoseconds:.0f} | {nanoseconds - base:.0f} |")
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}")
    if options.json:
        versions = {}
        for module in ("cffi", "tvm_ffi"):
            try:
                versions[module] = getattr(importlib.import_module(module), "__version__", "unknown")
            except ImportError:
                versions[module] = None
        machine.write_json(
            options.json,
            {
                "machine": machine.facts() | {"platform": sysconfig.get_platform()},
                "versions": versions,
                "nanoseconds": times,
                "missing": missing,
                "rounds": options.rounds,
                "repeats": options.repeats,
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
