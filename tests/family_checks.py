"""The 2.x family on a newer device: its kernels embed PTX, which the driver compiles for the device at hand."""

from __future__ import annotations

from unittest import mock

from cutlass_w8a8 import ops
from cutlass_w8a8.arch import SM80
from tests import cases, grid
from tests.cases import Combination
from tests.harness import Check, Plan

SM80_PLAN: Plan = {
    Combination("int8", "bf16"): ["16x64x128_w16x64x64_multistage_s5", "128x128x64_w64x64x64_multistage_s5"],
    Combination("int8", "fp16", "token", True, "token", "tensor"): ["64x128x128_w64x64x64_multistage_s5"],
    Combination("int8", "fp32", "tensor", True, "tensor", "channel"): ["32x64x128_w32x64x64_multistage_s5"],
    Combination("int8", "bf16", "token", True): [
        "64x64x128_w32x64x64_multistage_s4_streamk",
        "64x64x128_w32x64x64_multistage_s4_streamk_split0",
        "64x64x128_w32x64x64_multistage_s4_streamk_split3",
    ],
}


def sm80(device: str) -> list[Check]:
    """sm80 kernels through the public calls, over the whole grid, bit for bit."""
    with mock.patch.object(ops, "arch_for", return_value=SM80), mock.patch.dict(ops._prepared, clear=True):
        checks = grid.Grid(SM80_PLAN, device, with_model=False, aligned=True).run(cases.shapes())
    for check in checks:
        check.name, check.section = f"sm80 {check.name}", "sm80"
    return checks
