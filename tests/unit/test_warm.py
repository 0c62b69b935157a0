"""warmup, and ``build --weights``: which kernels they get, by asking dispatch, and that they get each once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8 import batch, calls, pipeline, settings, wanted
from cutlass_w8a8.arch import SM80, SM90
from cutlass_w8a8.cli import main
from cutlass_w8a8.dispatch import quant_symbols
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ArgumentError, CacheError, LaunchError, ToolchainError, UnsupportedError
from cutlass_w8a8.evt import epilogues
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.problem import OVERLAPS
from cutlass_w8a8.spec import KernelSpec, QuantSpec, Scheme, Spec
from cutlass_w8a8.worker import Outcome
from tests.unit.fake_gpu import WHERE, FakeGpu, on_gpu

WEIGHTS = [(512, 1024), (1024, 512)]
MS = (1, 16, 96, 4096)
QUANTISES = QuantSpec(SM90, DType.BF16, DType.E4M3)


def served(gpu: FakeGpu, weights: Sequence[tuple[int, int]], ms: Sequence[int], **options: Any) -> list[str]:
    """The kernels that calls with these shapes run."""
    gpu.ran.clear()
    for n, k in weights:
        for m in ms:
            x = torch.zeros(m, k).bfloat16()
            a, scale_a = cutlass_w8a8.quantize_per_token(on_gpu(x), torch.float8_e4m3fn)
            b = on_gpu(torch.zeros(n, k).to(torch.float8_e4m3fn).t())
            cutlass_w8a8.scaled_mm(on_gpu(a), b, on_gpu(scale_a), on_gpu(torch.ones(1, n)), **options)
    return list(dict.fromkeys(gpu.ran))


@pytest.mark.parametrize("policy", ["block", "background"])
def test_calls_find_all_that_they_need(
    gpu: FakeGpu, compiled: Any, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_JIT", policy)
    report = cutlass_w8a8.warmup(WEIGHTS, ms=MS, jobs=3)
    assert compiled.specs == list(report.kernels) and len(set(compiled.specs)) == len(compiled.specs) > 3
    assert compiled.jobs == [3]
    assert (report.compiled, report.cached, report.loaded) == (len(compiled.specs), 0, len(compiled.specs))
    assert report.seconds > 0
    # The quantisation kernel has several entry points, and each must be there.
    loaded = list(gpu.loaded)
    assert len(loaded) == len(report.kernels) - 1 + len(quant_symbols(Scheme.TOKEN))
    gpu.capturing = True
    ran = served(gpu, WEIGHTS, MS)
    assert sorted(ran) == sorted(spec.name for spec in report.kernels)
    assert gpu.loaded == loaded and not gpu.blocking and not gpu.behind


def test_what_is_there_is_not_compiled_again(gpu: FakeGpu, compiled: Any) -> None:
    first = cutlass_w8a8.warmup(WEIGHTS[0], ms=MS)
    gpu.loaded.clear()
    again = cutlass_w8a8.warmup(WEIGHTS[0], ms=MS)
    assert again.kernels == first.kernels and compiled.specs == list(first.kernels)
    assert (again.compiled, again.cached, again.loaded) == (0, len(first.kernels), len(first.kernels))
    assert gpu.loaded == []


def test_options_reach_dispatch(gpu: FakeGpu, compiled: Any) -> None:
    report = cutlass_w8a8.warmup(
        WEIGHTS[0],
        ms=(64,),
        dtype=torch.int8,
        out_dtype=torch.float16,
        bias=True,
        azp="token",
        scale_a="token",
        scale_b="tensor",
        quantize=torch.float32,
    )
    quantises, multiplies = report.kernels
    assert quantises == QuantSpec(SM90, DType.FP32, DType.INT8, Scheme.TOKEN_AZP)
    assert isinstance(multiplies, KernelSpec)
    assert multiplies.operand is DType.INT8 and multiplies.out is DType.FP16
    assert multiplies.epilogue == EpilogueSpec.of("token", "tensor", "token", True)
    assert cutlass_w8a8.warmup(WEIGHTS[0], ms=(64,), quantize=None).kernels == report_of(64)
    seen: list[calls.Options] = []
    real = wanted.choose

    def choose(*given: Any, **facts: Any) -> Any:
        seen.append(calls.Options(given[2], facts["overlap"], facts["batch_invariant"]))
        assert (facts["sm_count"], facts["device"]) == (132, WHERE.name)
        return real(*given, **facts)

    wanted_choose, wanted.choose = wanted.choose, choose
    try:
        with settings.batch_invariant():
            cutlass_w8a8.warmup(WEIGHTS[0], ms=(64,), overlap="weights")
        cutlass_w8a8.warmup(WEIGHTS[0], ms=(64,), batch_invariant=False)
    finally:
        wanted.choose = wanted_choose
    assert seen == [settings.options(None, "weights", True), settings.options(None, "launch", False)]


def report_of(m: int) -> tuple[KernelSpec, ...]:
    x = torch.zeros(m, 1024).to(torch.float8_e4m3fn)
    b = torch.zeros(512, 1024).to(torch.float8_e4m3fn).t()
    explained = cutlass_w8a8.explain(
        x, b, torch.ones(m, 1), torch.ones(1, 512), capability=(9, 0), sm_count=WHERE.sm_count
    )
    return (explained.spec,)


class Layer(torch.nn.Module):
    def __init__(self, mm: Any) -> None:
        super().__init__()
        self.mm = mm


class Lazy(torch.nn.Module):
    """Prepares when it is asked to."""

    def prepared_mms(self) -> list[cutlass_w8a8.PreparedMM]:
        return [prepared(256, config="128x128x128_pingpong")]


def prepared(n: int, dtype: torch.dtype = torch.int8, **options: Any) -> cutlass_w8a8.PreparedMM:
    return cutlass_w8a8.prepare(torch.zeros(n, 512).to(dtype).t(), torch.ones(1, n), **options)


def test_prepared_calls_and_modules(gpu: FakeGpu, compiled: Any) -> None:
    sums = torch.zeros(64, dtype=torch.int32)
    plain, biased, zeroed = prepared(64), prepared(64, bias=torch.zeros(64).bfloat16()), prepared(64, azp_adj=sums)
    fp8 = prepared(128, torch.float8_e4m3fn, config="64x32x128_pingpong_swap")
    model = torch.nn.Sequential(
        Layer(plain), Layer({"x": [biased, (zeroed,)]}), torch.nn.ModuleList([Layer(fp8), Lazy()])
    )
    report = cutlass_w8a8.warmup(model, ms=(8,))
    kernels = [spec for spec in report.kernels if isinstance(spec, KernelSpec)]
    assert [(spec.operand.value, spec.epilogue.formula) for spec in kernels] == [
        ("int8", "scaled"),
        ("int8", "scaled-bias"),
        ("int8", "azp-token"),
        ("e4m3", "scaled"),
        ("int8", "scaled"),
    ]
    assert kernels[3].config.name == "64x32x128_1x1_pingpong_swap"
    assert kernels[4].config.name == "128x128x128_1x1_pingpong"
    assert {spec for spec in report.kernels if isinstance(spec, QuantSpec)} == {
        QuantSpec(SM90, DType.BF16, DType.INT8),
        QuantSpec(SM90, DType.BF16, DType.INT8, Scheme.TOKEN_AZP),
        QUANTISES,
    }
    assert cutlass_w8a8.warmup([plain, biased, zeroed, fp8], ms=(8,)).kernels == report.kernels[:-1]
    per_tensor = cutlass_w8a8.warmup(zeroed, ms=(8,), azp="tensor", quantize=None).kernels
    assert [spec.epilogue.formula for spec in per_tensor if isinstance(spec, KernelSpec)] == ["azp"]


SCHEMES = [
    ("token", "none", ["token"]),
    ("token", "token", ["token-azp"]),
    ("tensor", "none", ["tensor", "static"]),
    ("tensor", "tensor", ["tensor-azp", "static-azp"]),
    ("tensor", "token", ["tensor-azp", "static-azp"]),
    # Nothing in this package quantises so.
    ("token", "tensor", []),
]


@pytest.mark.parametrize(("scale_a", "azp", "schemes"), SCHEMES)
def test_activations_are_quantised_as_the_kernels_take_them(
    gpu: FakeGpu, compiled: Any, scale_a: str, azp: str, schemes: list[str]
) -> None:
    options: dict[str, Any] = {"ms": (8,), "dtype": torch.int8, "scale_a": scale_a, "azp": azp}
    *quantise, _ = cutlass_w8a8.warmup(WEIGHTS[0], **options).kernels
    assert quantise == [QuantSpec(SM90, DType.BF16, DType.INT8, Scheme(name)) for name in schemes]
    assert len(gpu.loaded) == 1 + sum(len(quant_symbols(Scheme(name))) for name in schemes)
    own = ["static", "tensor-azp"]
    *quantise, _ = cutlass_w8a8.warmup(WEIGHTS[0], schemes=own, **options).kernels
    assert quantise == [QuantSpec(SM90, DType.BF16, DType.INT8, Scheme(name)) for name in own]
    # Of weights without zero points none are expected, whatever those of others are.
    *quantise, _ = cutlass_w8a8.warmup(prepared(64), ms=(8,), scale_a=scale_a, azp=azp).kernels
    whole = [QuantSpec(SM90, DType.BF16, DType.INT8, scheme) for scheme in (Scheme.TENSOR, Scheme.STATIC)]
    assert quantise == (whole if scale_a == "tensor" else [QuantSpec(SM90, DType.BF16, DType.INT8)])


def test_quantisation_in_every_scheme_needs_nothing_more(gpu: FakeGpu, compiled: Any) -> None:
    """After warm-up each way to call `quantize` finds its kernel loaded, which a capture would prove otherwise."""
    cutlass_w8a8.warmup(WEIGHTS[0], ms=(8,), dtype=torch.int8, schemes=[scheme.value for scheme in Scheme])
    loaded = list(gpu.loaded)
    gpu.capturing = True
    # Small enough for one launch: between two, memory of the GPU is needed.
    x = on_gpu(torch.zeros(4, 64, dtype=torch.bfloat16))
    scale, azp = on_gpu(torch.ones(1)), on_gpu(torch.zeros(1, dtype=torch.int32))
    for given in (
        {},
        {"symmetric": False},
        {"granularity": "tensor"},
        {"granularity": "tensor", "symmetric": False},
        {"scale": scale},
        {"scale": scale, "azp": azp},
    ):
        cutlass_w8a8.quantize(x, torch.int8, **given)
    assert gpu.loaded == loaded and not gpu.blocking
    assert {name.removeprefix("sm90_quantize_bf16_int8") for name in gpu.ran} == {
        "" if scheme is Scheme.TOKEN else f"_{scheme.value}" for scheme in Scheme
    }


def test_kernels_in_packs_are_cached(
    fake_tools: Any, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_tools.write(link=f"cp {library} kernel.so; exit 0")
    packed, other = (QuantSpec(SM90, DType.BF16, DType.INT8, scheme) for scheme in (Scheme.TENSOR, Scheme.STATIC))
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", str(tmp_path / "pack"))
    pipeline.build(packed)
    monkeypatch.setenv("CUTLASS_W8A8_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUTLASS_W8A8_PACKS", str(tmp_path / "pack"))
    report = cutlass_w8a8.warmup([packed, other], arch="sm90")
    assert (report.compiled, report.cached) == (1, 1) and len(fake_tools.calls) == 2
    monkeypatch.setenv("CUTLASS_W8A8_JIT", "off")
    assert cutlass_w8a8.warmup([packed, other], arch="sm90").cached == 2
    monkeypatch.setenv("CUTLASS_W8A8_PACKS", "none")
    with pytest.raises(CacheError, match=r"1 kernel of 2 are in neither.*\n.*--scheme tensor"):
        cutlass_w8a8.warmup([packed, other], arch="sm90")


def test_specifications_are_taken_as_they_are(gpu: FakeGpu, compiled: Any) -> None:
    own = KernelSpec(SM90, DType.E4M3, DType.BF16, EpilogueSpec.of(), report_of(64)[0].config)
    portable = QuantSpec(SM80, DType.BF16, DType.INT8)
    report = cutlass_w8a8.warmup((own, portable))
    assert report.kernels == (own, portable) and report.loaded == 2
    # What the device cannot run is compiled all the same.
    from cutlass_w8a8.arch import arch_named

    foreign = QuantSpec(arch_named("sm100"), DType.BF16, DType.INT8)
    assert cutlass_w8a8.warmup([own, foreign]).loaded == 1
    assert foreign in gpu.disk


def test_without_a_gpu_it_compiles_for_the_arch_named(
    gpu: FakeGpu, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match=r"no CUDA device.*pass arch='sm90'"):
        cutlass_w8a8.warmup(WEIGHTS, ms=MS)
    report = cutlass_w8a8.warmup(WEIGHTS, ms=MS, arch="sm90")
    assert report.loaded == 0 and report.compiled == len(report.kernels) and not gpu.loaded
    tuned = cutlass_w8a8.warmup(WEIGHTS, ms=MS, arch="sm90", device_name="NVIDIA H200", sm_count=132).kernels
    assert set(tuned) != set(report.kernels)
    x = torch.zeros(16, 1024).to(torch.float8_e4m3fn)
    assert x is not None
    # Specifications need neither.
    assert cutlass_w8a8.warmup(QUANTISES).loaded == 0


def test_failures_come_after_all_else_is_there(gpu: FakeGpu, compiled: Any) -> None:
    bad = QUANTISES
    compiled.errors[bad] = "error: no; see /cache/failed"
    with pytest.raises(ToolchainError, match=rf"1 of \d+ kernels could not be compiled\n{bad.name}: error: no; see"):
        cutlass_w8a8.warmup(WEIGHTS, ms=MS)
    assert bad not in gpu.disk and gpu.loaded == [spec for spec in compiled.specs if spec != bad]


def test_jit_off_names_all_that_is_missing(gpu: FakeGpu, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_JIT", "off")
    gpu.disk.add(QUANTISES)
    with pytest.raises(CacheError) as caught:
        cutlass_w8a8.warmup(WEIGHTS[0], ms=(64,))
    (missing,) = report_of(64)
    assert missing.command("build") in str(caught.value) and "1 kernel of 2 are in neither" in str(caught.value)
    assert QUANTISES.name not in str(caught.value) and not compiled.specs
    gpu.disk.add(missing)
    assert cutlass_w8a8.warmup(WEIGHTS[0], ms=(64,)).loaded == 2


def test_not_while_capturing(gpu: FakeGpu, compiled: Any) -> None:
    gpu.capturing = True
    with pytest.raises(LaunchError, match=r"graph is being captured.*call warmup before"):
        cutlass_w8a8.warmup(WEIGHTS, ms=MS)
    assert not compiled.specs


def test_what_served_for_good_gives_way(gpu: FakeGpu, compiled: Any) -> None:
    """A kernel whose compilation behind had failed is there after all."""
    (small,), (large,) = report_of(1), report_of(4096)
    gpu.disk |= {small, QUANTISES}
    assert served(gpu, WEIGHTS[:1], [4096])[-1] == small.name
    gpu.finish(large, error="no memory")
    assert served(gpu, WEIGHTS[:1], [4096])[-1] == small.name
    cutlass_w8a8.warmup(WEIGHTS[0], ms=(4096,))
    assert served(gpu, WEIGHTS[:1], [4096])[-1] == large.name


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        (WEIGHTS, {}, "ms is empty"),
        (WEIGHTS, {"ms": (0,)}, r"ms: \(0,\); pass positive integers"),
        (WEIGHTS, {"ms": "12"}, "ms: '12'"),
        (WEIGHTS, {"ms": (True,)}, "ms: "),
        ((512, -8), {"ms": MS}, "the weight's N and K"),
        ((512, 1000), {"ms": MS}, "1000"),
        ([], {"ms": MS}, "what names no kernels"),
        (torch.nn.Linear(8, 8), {"ms": MS}, "what names no kernels"),
        ("sm90", {"ms": MS}, "what holds a str"),
        (WEIGHTS, {"ms": MS, "azp": "row"}, "azp is 'row'; accepted: none, tensor, token"),
        (WEIGHTS, {"ms": MS, "azp": "token"}, "zero point needs int8"),
        (WEIGHTS, {"ms": MS, "scale_a": "row"}, "scale_a is 'row'"),
        (WEIGHTS, {"ms": MS, "quantize": torch.int8}, "quantize is torch.int8"),
        (WEIGHTS, {"ms": MS, "dtype": torch.bfloat16}, "dtype"),
        (WEIGHTS, {"ms": MS, "schemes": ["row"]}, "schemes names 'row'; accepted: token, token-azp, tensor"),
        (WEIGHTS, {"ms": MS, "schemes": "row"}, "schemes names 'row'"),
        (WEIGHTS, {"ms": MS, "jobs": 0}, "jobs is 0"),
        (WEIGHTS, {"ms": MS, "arch": "sm90", "device": "cpu"}, "device"),
        (WEIGHTS, {"ms": MS, "device": "cpu"}, "device is 'cpu'"),
        (WEIGHTS, {"ms": MS, "overlap": "all"}, "overlap is 'all'"),
    ],
)
def test_bad_arguments(compiled: Any, what: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        cutlass_w8a8.warmup(what, **options)
    assert not compiled.specs


def test_schemes_that_a_type_does_not_have_are_refused(compiled: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"tensor-azp quantises to int8 only.*leave out the zero point: tensor"):
        cutlass_w8a8.warmup(WEIGHTS, ms=MS, schemes=["tensor-azp"])
    assert not compiled.specs


def test_formulas_that_no_call_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors would stand for another formula."""
    monkeypatch.setitem(epilogues.FORMULAS, "own", epilogues.FORMULAS["scaled"])
    with pytest.raises(ArgumentError, match="own_token_channel is not one that calls ask for; those are scaled, "):
        wanted.Weight.of_shape(
            8, 16, torch.int8, torch.bfloat16, EpilogueSpec.parse("own_token_channel"), calls.Options()
        )


# The command --------------------------------------------------------------------------------------------------------


def test_build_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built: list[Spec] = []

    def build_all(specs: list[Spec], jobs: int, console: object) -> list[Outcome]:
        built[:] = specs
        return [Outcome(spec) for spec in specs]

    monkeypatch.setattr(batch, "build_all", build_all)
    monkeypatch.setattr(pipeline, "find", lambda spec: SimpleNamespace())
    words = "build --weights 512x1024,1024x512 --m 1,16,96,4096 --jobs 2"
    assert main(words.split()) == 0
    assert tuple(built) == cutlass_w8a8.warmup(WEIGHTS, ms=MS, arch="sm90", quantize=None).kernels
    assert main([*words.split(), "--device", "NVIDIA H200", "--sm-count", "132", "--quantize", "bf16"]) == 0
    report = cutlass_w8a8.warmup(WEIGHTS, ms=MS, arch="sm90", device_name="NVIDIA H200", sm_count=132)
    assert tuple(built) == report.kernels and QUANTISES in built
    large = "build --weights 4096x4096 --m 16,256,1024,4096 --device".split()
    chosen = set()
    for overlap in OVERLAPS:
        assert main([*large, "NVIDIA H200", "--sm-count", "132", "--overlap", overlap]) == 0
        options = {"arch": "sm90", "device_name": "NVIDIA H200", "sm_count": 132, "quantize": None, "overlap": overlap}
        assert tuple(built) == cutlass_w8a8.warmup((4096, 4096), ms=(16, 256, 1024, 4096), **options).kernels
        chosen.add(tuple(built))
    assert len(chosen) > 1
    capsys.readouterr()
    assert main([*words.split(), "--print-plan"]) == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    assert main(["build", "--plan", str(path)]) == 0
    assert tuple(built) == cutlass_w8a8.warmup(WEIGHTS, ms=MS, arch="sm90", quantize=None).kernels
    int8 = [*words.split(), *"--arch sm80 --azp token --bias --scale-a tensor --out-dtype fp32".split()]
    assert main(int8) == 0
    assert {(spec.arch, spec.epilogue.name, spec.out) for spec in built if isinstance(spec, KernelSpec)} == {
        (SM80, "azp-token-bias_tensor_channel", DType.FP32)
    }
    int8 = [*words.split(), *"--a-dtype int8 --scale-a tensor --quantize fp16".split()]
    for extra, schemes in (([], [Scheme.TENSOR, Scheme.STATIC]), (["--scheme", "static"], [Scheme.STATIC])):
        assert main([*int8, *extra]) == 0
        assert [spec.scheme for spec in built if isinstance(spec, QuantSpec)] == schemes
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--weights 512x1024", "--weights needs --m"),
        ("--weights 512x1024 --m 1 --config 128x128x128_pingpong", "leave out --config"),
        ("--weights 512x1024 --m 1 --n 8 --stages 3", "leave out --n, --stages"),
        ("--weights 512x1024 --m 1 --plan x", "leave out --plan"),
        ("--weights 512x1024 --m 1 --scheme token", "add --quantize, or leave it out"),
        ("--m 1,16", "--m names 2 numbers of rows; only build --weights takes several"),
        ("--device H200", "these belong to --weights; leave out --device"),
        ("--overlap none", "these belong to --weights; leave out --overlap"),
    ],
)
def test_build_weights_refuses(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", *words.split()]) == 1
    assert message in capsys.readouterr().err


def test_commands_in_errors_name_the_kernel_exactly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an error says would build a kernel builds that very kernel, whatever kind it is of."""
    from cutlass_w8a8.arch import ARCHS
    from cutlass_w8a8.cli import commands
    from cutlass_w8a8.dispatch import configs_of
    from cutlass_w8a8.dtypes import OUTPUT_DTYPES

    built: list[str] = []

    class Stop(Exception):  # noqa: N818
        pass

    def build(spec: Spec, **_: Any) -> Any:
        built.append(spec.to_json())
        raise Stop

    monkeypatch.setattr(commands.pipeline, "build", build)
    specs: list[Spec] = [
        QuantSpec(arch, source, target, scheme)
        for arch in ARCHS.values()
        for source in OUTPUT_DTYPES
        for scheme in Scheme
        for target in scheme.targets
    ]
    for number, (arch, operand) in enumerate((a, o) for a in ARCHS.values() for o in a.operands):
        azp = ("none", "tensor", "token")[number % 3] if operand is DType.INT8 else "none"
        epilogue = EpilogueSpec.of("tensor" if number % 2 else "token", azp=azp, bias=bool(number % 2))
        specs += [KernelSpec(arch, operand, DType.FP16, epilogue, config) for config in configs_of(arch, operand)]
    for spec in specs:
        with pytest.raises(Stop):
            main(spec.command("build").split()[1:])
    assert built == [spec.to_json() for spec in specs] and len(json.loads(built[0]))
    capsys.readouterr()
