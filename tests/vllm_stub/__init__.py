"""A stand-in for the parts of ``vllm`` that its kernel tests import, served by `cutlass_w8a8.vllm.custom_ops`.

    from tests import vllm_stub
    vllm_stub.install()

puts modules under vLLM's names into ``sys.modules`` and operators under ``torch.ops._C``, so that vLLM's test files of
W8A8 kernels run as they are. It refuses where a real vLLM is installed, and holds nothing but what those files use.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

from cutlass_w8a8.vllm import custom_ops
from tests.vllm_stub import helpers, layers, operators, platform

_MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0+stub"},
    "vllm.platforms": {"current_platform": platform.current_platform},
    "vllm.utils": {"cdiv": helpers.cdiv},
    "vllm.utils.math_utils": {"cdiv": helpers.cdiv},
    "vllm.utils.torch_utils": {"set_random_seed": helpers.set_random_seed},
    "vllm.model_executor": {},
    "vllm.model_executor.kernels": {},
    "vllm.model_executor.kernels.linear": {},
    "vllm.model_executor.kernels.linear.scaled_mm": {},
    "vllm.model_executor.kernels.linear.scaled_mm.cutlass": {
        "CutlassFP8ScaledMMLinearKernel": layers.CutlassFP8ScaledMMLinearKernel
    },
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.quantization": {},
    "vllm.model_executor.layers.quantization.utils": {},
    "vllm.model_executor.layers.quantization.utils.quant_utils": {
        "GroupShape": helpers.GroupShape,
        "scaled_quantize": helpers.scaled_quantize,
    },
    "tests.kernels": {},
    "tests.kernels.utils": {
        "baseline_scaled_mm": helpers.baseline_scaled_mm,
        "opcheck": helpers.opcheck,
        "to_fp8": helpers.to_fp8,
        "to_int8": helpers.to_int8,
    },
    "tests.kernels.quant_utils": {
        "FP8_DTYPE": helpers.FP8_DTYPE,
        "ref_dynamic_per_tensor_fp8_quant": helpers.ref_dynamic_per_tensor_fp8_quant,
        "ref_dynamic_per_token_quant": helpers.ref_dynamic_per_token_quant,
    },
}


def install() -> None:
    """Register the modules and operators; a second call does nothing.

    Raises:
        RuntimeError: a real vLLM is installed, or a module of that name loaded.
    """
    if getattr(sys.modules.get("vllm"), "__version__", None) == "0+stub":
        return
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        raise RuntimeError("vllm is installed: its tests need no stand-in, and would not test it with one")
    operators.register()
    for name, contents in _MODULES.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(contents)
        _add(name, module)
    _add("vllm._custom_ops", custom_ops)


def _add(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
