"""Portable kernels on a newer device: they embed PTX, which the driver compiles for the device at hand."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import cutlass_w8a8
from cutlass_w8a8.arch import ARCHS, Arch, Family
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch import rows_of
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.runtime import device as devices
from cutlass_w8a8.runtime.device import arch_of
from cutlass_w8a8.spec import KernelSpec
from tests import cases, grid
from tests.cases import Combination
from tests.harness import Check, Plan

# Beside those of the tables: tiles of slices along k, stream-K whole and divided, and accurate sums.
_ONE_STAGE_PAIR = ("64x64x64_w32x64x64_multistage_s2", "64x128x128_w64x64x128_multistage_s2_streamk_split0")
_DEEP = (
    "16x64x128_w16x64x64_multistage_s5",
    "64x64x128_w32x64x64_multistage_s4_streamk",
    "64x64x128_w32x64x64_multistage_s4_streamk_split0",
    "64x64x128_w32x64x64_multistage_s4_streamk_split3",
)
_FP8 = (
    "128x128x64_w64x64x64_multistage_s5",
    "128x128x64_w64x64x64_multistage_s4_streamk",
    "128x128x64_w64x64x64_multistage_s4_streamk_split2",
    "64x64x64_w32x32x64_multistage_s5_accurate",
    "128x64x64_w64x32x64_multistage_s4_accurate",
)
# All of their text is that of sm80's kernels but the name of the target, so a few combinations suffice.
_LIKE_SM80 = ("sm86", "sm87")


def portable() -> tuple[Arch, ...]:
    """The architectures whose kernels newer devices run."""
    return tuple(arch for arch in ARCHS.values() if arch.portable)


def _combinations(arch: Arch, operand: DType) -> list[Combination]:
    """bf16 results in every granularity, the others in the finest; all of them for fp8."""
    every = [c for c in cases.combinations() if c.operand == operand.value]
    finest = [c for c in every if (c.scale_a, c.scale_b) == ("token", "channel")]
    if arch.name in _LIKE_SM80:
        return finest[::2]
    return every if operand is DType.E4M3 else [c for c in every if c.out == "bf16" or c in finest]


def plan(arch: Arch) -> Plan:
    """What is run for ``arch``: configurations take turns, and one combination of each operand type has all of them."""
    found: Plan = {}
    for operand in arch.operands:
        extra = _FP8 if operand is DType.E4M3 else _ONE_STAGE_PAIR if arch.name == "sm75" else _DEEP
        configs = [row.config.name for row in rows_of(arch, operand)] + list(extra)
        chosen = _combinations(arch, operand)
        found |= {c: [config] for c, config in zip(chosen, itertools.cycle(configs), strict=False)}
        found[max(chosen, key=lambda c: (c.bias, c.azp == "token", c.out == "bf16"))] = [None, *configs]
    return found


def specs(arch: Arch) -> list[KernelSpec]:
    """The kernels that `plan` needs."""
    return list(
        dict.fromkeys(
            KernelSpec(arch, DType(c.operand), DType(c.out), EpilogueSpec.parse(c.epilogue), KernelConfig.parse(config))
            for c, configs in plan(arch).items()
            for config in configs
            if config is not None
        )
    )


def grid_options(arch: Arch) -> dict[str, Any]:
    """How `grid.Grid` is to judge kernels of ``arch``: what they demand of operands, and how fp8 sums come about."""
    families = {loop.operand: loop.family for loop in arch.mainloops}
    multistage = Family.MULTISTAGE
    return {
        "with_model": families.get(DType.E4M3) is Family.HOPPER,
        "aligned": multistage in families.values(),
        "fp8_class": "tile128-fast" if families.get(DType.E4M3) is multistage else "fast",
    }


def judged(device: str) -> dict[str, Any]:
    """`grid_options` of the arch that serves the current device; the evaluator's results are judged as sm90's."""
    return {} if device == "cpu" else grid_options(arch_of(devices.device(torch.cuda.current_device())))


def run(device: str) -> list[Check]:
    """Every portable architecture through the public calls, over the whole grid."""
    checks: list[Check] = []
    for arch in portable():
        with cutlass_w8a8.use_arch(arch.name):
            found = grid.Grid(plan(arch), device, **grid_options(arch)).run(cases.shapes())
            found += grid.row_invariance({c: [None] for c, configs in plan(arch).items() if None in configs}, device)
        for check in found:
            check.name, check.section = f"{arch.name} {check.name}", "portable"
        checks += found
    return checks
