"""The rules: every reason a configuration can be refused for, met once; and nothing in the tables is refused."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections import Counter
from collections.abc import Callable
from math import prod

import pytest

from cutlass_w8a8.arch import ARCHS, SM75, SM80, SM89, SM90, SM100, SM103, SM110, SM120, SM121, Arch
from cutlass_w8a8.config import KernelConfig, Schedule
from cutlass_w8a8.dispatch import problems, rules, smem_bytes, validate
from cutlass_w8a8.dispatch.rules import blackwell, common, geforce, hopper, multistage
from cutlass_w8a8.dispatch.select import TABLES
from cutlass_w8a8.dispatch.table import Row
from cutlass_w8a8.dtypes import OUTPUT_DTYPES, DType
from cutlass_w8a8.errors import ConfigError, UnsupportedError
from cutlass_w8a8.evt.epilogues import FORMULAS, EpilogueSpec, ScaleA, ScaleB
from cutlass_w8a8.spec import KernelSpec
from tests.thread_map import faults


def spec(arch: Arch, config: str, operand: DType = DType.INT8, out: DType = DType.BF16) -> KernelSpec:
    return KernelSpec(arch, operand, out, EpilogueSpec.of(), KernelConfig.parse(config))


# Rule, arch, operand, configuration, the reason's beginning: one line for each reason a rule can give.
INT8, E4M3 = DType.INT8, DType.E4M3
IMPOSSIBLE = [
    (rules._schedule, SM80, INT8, "128x128x64_w64x64x64_pingpong_s4", "schedule pingpong does not exist for int8 on"),
    (rules._shared_memory, SM90, E4M3, "128x128x128_pingpong_s8", "8 stages of tile 128x128x128 need"),
    (common.stages, SM90, INT8, "64x16x64_pingpong_s33", "stages 33 is outside 2 to 32"),
    (common.options_3x, SM90, INT8, "128x128x128_w64x64x64_pingpong", "a warp tile is a choice of multistage"),
    (multistage.options, SM80, INT8, "128x128x64_w64x64x64_multistage_s4_swap", "swap is impossible"),
    (multistage.options, SM80, INT8, "128x128x64_2x1_w64x64x64_multistage_s4", "cluster 2x1: multistage kernels have"),
    (multistage.options, SM80, INT8, "128x128x64_w64x64x64_multistage", "a multistage kernel needs a number"),
    (multistage.copies, SM75, INT8, "128x128x64_w64x64x64_multistage_s3", "stages 3: sm75 has no asynchronous copies"),
    (multistage.tile, SM80, INT8, "128x128x64_multistage_s4", "a multistage kernel needs a warp tile"),
    (multistage.tile, SM80, INT8, "96x128x64_w64x64x64_multistage_s4", "tile m 96 is not a multiple of the warp"),
    (multistage.tile, SM80, INT8, "96x128x64_w32x64x64_multistage_s4", "tile m 96 is not a power of two from 16 on"),
    (multistage.warps, SM80, INT8, "256x256x64_w32x32x64_multistage_s2", "tile 256x256x64 is cut into 64 warp tiles"),
    (multistage.warps, SM80, INT8, "64x128x128_w64x32x64_multistage_s3", "warp tile n 32 with a sliced tile k is too"),
    (multistage.tile, SM80, INT8, "128x128x256_w64x64x64_multistage_s2", "tile k 256 is not 64 or 128"),
    (multistage.warps, SM80, INT8, "16x256x64_w16x32x64_multistage_s4", "tile m 16 with k 64 has too little to copy"),
    (multistage.tile, SM89, E4M3, "64x64x64_w64x64x64_multistage_s3_accurate", "warp tile 64x64 needs 256 accumulator"),
    (multistage.slices, SM89, E4M3, "64x64x128_w32x64x64_multistage_s4", "warp tile k 64 slices tile k 128"),
    (hopper.scheduler, SM90, INT8, "128x128x128_pingpong_streamk", "the stream-K scheduler needs the cooperative"),
    (common.no_slices, SM80, INT8, "64x64x128_w32x64x64_multistage_s4_slices2", "slices 2: only sm90's warp"),
    (hopper.slices, SM90, INT8, "64x32x256_ws_swap_slices3", "slices 3 is not 1, 2, 4 or 8"),
    (hopper.slices, SM90, INT8, "64x32x256_2x1_ws_swap_slices2", "slices 2 needs the schedule ws and the cluster 1x1"),
    (hopper.accurate, SM90, E4M3, "64x32x256_ws_swap_accurate", "accurate accumulation promotes"),
    (hopper.tile, SM90, INT8, "96x128x128_pingpong", "tile m 96 is not 64, 128 or 256"),
    (hopper.tile, SM90, INT8, "64x24x128_pingpong", "tile n 24 is not a multiple of 16"),
    (hopper.tile, SM90, INT8, "64x32x96_pingpong", "tile k 96 is not 64, 128, 256 or 512"),
    (hopper.warp_groups, SM90, INT8, "64x128x128_cooperative", "a cooperative kernel splits tile m over two"),
    (hopper.warp_groups, SM90, INT8, "128x256x64_pingpong", "tile 128x256 needs 256 accumulator registers"),
    (hopper.cluster, SM90, INT8, "128x128x128_3x1_pingpong", "cluster 3x1 is not a product of 1, 2, 4, 8"),
    (hopper.cluster, SM90, INT8, "64x16x128_4x1_pingpong", "tile n 16 cannot be shared by 4 blocks"),
    (blackwell.options, SM100, E4M3, "128x128x128_1sm_streamk", "the stream-K scheduler is not offered"),
    (blackwell.options, SM100, E4M3, "128x128x128_1sm_accurate", "accurate: tensor memory accumulates in one way"),
    (blackwell.tile, SM100, E4M3, "256x128x128_1sm", "tile m 256 is not 64 or 128, as 1sm needs"),
    (blackwell.tile, SM100, INT8, "256x48x128_2x1_2sm", "tile n 48 is not a multiple of 32 from 32 to 256"),
    (blackwell.tile, SM110, E4M3, "64x96x128_1sm", "tile n 96 is not made of parts 64 wide"),
    (blackwell.tile, SM110, E4M3, "128x128x96_1sm", "tile k 96 is not 64, 128 or 256"),
    (blackwell.cluster, SM100, E4M3, "128x128x128_16x1_1sm", "cluster 16x1 is not a product of 1, 2, 4, 8"),
    (blackwell.cluster, SM100, E4M3, "256x128x128_1x2_2sm", "cluster 1x2: 2sm tiles take two blocks along m"),
    (blackwell.cluster, SM100, E4M3, "128x32x128_8x1_2sm", "tile n: 16 rows cannot be shared by 4 blocks"),
    (geforce.options, SM120, E4M3, "128x128x128_2x1_cooperative", "cluster 2x1: this chip has no multicast"),
    (geforce.options, SM120, E4M3, "128x128x128_cooperative_streamk", "the stream-K scheduler does not exist"),
    (geforce.options, SM121, E4M3, "128x128x128_cooperative_accurate", "accurate: this main loop accumulates in one"),
    (geforce.tile, SM120, E4M3, "48x128x128_pingpong", "tile m 48 is not 16 or 32 or 64 or 128 or 256"),
    (geforce.tile, SM120, E4M3, "64x16x128_pingpong", "tile n 16 is not a multiple of 32"),
    (geforce.tile, SM120, E4M3, "64x64x32_pingpong", "tile k 32 is not 64, 128 or 256"),
    (geforce.tile, SM120, E4M3, "128x256x64_pingpong", "tile 128x256 needs 256 accumulator registers"),
]
LAUNCH = [
    (SM90, "128x128x128_cooperative_streamk_swizzle3", "swizzle 3 is not 1, 2, 4 or 8"),
    (SM90, "128x128x128_cooperative_split2", "splits 2 needs the stream-K scheduler"),
    (SM90, "128x128x128_cooperative_streamk_split65", "splits 65 is outside 0"),
    (SM80, "128x128x64_w64x64x64_multistage_s4_along_m", "multistage kernels have a tile order of their own"),
]


@pytest.mark.parametrize(("rule", "arch", "operand", "config", "reason"), IMPOSSIBLE, ids=[x[4] for x in IMPOSSIBLE])
def test_rule_gives_its_reason(rule: common.Rule, arch: Arch, operand: DType, config: str, reason: str) -> None:
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
    every = {rule for family in rules._RULES.values() for rule in family} | {rules._schedule, rules._shared_memory}
    met = Counter(line[0] for line in IMPOSSIBLE)
    assert met == {rule: reasons(rule) for rule in every}
    assert len(LAUNCH) == reasons(rules._launch_choices)


def test_multistage_rules_leave_nothing_uncopied_or_unstored() -> None:
    """Whatever they accept covers its tile, by CUTLASS's own arithmetic; and they are not needlessly strict."""
    accepted, sound = 0, 0
    powers = [16, 32, 64, 128, 256]
    for arch, (m, n, k), out in itertools.product(
        (SM75, SM80),
        itertools.product([*powers, 48, 96, 192], [*powers[1:], 96, 160], (64, 128)),
        (DType.BF16, DType.FP32),
    ):
        for warp in itertools.product(
            *([part for part in range(16, extent + 1, 16) if extent % part == 0] for extent in (m, n, k))
        ):
            config = KernelConfig((m, n, k), Schedule.MULTISTAGE, warp=warp, stages=2)
            wrong = faults((m, n, k), warp, out.bytes, turing=arch is SM75)
            if not problems(spec(arch, config.name, INT8, out)):
                assert wrong == [], (arch.name, config.name, out)
                accepted += 1
            powers_only = all(extent.bit_count() == 1 for extent in (m, n, k, *warp))
            small = warp[1] < 32 or warp[2] < 64 or warp[0] * warp[1] // 32 > 128
            sound += not wrong and powers_only and not small and m * n * k // prod(warp) <= 16
    # Of what covers its tile the rules may refuse what does not fit shared memory.
    assert accepted > 300 and 0.8 * sound <= accepted <= sound


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
    (reason,) = problems(kernel)
    assert "int8" in reason


def test_operand_type_without_tensor_cores_is_refused() -> None:
    kernel = spec(SM80, "128x128x64_w64x64x64_multistage_s4", E4M3)
    with pytest.raises(
        UnsupportedError, match=r"sm80 has no e4m3 tensor cores, which begin with .* 8\.9; quantise to int8"
    ):
        validate(kernel)
    assert len(problems(kernel)) == 1


def test_integers_have_no_accurate_form_to_refuse() -> None:
    assert problems(spec(SM100, "128x128x128_1sm_accurate")) == []


# Shared memory as the kernels' own types count it: sizeof(SharedStorage) of host halves compiled from these.
SMEM = [
    (SM100, E4M3, DType.BF16, "scaled_token_channel", "128x32x128_4x1_2sm_swap", 22, 231424),
    (SM100, E4M3, DType.FP32, "scaled-bias_token_channel", "128x32x128_4x1_2sm_swap", 21, 224768),
    (SM100, E4M3, DType.FP32, "scaled-bias_token_channel", "128x64x256_4x1_2sm_swap", 8, 214016),
    (SM100, E4M3, DType.BF16, "scaled_token_channel", "64x64x128_1sm", 13, 223232),
    (SM100, E4M3, DType.FP32, "scaled-bias_token_channel", "128x128x128_2x1_2sm", 12, 231424),
    (SM100, INT8, DType.FP32, "azp-token-bias_token_channel", "128x128x128_2x1_2sm", 11, 216064),
    (SM100, INT8, DType.FP32, "azp-token-bias_token_channel", "256x128x128_2x2_2sm", 7, 207872),
    (SM100, INT8, DType.FP32, "azp-token-bias_token_channel", "64x192x128_1sm_s3", 3, 135168),
    (SM100, E4M3, DType.BF16, "scaled-bias_token_channel", "256x224x128_2x2_2sm_swap", 6, 202752),
    (SM100, E4M3, DType.FP16, "scaled_token_channel", "128x192x128_4x2_2sm", 10, 222720),
    (SM120, E4M3, DType.BF16, "scaled_token_channel", "16x64x128_pingpong", 9, 96256),
    (SM120, E4M3, DType.FP32, "scaled-bias_token_channel", "64x64x128_pingpong", 5, 100352),
    (SM120, E4M3, DType.FP32, "scaled-bias_token_channel", "128x32x128_cooperative_swap", 4, 100352),
    (SM120, E4M3, DType.FP32, "scaled-bias_token_channel", "128x128x128_cooperative", 2, 83968),
    (SM103, INT8, DType.BF16, "azp-token-bias_token_channel", "128x128x64_w64x64x64_multistage_s5", 5, 81920),
    (SM80, INT8, DType.BF16, "scaled_token_channel", "256x128x64_w16x128x64_multistage_s2", 2, 139280),
    (SM80, INT8, DType.FP32, "scaled_token_channel", "256x128x64_w16x128x64_multistage_s2", 2, 69648),
    (SM80, INT8, DType.FP32, "scaled_token_channel", "128x128x128_w16x64x64_multistage_s2", 2, 69648),
    (SM80, INT8, DType.BF16, "scaled_token_channel", "128x256x64_w32x64x64_multistage_s2", 2, 67600),
    (SM80, INT8, DType.FP32, "scaled_token_channel", "128x256x64_w32x64x64_multistage_s2", 2, 49152),
    (SM80, INT8, DType.BF16, "scaled_token_channel", "128x128x128_w32x64x64_multistage_s2", 2, 65536),
    (SM89, E4M3, DType.BF16, "scaled_token_channel", "256x128x64_w16x128x64_multistage_s2", 2, 69648),
    (SM89, E4M3, DType.FP32, "scaled_token_channel", "256x128x64_w16x128x64_multistage_s2", 2, 139280),
    (SM89, INT8, DType.BF16, "scaled_token_channel", "128x64x64_w16x64x64_multistage_s3_streamk", 3, 36880),
]


@pytest.mark.parametrize(
    ("arch", "operand", "out", "epilogue", "config", "stages", "expected"),
    SMEM,
    ids=[f"{line[1].value}-{line[2].value}-{line[4]}" for line in SMEM],
)
def test_shared_memory_is_what_the_kernels_types_count(
    arch: Arch, operand: DType, out: DType, epilogue: str, config: str, stages: int, expected: int
) -> None:
    kernel = KernelSpec(arch, operand, out, EpilogueSpec.parse(epilogue), KernelConfig.parse(config))
    assert smem_bytes(kernel, stages) == expected


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
