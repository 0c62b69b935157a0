"""Compiler flags that shape a kernel's binary, apart from machine paths. They enter the cache key."""

from __future__ import annotations

import json
from dataclasses import dataclass

from cutlass_w8a8.arch import Family
from cutlass_w8a8.spec import KernelSpec, Spec

# Widths that CuTe has a wgmma for in any case.
_COMMON_WGMMA = (16, 32, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Flags:
    """The flags of the three steps.

    Attributes:
        device: nvcc, device half, written as a fat binary.
        host: C++ compiler, host half, written as an object.
        link: C++ compiler, linking both into one shared library.
    """

    device: tuple[str, ...]
    host: tuple[str, ...]
    link: tuple[str, ...]

    def to_json(self) -> str:
        """Canonical JSON text, for keys and manifests."""
        return json.dumps({"device": self.device, "host": self.host, "link": self.link}, sort_keys=True)


def flags_for(spec: Spec) -> Flags:
    """The flags that compile ``spec``'s kernel."""
    defines = ["-DNDEBUG"]
    # CuTe knows the other widths of wgmma under this macro only; without it it makes such a tile of narrow ones.
    if isinstance(spec, KernelSpec) and spec.config.tile[1] not in _COMMON_WGMMA and spec.family is Family.HOPPER:
        defines.append("-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED")
    return Flags(
        device=(
            "-fatbin",
            "-gencode",
            spec.arch.gencode,
            "-std=c++17",
            "-O3",
            "--expt-relaxed-constexpr",
            "-Xptxas=-v",
            *defines,
        ),
        # -fpermissive -w: a plain C++ compiler meets device-only names inside CUTLASS templates it never calls.
        # Hidden visibility also keeps function-local statics of one kernel from being merged with another's.
        host=("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fpermissive", "-w", *defines),
        # Some toolchains link libstdc++ statically; its symbols must not be offered to the rest of the process.
        link=("-shared", "-Wl,--as-needed", "-Wl,--exclude-libs,ALL", "-Wl,-z,defs", "-ldl"),
    )
