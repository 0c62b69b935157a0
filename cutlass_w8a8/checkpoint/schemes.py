"""The quantization_config of a config.json, read into layers' configurations and written from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cutlass_w8a8.errors import CheckpointError, UnsupportedError
from cutlass_w8a8.nn import W8A8Config
from cutlass_w8a8.problem import CONSTANT_OVERLAP

METHOD = "compressed-tensors"
FORMATS = {torch.int8: "int-quantized", torch.float8_e4m3fn: "float-quantized"}
_SERVED_FORMATS = (*FORMATS.values(), "naive-quantized")
_DTYPES = {("int", 8): torch.int8, ("float", 8): torch.float8_e4m3fn}


def library() -> Any:
    """The package ``compressed_tensors``, which knows the format's schema. It takes seconds to import.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import compressed_tensors.quantization
        import compressed_tensors.utils.match
    except ImportError as error:
        raise CheckpointError(
            f"reading the format needs compressed-tensors ({error}); pip install 'cutlass-w8a8[checkpoints]'"
        ) from error
    return compressed_tensors


class Schemes:
    """Which layers a checkpoint quantises, and how.

    Args:
        config: the contents of config.json.

    Raises:
        CheckpointError: there is no such configuration in it, or it is malformed.
        UnsupportedError: it asks for something other than W8A8 linear layers.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        raw = config.get("quantization_config") or config.get("compression_config")
        if not isinstance(raw, Mapping) or raw.get("quant_method", METHOD) != METHOD:
            method = raw.get("quant_method") if isinstance(raw, Mapping) else None
            raise CheckpointError(
                f"config.json holds no quantization_config of {METHOD} (quant_method {method!r}); quantise the model "
                "with llm-compressor, or with cutlass_w8a8.nn.quantize_ and save"
            )
        for name in ("sparsity_config", "transform_config"):
            if _asks(raw.get(name)):
                raise UnsupportedError(f"the checkpoint has a {name}, which no kernel here serves: {raw[name]}")
        package = library()
        try:
            parsed = package.quantization.QuantizationConfig.model_validate(dict(raw))
        except Exception as error:  # pydantic's, or what its validators raise
            raise CheckpointError(f"quantization_config is malformed: {error}") from error
        if parsed.kv_cache_scheme is not None:
            raise UnsupportedError("the checkpoint quantises the KV cache, which is not served; make it without")
        self._match = package.utils.match
        self._ignore = list(parsed.ignore or [])
        self._schemes = {target: scheme for scheme in parsed.config_groups.values() for target in scheme.targets}
        self._format = parsed.format

    def config(self, name: str, module: torch.nn.Module, overlap: str = CONSTANT_OVERLAP) -> W8A8Config | None:
        """How the layer ``name``, a ``module``, is quantised; None if it is not.

        Raises:
            UnsupportedError: in a way that is not served.
        """
        if self._match.is_match(name, module, self._ignore):
            return None
        targets = self._match.match_targets(name, module, list(self._schemes))
        if not targets:
            return None
        return _config(name, self._schemes[targets[0]], self._format, overlap)


def describe(configs: Mapping[str, W8A8Config], ignore: list[str]) -> dict[str, Any]:
    """The quantization_config of layers with these configurations, of which ``ignore`` are linear but not quantised.

    One configuration for all names the class ``Linear`` and what to leave out, several name their layers.
    """
    kinds: dict[W8A8Config, list[str]] = {}
    for name, config in configs.items():
        kinds.setdefault(_stored(config), []).append(name)
    package = library().quantization
    groups = {
        f"group_{i}": package.QuantizationScheme(
            targets=["Linear"] if len(kinds) == 1 else names,
            weights=_arguments(config, config.weight, dynamic=False, symmetric=True),
            input_activations=_arguments(config, str(config.granularity), config.dynamic, config.symmetric),
            format=FORMATS[config.dtype],
        )
        for i, (config, names) in enumerate(kinds.items())
    }
    formats = {FORMATS[config.dtype] for config in kinds}
    whole = package.QuantizationConfig(
        config_groups=groups,
        ignore=ignore if len(kinds) == 1 else [],
        format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status="compressed",
    )
    return dict(whole.model_dump(mode="json"))


def _stored(config: W8A8Config) -> W8A8Config:
    """Without what a checkpoint does not tell."""
    return W8A8Config(config.dtype, config.weight, config.dynamic, config.granularity, config.symmetric)


def _arguments(config: W8A8Config, strategy: str, dynamic: bool, symmetric: bool) -> dict[str, Any]:
    kind = "int" if config.dtype is torch.int8 else "float"
    return {"num_bits": 8, "type": kind, "strategy": strategy, "dynamic": dynamic, "symmetric": symmetric}


def _asks(section: object) -> bool:
    """Whether a section of the configuration asks for anything: those that do not are empty, or dense."""
    if isinstance(section, Mapping):
        return any(value not in (None, {}, [], "dense") for value in section.values())
    return section is not None


def _config(name: str, scheme: Any, default_format: str, overlap: str) -> W8A8Config:
    def refuse(what: str) -> UnsupportedError:
        return UnsupportedError(
            f"layer {name!r}: {what}; W8A8 layers have weights of 8 bits per channel or tensor, activations of the "
            "same type per token or tensor, and are stored as int-quantized or float-quantized"
        )

    layout = scheme.format or default_format
    if layout not in _SERVED_FORMATS:
        raise refuse(f"its format is {getattr(layout, 'value', layout)}")
    weights, inputs = scheme.weights, scheme.input_activations
    if weights is None or inputs is None:
        raise refuse("its weights are not quantised" if weights is None else "its activations are not quantised")
    if scheme.output_activations is not None:
        raise refuse("its outputs are quantised")
    dtype = _DTYPES.get((weights.type, weights.num_bits))
    if dtype is None or _DTYPES.get((inputs.type, inputs.num_bits)) is not dtype:
        raise refuse(
            f"its weights are {weights.type}{weights.num_bits}, its activations {inputs.type}{inputs.num_bits}"
        )
    if weights.strategy not in ("channel", "tensor"):
        raise refuse(f"its weights are quantised per {weights.strategy}")
    if inputs.strategy not in ("token", "tensor"):
        raise refuse(f"its activations are quantised per {inputs.strategy}")
    if inputs.dynamic not in (True, False):
        raise refuse(f"its activations are dynamic={inputs.dynamic!r}")
    if not inputs.symmetric and dtype is not torch.int8:
        raise refuse("its float8 activations have zero points")
    return W8A8Config(dtype, weights.strategy, bool(inputs.dynamic), inputs.strategy, inputs.symmetric, overlap)
