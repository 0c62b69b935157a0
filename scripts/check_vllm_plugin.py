#!/usr/bin/env python3
"""Try the vLLM plugin on vLLM's own source, out of its wheel; no GPU, and vLLM is not installed.

    pip download --no-deps vllm==0.20.2
    python scripts/check_vllm_plugin.py vllm-0.20.2-*.whl

The modules of vLLM that choose linear kernels and define those of the CUTLASS kind are loaded as they are; everything
else they import is a stand-in. Then the plugin registers, vLLM chooses a kernel for fp8 and for int8 layers, and layers
of every kind it makes are run on the CPU and compared with float64. Exits 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cutlass_w8a8.vllm import custom_ops, plugin
from tests.vllm_stub.platform import DeviceCapability

LINEAR = "vllm.model_executor.kernels.linear"
UTILS = "vllm.model_executor.layers.quantization.utils"
# Loaded from the wheel; modules of vLLM that are not here are stand-ins.
REAL = (
    "vllm._version",
    "vllm.envs",
    LINEAR,
    f"{LINEAR}.base",
    f"{LINEAR}.scaled_mm",
    *(f"{LINEAR}.scaled_mm.{name}" for name in ("cutlass", "ScaledMMLinearKernel", "BlockScaledMMLinearKernel")),
    f"{LINEAR}.scaled_mm.triton",
    UTILS,
    f"{UTILS}.layer_utils",
    f"{UTILS}.w8a8_utils",
)


class PlatformEnum(enum.Enum):
    """The platforms that vLLM's lists of kernels name."""

    CUDA = enum.auto()
    ROCM = enum.auto()
    CPU = enum.auto()
    XPU = enum.auto()


class StandIn(ModuleType):
    """A module with any name asked of it: a class for a capitalised one, else a mock."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() and not name.isupper() else mock.MagicMock(name=name)
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's modules: real ones under ``root``, stand-ins for the others."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:  # noqa: ARG002
        if name.partition(".")[0] != "vllm":
            return None
        if name in REAL:
            where = self.root.joinpath(*name.split("."))
            package = (where / "__init__.py").is_file()
            file = where / "__init__.py" if package else where.with_suffix(".py")
            return importlib.util.spec_from_file_location(
                name, file, submodule_search_locations=[str(where)] if package else None
            )
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(root: Path) -> str:
    """Make vLLM's modules importable; its version."""
    sys.meta_path.insert(0, Finder(root))
    platform = mock.MagicMock()
    platform._enum = PlatformEnum.CUDA
    platform.is_cuda.return_value = True
    platform.get_device_capability.return_value = DeviceCapability(9, 0)
    platform.fp8_dtype.return_value = torch.float8_e4m3fn
    vllm: Any = importlib.import_module("vllm")
    vllm.__version__ = importlib.import_module("vllm._version").__version__
    quantizing: Any = importlib.import_module("vllm.model_executor.layers.quantization.input_quant_fp8")
    quantizing.QuantFP8 = mock.MagicMock()
    platforms: Any = importlib.import_module("vllm.platforms")
    platforms.PlatformEnum, platforms.current_platform = PlatformEnum, platform
    sys.modules["vllm._custom_ops"] = vllm._custom_ops = custom_ops
    return str(vllm.__version__)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def int8_layer(linear: Any, *, static: bool, symmetric: bool, n: int, k: int) -> float:
    """Relative error of an int8 layer that vLLM makes, loads and applies."""
    kernel = linear.init_int8_linear_kernel(
        is_channelwise=True, is_static_input_scheme=static, input_symmetric=symmetric, module_name="check"
    )
    assert type(kernel).__name__ == "CutlassW8A8Int8LinearKernel", type(kernel)
    x, weight, bias = torch.randn(5, 3, k) * 2 + 1, torch.randn(n, k), torch.randn(n)
    values, scale, _ = custom_ops.scaled_int8_quant(weight)
    layer = torch.nn.Module()
    layer.logical_widths = [n]
    layer.weight, layer.weight_scale = (torch.nn.Parameter(each, requires_grad=False) for each in (values, scale))
    layer.input_scale = layer.input_zero_point = layer.azp_adj = None
    if static:
        input_scale = torch.tensor([8 / 127 if symmetric else 16 / 255])
        layer.input_scale = torch.nn.Parameter(input_scale, requires_grad=False)
        if not symmetric:
            layer.input_zero_point = torch.nn.Parameter(torch.tensor([-20], dtype=torch.int8), requires_grad=False)
    kernel.process_weights_after_loading(layer)
    found = kernel.apply_weights(layer, x, bias)
    assert found.shape == (5, 3, n)
    return relative_error(found, x.double() @ weight.double().t() + bias.double())


def fp8_layer(linear: Any, *, n: int, k: int, channel: bool) -> float:
    """Relative error of an fp8 layer that vLLM makes, loads and applies."""
    key = SimpleNamespace(
        scale=SimpleNamespace(static=False, group_shape=SimpleNamespace(is_per_group=lambda: False, row=1, col=-1))
    )
    kernel = linear.init_fp8_linear_kernel(key, key, torch.bfloat16, torch.bfloat16, (n, k), module_name="check")
    kernel.quant_fp8 = lambda x, *_: custom_ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    assert type(kernel).__name__ == "CutlassW8A8Fp8LinearKernel", type(kernel)
    x, weight, bias = torch.randn(5, 3, k).bfloat16(), torch.randn(n, k), torch.randn(n).bfloat16()
    values, scale = custom_ops.scaled_fp8_quant(weight, use_per_token_if_dynamic=channel)
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale = (torch.nn.Parameter(each, requires_grad=False) for each in (values.t(), scale))
    layer.input_scale = None
    kernel.process_weights_after_loading(layer)
    found = kernel.apply_weights(layer, x, bias)
    assert found.shape == (5, 3, n)
    return relative_error(found, x.double() @ weight.double().t() + bias.double())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="vLLM's wheel, or a directory that holds its vllm/")
    wheel: Path = parser.parse_args().wheel
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        root = wheel
        if wheel.is_file():
            root = Path(folder)
            wanted = tuple(name.replace(".", "/") for name in REAL)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(root, [name for name in archive.namelist() if name.startswith(wanted)])
        version = install(root)
        linear: Any = importlib.import_module(LINEAR)
        for other in ("MarlinFP8ScaledMMLinearKernel", "FlashInferFP8ScaledMMLinearKernel"):
            # Stand-ins, and before ours in vLLM's list: they decline, as on Hopper.
            getattr(linear, other).is_supported = classmethod(lambda *_: (False, "is a stand-in"))
        before = {name: list(getattr(linear, name)[PlatformEnum.CUDA]) for name, *_ in plugin._PLACES}
        os.environ[plugin.VARIABLE] = "1"
        plugin.register()
        plugin.register()
        for name, theirs, (ours, _), _ in plugin._PLACES:
            names = [kernel.__name__ for kernel in getattr(linear, name)[PlatformEnum.CUDA]]
            expected = [kernel.__name__ for kernel in before[name]]
            expected.insert(expected.index(theirs), ours)
            print(f"{name}: {', '.join(names)}")
            if names != expected:
                print(f"expected: {', '.join(expected)}")
                return 1
        torch.manual_seed(0)
        errors = {}
        for n, k in ((64, 96), (100, 72)):
            for static in (False, True):
                for symmetric in (False, True):
                    name = f"int8 {n}x{k} {'static' if static else 'dynamic'}{'' if symmetric else ' asymmetric'}"
                    errors[name] = int8_layer(linear, static=static, symmetric=symmetric, n=n, k=k), 0.03
            for channel in (False, True):
                name = f"fp8 {n}x{k} per {'channel' if channel else 'tensor'}"
                errors[name] = fp8_layer(linear, n=n, k=k, channel=channel), 0.06
    for name, (error, most) in errors.items():
        print(f"{name}: relative error {error:.4f}{'' if error < most else f', more than {most}'}")
    print(f"vLLM {version}")
    return int(any(error >= most for error, most in errors.values()))


if __name__ == "__main__":
    raise SystemExit(main())
