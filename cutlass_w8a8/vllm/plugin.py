"""A plugin for vLLM: its CUTLASS linear kernels for fp8 and int8 are served by this package.

vLLM calls `register` in each of its processes (entry point group ``vllm.general_plugins``). It does nothing unless
``CUTLASS_W8A8_VLLM=1``. Then two classes go before vLLM's own in its lists of linear kernels, where vLLM asks them
first, and takes its own for what they decline.

Written against the source of vLLM 0.20.2, and not run inside vLLM. A version other than 0.20, or one whose classes look
different, leaves vLLM as it is, with one warning.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from typing import Any

from cutlass_w8a8.errors import UnsupportedError
from cutlass_w8a8.vllm.kernels import Fp8Kernel, Int8Kernel

VARIABLE = "CUTLASS_W8A8_VLLM"
VERSIONS = ("0.20",)
"""Releases (major.minor) whose source this was written against."""

_LINEAR = "vllm.model_executor.kernels.linear"
# For each list of kernels: whose place is taken, what takes it, the methods it has and calls with their parameters.
_PLACES = (
    (
        "_POSSIBLE_FP8_KERNELS",
        "CutlassFP8ScaledMMLinearKernel",
        ("CutlassW8A8Fp8LinearKernel", Fp8Kernel),
        {
            "is_supported": {"compute_capability"},
            "can_implement": {"c"},
            "process_weights_after_loading": {"self", "layer"},
            "apply_scaled_mm": {"self", "A", "B", "out_dtype", "As", "Bs", "bias", "output_shape"},
        },
    ),
    (
        "_POSSIBLE_INT8_KERNELS",
        "CutlassInt8ScaledMMLinearKernel",
        ("CutlassW8A8Int8LinearKernel", Int8Kernel),
        {
            "is_supported": {"compute_capability"},
            "can_implement": {"c"},
            "process_weights_after_loading": {"self", "layer"},
            "_get_layer_params": {"self", "layer"},
            "apply_weights": {"self", "layer", "x", "bias"},
        },
    ),
)

_logger = logging.getLogger("cutlass_w8a8")


def register() -> None:
    """Put this package's kernels before vLLM's, if ``CUTLASS_W8A8_VLLM=1``; again, it does nothing.

    Never raises: whatever stands in the way is told in one warning, and vLLM keeps its own kernels.
    """
    wanted = os.environ.get(VARIABLE, "0")
    if wanted in ("", "0"):
        return
    try:
        if wanted != "1":
            raise UnsupportedError(f"{VARIABLE} is {wanted!r}; set it to 1 or 0")
        _insert()
    except Exception as error:
        # An exception here would keep vLLM from starting.
        _logger.warning("cutlass_w8a8 serves none of vLLM's layers, which keep vLLM's own kernels: %s", error)


def _insert() -> None:
    version = str(importlib.import_module("vllm").__version__)
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise UnsupportedError(f"vLLM is {version}; this plugin knows {', '.join(f'{each}.*' for each in VERSIONS)}")
    linear = importlib.import_module(_LINEAR)
    platforms = importlib.import_module("vllm.platforms")
    quantize = importlib.import_module("vllm._custom_ops").scaled_int8_quant
    invariant = bool(importlib.import_module("vllm.envs").VLLM_BATCH_INVARIANT)

    def capability() -> tuple[int, int] | None:
        found = platforms.current_platform.get_device_capability()
        return None if found is None else (found[0], found[1])

    # Everything is looked at before anything is changed.
    insertions: list[tuple[list[Any], int, type]] = []
    for list_name, theirs_name, (name, ours), methods in _PLACES:
        kernels = getattr(linear, list_name)[platforms.PlatformEnum.CUDA]
        if any(kernel.__name__ == name for kernel in kernels):
            continue
        theirs = getattr(linear, theirs_name)
        _check(theirs, methods)
        values = {"capability_of_device": staticmethod(capability), "batch_invariant": invariant}
        if ours is Int8Kernel:
            values["quantize"] = staticmethod(quantize)
        insertions.append((kernels, kernels.index(theirs), type(name, (ours, theirs), values)))
    for kernels, place, kernel in insertions:
        kernels.insert(place, kernel)
    if insertions:
        _logger.info("cutlass_w8a8 serves vLLM's layers: %s", ", ".join(kernel.__name__ for _, _, kernel in insertions))


def _check(theirs: type, methods: dict[str, set[str]]) -> None:
    """That vLLM's class has the methods that ours overrides or calls, with the parameters known.

    Raises:
        UnsupportedError: it does not.
    """
    for name, known in methods.items():
        method = getattr(theirs, name, None)
        if method is None:
            raise UnsupportedError(f"vLLM's {theirs.__name__} has no {name}")
        found = set(inspect.signature(method).parameters)
        if found != known:
            raise UnsupportedError(
                f"{name} of vLLM's {theirs.__name__} takes {', '.join(sorted(found))}; this plugin knows it with "
                f"{', '.join(sorted(known))}"
            )
