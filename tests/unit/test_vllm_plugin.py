"""The plugin on classes that look like vLLM's: where it registers, what its kernels do, how it fails."""

from __future__ import annotations

import enum
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cutlass_w8a8.vllm import custom_ops, plugin

ROOT = Path(__file__).parents[2]
LINEAR = "vllm.model_executor.kernels.linear"


class PlatformEnum(enum.Enum):
    CUDA = 1
    CPU = 2


class Theirs:
    """What vLLM's classes have in common."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return True, None


class CutlassFP8ScaledMMLinearKernel(Theirs):
    layer_param_names = ("weight", "weight_scale", "input_scale", "input_scale_ub")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply_scaled_mm(self, *, A: Any, B: Any, out_dtype: Any, As: Any, Bs: Any, bias: Any, output_shape: Any) -> Any:  # noqa: N803
        raise AssertionError("vLLM's kernel was called")


class CutlassInt8ScaledMMLinearKernel(Theirs):
    layer_param_names = ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.t(), requires_grad=False)
        if layer.asymmetric:
            sums = layer.weight.sum(0, keepdim=True, dtype=torch.int32)
            if layer.input_zero_point is not None:
                sums = layer.input_zero_point * sums
            layer.azp_adj = torch.nn.Parameter(sums, requires_grad=False)

    def _get_layer_params(self, layer: Any) -> tuple[Any, ...]:
        return tuple(getattr(layer, name, None) for name in self.layer_param_names)

    def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
        raise AssertionError("vLLM's kernel was called")


class Other(Theirs):
    pass


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A vLLM of the known version, and the variable set."""
    capability = SimpleNamespace(get_device_capability=lambda: (9, 0))
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.20.2"},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.platforms": {"PlatformEnum": PlatformEnum, "current_platform": capability},
        "vllm._custom_ops": {"scaled_int8_quant": custom_ops.scaled_int8_quant},
        "vllm.model_executor": {},
        "vllm.model_executor.kernels": {},
        LINEAR: {
            "CutlassFP8ScaledMMLinearKernel": CutlassFP8ScaledMMLinearKernel,
            "CutlassInt8ScaledMMLinearKernel": CutlassInt8ScaledMMLinearKernel,
            "_POSSIBLE_FP8_KERNELS": {
                PlatformEnum.CUDA: [Other, CutlassFP8ScaledMMLinearKernel],
                PlatformEnum.CPU: [Other],
            },
            "_POSSIBLE_INT8_KERNELS": {PlatformEnum.CUDA: [CutlassInt8ScaledMMLinearKernel, Other]},
        },
    }
    modules: dict[str, Any] = {}
    for name, values in contents.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(values)
        monkeypatch.setitem(sys.modules, name, modules[name])
    monkeypatch.setenv(plugin.VARIABLE, "1")
    return modules


def kernels(vllm: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    linear = vllm[LINEAR]
    return linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CUDA], linear._POSSIBLE_INT8_KERNELS[PlatformEnum.CUDA]


def test_is_put_before_vllms_once(vllm: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()
    plugin.register()
    fp8, int8 = kernels(vllm)
    assert [kernel.__name__ for kernel in fp8] == [
        "Other",
        "CutlassW8A8Fp8LinearKernel",
        "CutlassFP8ScaledMMLinearKernel",
    ]
    assert [kernel.__name__ for kernel in int8] == [
        "CutlassW8A8Int8LinearKernel",
        "CutlassInt8ScaledMMLinearKernel",
        "Other",
    ]
    assert vllm[LINEAR]._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU] == [Other] and not caplog.records


@pytest.mark.parametrize("value", [None, "", "0"])
def test_is_off_by_default(value: str | None, vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.VARIABLE) if value is None else monkeypatch.setenv(plugin.VARIABLE, value)
    plugin.register()
    assert list(map(len, kernels(vllm))) == [2, 2]


def spoil(vllm: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = vllm[LINEAR]
    if what == "version":
        vllm["vllm"].__version__ = "0.21.0"
    elif what == "list":
        del linear._POSSIBLE_INT8_KERNELS
    elif what == "not in the list":
        linear._POSSIBLE_INT8_KERNELS[PlatformEnum.CUDA].pop(0)
    elif what == "method":
        monkeypatch.delattr(CutlassInt8ScaledMMLinearKernel, "apply_weights")
    elif what == "parameter":
        monkeypatch.setattr(CutlassInt8ScaledMMLinearKernel, "apply_weights", lambda self, layer, x, bias, extra: None)
    elif what == "value":
        monkeypatch.setenv(plugin.VARIABLE, "yes")
    else:
        monkeypatch.setitem(sys.modules, what, None)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("version", "vLLM is 0.21.0; this plugin knows 0.20.*"),
        ("list", "_POSSIBLE_INT8_KERNELS"),
        ("not in the list", "is not in list"),
        ("method", "has no apply_weights"),
        ("parameter", "takes bias, extra, layer, self, x"),
        ("value", "is 'yes'; set it to 1 or 0"),
        ("vllm", "vllm"),
        (LINEAR, LINEAR),
    ],
)
def test_fails_softly_and_changes_nothing(
    what: str, told: str, vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(vllm, what, monkeypatch)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    (record,) = caplog.records
    assert told in record.getMessage() and "keep vLLM's own kernels" in record.getMessage()
    fp8, _ = kernels(vllm) if what != "list" else (vllm[LINEAR]._POSSIBLE_FP8_KERNELS[PlatformEnum.CUDA], None)
    assert fp8 == [Other, CutlassFP8ScaledMMLinearKernel]


def made(vllm: dict[str, Any]) -> tuple[Any, Any]:
    plugin.register()
    fp8, int8 = kernels(vllm)
    return fp8[1], int8[0]


def test_declines_what_it_cannot_serve(vllm: dict[str, Any]) -> None:
    fp8, int8 = made(vllm)
    assert fp8.is_supported() == fp8.is_supported(90) == (True, None)
    assert fp8.is_supported(80)[0] is False and "no e4m3 tensor cores" in fp8.is_supported(80)[1]
    assert int8.is_supported(75) == (True, None) and int8.is_supported(70)[0] is False
    vllm["vllm.platforms"].current_platform.get_device_capability = lambda: None
    assert fp8.is_supported()[0] is False


def test_vllms_own_refusal_holds(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Theirs, "is_supported", classmethod(lambda cls, compute_capability=None: (False, "no")))
    assert made(vllm)[0].is_supported(90) == (False, "no")


def layer(values: torch.Tensor, scale: torch.Tensor, **more: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight, module.weight_scale = (torch.nn.Parameter(each, requires_grad=False) for each in (values, scale))
    for name, value in more.items():
        setattr(module, name, value)
    return module


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("n", "k"), [(64, 96), (100, 72)])
@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_fp8_layer(n: int, k: int, channel: bool, invariant: bool, vllm: dict[str, Any]) -> None:
    vllm["vllm.envs"].VLLM_BATCH_INVARIANT = invariant
    kernel = made(vllm)[0]()
    torch.manual_seed(0)
    x, weight, bias = torch.randn(15, k), torch.randn(n, k), torch.randn(n).bfloat16()
    values, scale = custom_ops.scaled_fp8_quant(weight, use_per_token_if_dynamic=channel)
    module = layer(values.t(), scale)
    kernel.process_weights_after_loading(module)
    # Padded once, unless vLLM multiplies by the weight itself.
    padded = (-(-k // 16) * 16, -(-n // 8) * 8)
    assert module.weight.shape == ((k, n) if invariant else padded)
    a, scale_a = custom_ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    found = kernel.apply_scaled_mm(
        A=a,
        B=module.weight,
        out_dtype=torch.bfloat16,
        As=scale_a,
        Bs=module.weight_scale,
        bias=bias,
        output_shape=[5, 3, module.weight.shape[1]],
    )
    assert found.shape == (5, 3, n) and found.dtype is torch.bfloat16
    assert error(found.view(15, n), x.double() @ weight.double().t() + bias.double()) < 0.06


@pytest.mark.parametrize(("n", "k"), [(64, 96), (100, 72)])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_int8_layer(n: int, k: int, static: bool, asymmetric: bool, vllm: dict[str, Any]) -> None:
    kernel = made(vllm)[1]()
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 3, k) + 1, torch.randn(n, k), torch.randn(n)
    values, scale, _ = custom_ops.scaled_int8_quant(weight)
    zero_point = torch.tensor([-30], dtype=torch.int32) if static and asymmetric else None
    given = torch.tensor([10 / 255 if asymmetric else 5 / 127]) if static else None
    module = layer(values, scale, input_scale=given, input_zero_point=zero_point, azp_adj=None, asymmetric=asymmetric)
    kernel.process_weights_after_loading(module)
    found = kernel.apply_weights(module, x, bias)
    assert found.shape == (5, 3, n) and found.dtype is torch.float32
    assert error(found, x.double() @ weight.double().t() + bias.double()) < 0.03
    compiled = torch.compile(kernel.apply_weights, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(module, x, bias), found)


def test_entry_point_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r'^\[project\.entry-points\."vllm\.general_plugins"\]\n(\w+) = "([\w.]+):(\w+)"$', text, re.M)
    assert declared and declared[2] == plugin.__name__ and getattr(plugin, declared[3]) is plugin.register


TEST_FILE = """
import pytest, torch
from tests.kernels.utils import baseline_scaled_mm, opcheck, to_int8
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
if not current_platform.is_cuda():
    pytest.skip("needs CUDA", allow_module_level=True)

@pytest.mark.parametrize("bias", [None, 1.0])
def test_gemm(bias):
    a, b = to_int8(torch.randn(5, 32, device="cuda") * 5), to_int8(torch.randn(16, 32, device="cuda").t() * 5)
    scales = torch.rand(5, 1, device="cuda"), torch.rand(1, 16, device="cuda")
    bias = None if bias is None else torch.full((16,), bias, device="cuda", dtype=torch.bfloat16)
    out = ops.cutlass_scaled_mm(a, b, *scales, torch.bfloat16, bias)
    torch.testing.assert_close(out, baseline_scaled_mm(a, b, *scales, torch.bfloat16, bias), rtol=1e-1, atol=1.0)
    opcheck(torch.ops._C.cutlass_scaled_mm, (out, a, b, *scales, bias))

def test_blockwise():
    raise AssertionError

def test_that_fails():
    raise AssertionError
"""


def test_files_of_vllm_run_as_they_are(tmp_path: Path) -> None:
    """With the stand-in, in a process of its own: `tests.unit.bench_fakes` defines vLLM's operators in this one."""
    file = tmp_path / "test_like_vllms.py"
    file.write_text(TEST_FILE)
    script = ROOT / "scripts" / "run_vllm_tests.py"
    done = subprocess.run(
        [sys.executable, script, "--on-cpu", file, "-q"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "1 failed, 2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "no block-scaled kernels" in done.stdout and done.returncode == 1
    assert list(tmp_path.iterdir()) == [file]
    done = subprocess.run([sys.executable, script, "nowhere"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "nowhere is not a file" in done.stderr
