"""Configurations and specs as text: what is written is read back, and nothing else is."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutlass_w8a8.arch import ARCHS, SM90
from cutlass_w8a8.config import KernelConfig, Raster, Schedule, Scheduler
from cutlass_w8a8.dtypes import OUTPUT_DTYPES, DType
from cutlass_w8a8.errors import ConfigError, UnsupportedError, W8A8Error
from cutlass_w8a8.evt.epilogues import FORMULAS, EpilogueSpec, ScaleA, ScaleB
from cutlass_w8a8.spec import KernelSpec

extents = st.integers(1, 512)
tiles = st.tuples(extents, extents, extents)
configs = st.builds(
    KernelConfig,
    tile=tiles,
    schedule=st.sampled_from(Schedule),
    cluster=st.tuples(extents, extents),
    warp=st.none() | tiles,
    stages=st.none() | st.integers(1, 99),
    swap_ab=st.booleans(),
    scheduler=st.sampled_from(Scheduler),
    fast_accum=st.booleans(),
    slices=st.sampled_from((1, 2, 4, 8)),
    splits=st.integers(0, 99),
    swizzle=st.integers(1, 8),
    raster=st.sampled_from(Raster),
)
epilogues = st.builds(EpilogueSpec, st.sampled_from(sorted(FORMULAS)), st.sampled_from(ScaleA), st.sampled_from(ScaleB))
specs = st.builds(
    KernelSpec,
    arch=st.sampled_from(list(ARCHS.values())),
    operand=st.sampled_from([DType.E4M3, DType.INT8]),
    out=st.sampled_from(OUTPUT_DTYPES),
    epilogue=epilogues,
    config=configs,
)


@given(configs)
def test_name_is_read_back(config: KernelConfig) -> None:
    assert KernelConfig.parse(config.name) == config


@given(configs, st.randoms())
def test_tokens_come_in_any_order(config: KernelConfig, random: object) -> None:
    tokens = config.name.replace("along_", "along-").split("_")
    random.shuffle(tokens)  # type: ignore[attr-defined]
    assert KernelConfig.parse("_".join(tokens).replace("along-", "along_")) == config


@given(configs)
def test_compiled_part_drops_launch_choices_only(config: KernelConfig) -> None:
    compiled = config.compiled
    assert (compiled.splits, compiled.swizzle, compiled.raster) == (1, 1, Raster.HEURISTIC)
    assert replace(compiled, splits=config.splits, swizzle=config.swizzle, raster=config.raster) == config


def test_defaults_may_be_left_out() -> None:
    assert KernelConfig.parse("128x64x128_ws") == KernelConfig((128, 64, 128), Schedule.WARP_SPECIALIZED)
    assert KernelConfig.parse("ws_128x64x128_persistent").scheduler is Scheduler.PERSISTENT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("128x128x128_2x1_pingpang", "'pingpang'"),
        ("128x128_pingpong", "names no tile"),
        ("128x128x128_2x1", "names no schedule"),
        ("128x128x128_2x1_1x2_pingpong", "cluster twice"),
        ("128x128x128_pingpong_s3_s4", "stages twice"),
        ("128x128x128_pingpong_ws", "schedule twice"),
        ("128x128x128__pingpong", "''"),
        ("128x128x-128_pingpong", "'128x128x-128'"),
        ("128x128x128_pingpong_S4", "'S4'"),
        ("", "''"),
    ],
)
def test_bad_text_is_refused_with_the_token(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KernelConfig.parse(text)
    assert message in str(caught.value) and repr(text) in str(caught.value)


@given(specs)
def test_spec_is_read_back_from_json(spec: KernelSpec) -> None:
    assert KernelSpec.from_json(spec.to_json()) == spec
    assert KernelSpec.from_json(spec.to_json()).to_json() == spec.to_json()


@given(specs, specs)
def test_names_tell_specs_apart(one: KernelSpec, other: KernelSpec) -> None:
    assert (one.name == other.name) == (one == other)
    assert "/" not in one.name and not one.name.startswith(".")


@given(specs)
def test_command_is_one_line_of_plain_words(spec: KernelSpec) -> None:
    command = spec.command("build")
    assert shlex.split(command) == command.split(" ")


def test_int8_specs_do_not_differ_by_accumulation() -> None:
    config = KernelConfig.parse("128x128x128_pingpong_accurate")
    exact = KernelSpec(SM90, DType.INT8, DType.BF16, EpilogueSpec.of(), config)
    assert exact == replace(exact, config=replace(config, fast_accum=True))
    rounded = replace(exact, operand=DType.E4M3, config=config)
    assert rounded != replace(rounded, config=replace(config, fast_accum=True))


def test_errors_are_of_the_package_and_of_python() -> None:
    assert issubclass(ConfigError, W8A8Error) and issubclass(ConfigError, ValueError)
    assert issubclass(UnsupportedError, W8A8Error) and issubclass(UnsupportedError, NotImplementedError)
