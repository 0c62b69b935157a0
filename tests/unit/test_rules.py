"""The rules: every reason a configuration can be refused for, met once; and nothing in the tables is refused."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable

import pytest

from cutlass_w8a8.arch import ARCHS, SM80, SM90, Arch
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch import problems, rules, smem_bytes, validate
from cutlass_w8a8.dispatch.select import TABLES
from cutlass_w8a8.dispatch.table import Row
from cutlass_w8a8.dtypes import OUTPUT_DTYPES, DType
from cutlass_w8a8.errors import ConfigError, UnsupportedError
from cutlass_w8a8.evt.epilogues import FORMULAS, EpilogueSpec, ScaleA, ScaleB
from cutlass_w8a8.spec import KernelSpec


def spec(arch: Arch, config: str, operand: DType = DType.INT8, out: DType = DType.BF16) -> KernelSpec:
    return KernelSpec(arch, operand, out, EpilogueSpec.of(), KernelConfig.parse(config))


# Rule, arch, operand, configuration, the reason's beginning: one line for each reason a rule can give.
IMPOSSIBLE = [
    (
        rules._operands,
        SM80,
        DType.E4M3,
        "128x128x64_w64x64x64_multistage_s4",
        "operand type e4m3 has no kernels on sm80",
    ),
    (rules._schedule, SM80, DType.INT8, "128x128x64_w64x64x64_pingpong_s4", "schedule pingpong does not exist on sm80"),
    (rules._stages, SM90, DType.INT8, "64x16x64_pingpong_s33", "stages 33 is outside 2 to 32"),
    (rules._shared_memory, SM90, DType.E4M3, "128x128x128_pingpong_s8", "8 stages of tile 128x128x128 need"),
    (rules._options_2x, SM80, DType.INT8, "128x128x64_w64x64x64_multistage_s4_swap", "swap is impossible"),
    (rules._options_2x, SM80, DType.INT8, "128x128x64_2x1_w64x64x64_multistage_s4", "cluster 2x1: clusters begin with"),
    (rules._options_2x, SM80, DType.INT8, "128x128x64_w64x64x64_multistage_s4_pdl", "programmatic dependent launch"),
    (rules._options_2x, SM80, DType.INT8, "128x128x64_w64x64x64_multistage", "a multistage kernel needs a number"),
    (rules._tile_2x, SM80, DType.INT8, "128x128x64_multistage_s4", "a multistage kernel needs a warp tile"),
    (rules._tile_2x, SM80, DType.INT8, "96x128x64_w64x64x64_multistage_s4", "tile m 96 is not a multiple of the warp"),
    (rules._tile_2x, SM80, DType.INT8, "128x80x64_w64x80x64_multistage_s4", "warp tile n 80 is not a multiple of 32"),
    (rules._tile_2x, SM80, DType.INT8, "256x256x64_w32x32x64_multistage_s2", "tile (256, 256, 64) in warp tiles"),
    (rules._tile_2x, SM80, DType.INT8, "128x128x256_w64x64x64_multistage_s2", "tile k 256 is not 64 or 128"),
    (rules._tile_2x, SM80, DType.INT8, "16x256x64_w16x32x64_multistage_s4", "tile m 16 with k 64 has too little for"),
    (rules._tile_2x, SM80, DType.INT8, "128x128x64_w128x64x64_multistage_s3", "warp tile 128x64 needs 256 accumulator"),
    (rules._options_3x, SM90, DType.INT8, "128x128x128_w64x64x64_pingpong", "a warp tile is a choice of multistage"),
    (
        rules._options_3x,
        SM90,
        DType.INT8,
        "128x128x128_pingpong_streamk",
        "the stream-K scheduler needs the cooperative",
    ),
    (rules._options_3x, SM90, DType.INT8, "128x128x128_cooperative_streamk_pdl", "CUTLASS's sm90 stream-K scheduler"),
    (rules._accurate_3x, SM90, DType.E4M3, "64x32x256_ws_swap_accurate", "accurate accumulation promotes"),
    (rules._tile_3x, SM90, DType.INT8, "96x128x128_pingpong", "tile m 96 is not 64, 128 or 256"),
    (rules._tile_3x, SM90, DType.INT8, "64x24x128_pingpong", "tile n 24 is not a multiple of 16"),
    (rules._tile_3x, SM90, DType.INT8, "64x32x96_pingpong", "tile k 96 is not 64, 128 or 256"),
    (rules._warp_groups, SM90, DType.INT8, "64x128x128_cooperative", "a cooperative kernel splits tile m over two"),
    (rules._warp_groups, SM90, DType.INT8, "128x256x64_pingpong", "tile 128x256 needs 256 accumulator registers"),
    (rules._cluster_3x, SM90, DType.INT8, "128x128x128_3x1_pingpong", "cluster 3x1 is not a product of 1, 2, 4, 8"),
    (rules._cluster_3x, SM90, DType.INT8, "64x16x128_4x1_pingpong", "tile n 16 cannot be shared by 4 blocks"),
]
LAUNCH = [
    (SM90, "128x128x128_cooperative_streamk_swizzle3", "swizzle 3 is not 1, 2, 4 or 8"),
    (SM90, "128x128x128_cooperative_split2", "splits 2 needs the stream-K scheduler"),
    (SM90, "128x128x128_cooperative_streamk_split65", "splits 65 is outside 0"),
    (SM80, "128x128x64_w64x64x64_multistage_s4_along_m", "multistage kernels have a tile order of their own"),
]


@pytest.mark.parametrize(("rule", "arch", "operand", "config", "reason"), IMPOSSIBLE, ids=[x[4] for x in IMPOSSIBLE])
def test_rule_gives_its_reason(rule: rules.Rule, arch: Arch, operand: DType, config: str, reason: str) -> None:
    impossible = spec(arch, config, operand)
    assert [found for found in rule(impossible) if found.startswith(reason)]
    with pytest.raises(ConfigError) as caught:
        validate(impossible)
    assert reason in str(caught.value)
    assert impossible.config.name in str(caught.value) and arch.name in str(caught.value)


@pytest.mark.parametrize(("arch", "config", "reason"), LAUNCH)
def test_launch_choices_are_checked_though_the_spec_drops_them(arch: Arch, config: str, reason: str) -> None:
    launch = KernelConfig.parse(config)
    kernel = spec(arch, config)
    assert problems(kernel) == []
    with pytest.raises(ConfigError, match=reason):
        validate(kernel, launch)


def test_every_reason_is_met() -> None:
    every = {rule for family in rules._RULES.values() for rule in family}
    met = Counter(line[0] for line in IMPOSSIBLE)
    assert met == {rule: reasons(rule) for rule in every}
    assert len(LAUNCH) == reasons(rules._launch_choices)


def test_no_zero_in_a_configuration() -> None:
    for config in ("64x0x128_pingpong", "128x128x64_w0x64x64_multistage_s3", "64x64x128_0x1_ws", "64x64x128_ws_s0"):
        with pytest.raises(ConfigError, match="extents start at 1"):
            KernelConfig.parse(config)
    with pytest.raises(ConfigError, match="has the token"):
        KernelConfig.parse("9" * 5000 + "x1x1_ws")


def test_accurate_accumulation_needs_twice_the_registers() -> None:
    assert problems(spec(SM90, "128x256x128_2x1_cooperative", DType.E4M3)) == []
    (reason,) = problems(spec(SM90, "128x256x128_2x1_cooperative_accurate", DType.E4M3))
    assert "needs 256 accumulator registers" in reason


def test_automatic_stages_leave_room_for_two() -> None:
    epilogue = EpilogueSpec.of(azp="token", bias=True)
    tight = KernelConfig.parse("256x128x256_cooperative")
    (reason,) = problems(KernelSpec(SM90, DType.INT8, DType.FP32, epilogue, tight))
    assert "2 stages of tile 256x128x256" in reason
    explicit = KernelConfig.parse("256x128x256_cooperative_s2")
    assert problems(KernelSpec(SM90, DType.INT8, DType.FP32, epilogue, explicit)) == []


def reasons(function: Callable[..., object]) -> int:
    """How many ``yield`` statements a rule has."""
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))
    return sum(isinstance(node, ast.Yield) for node in nodes)


def test_all_reasons_are_given_at_once() -> None:
    found = problems(spec(SM90, "96x24x96_pingpong"))
    assert len(found) >= 3


def test_zero_point_with_fp8_is_refused() -> None:
    epilogue = EpilogueSpec.of(azp="token")
    kernel = KernelSpec(SM90, DType.E4M3, DType.BF16, epilogue, KernelConfig.parse("128x128x128_pingpong"))
    with pytest.raises(UnsupportedError, match="int8"):
        validate(kernel)


ROWS = [
    (arch, operand, row)
    for arch in ARCHS.values()
    for operand, rows in TABLES[arch.name].items()
    for row in rows
]  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "operand", "row"),
    ROWS,
    ids=[f"{arch.name}-{operand.value}-{row.config.name}" for arch, operand, row in ROWS],
)
def test_tables_hold_possible_configurations_only(arch: Arch, operand: DType, row: Row) -> None:
    formulas = [name for name in FORMULAS if operand is DType.INT8 or "azp" not in name]
    for formula in formulas:
        for out in OUTPUT_DTYPES:
            epilogue = EpilogueSpec(formula, ScaleA.TOKEN, ScaleB.CHANNEL)
            kernel = KernelSpec(arch, operand, out, epilogue, row.config)
            assert problems(kernel, row.config) == [], kernel.name
            assert smem_bytes(kernel, row.config.stages or 2) <= arch.smem_bytes
