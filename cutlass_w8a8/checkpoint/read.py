"""A checkpoint's folder: its tensors, in one file or several, and its layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from cutlass_w8a8.checkpoint.schemes import Schemes
from cutlass_w8a8.errors import ArgumentError, CheckpointError, UnsupportedError
from cutlass_w8a8.nn import W8A8Linear
from cutlass_w8a8.problem import CONSTANT_OVERLAP

Tensor = torch.Tensor

CONFIG, ONE_FILE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# What a quantised layer may hold besides its weight and its bias.
QUANTISED = ("weight_scale", "weight_zero_point", "input_scale", "input_zero_point")


class Checkpoint:
    """A folder in the compressed-tensors format, open for reading.

        with Checkpoint("folder") as checkpoint:
            layer = checkpoint.linear("model.layers.0.mlp.down_proj")

    Attributes:
        config: the contents of config.json.
        names: of all tensors.

    Raises:
        CheckpointError: the folder is no such checkpoint, or damaged.
        UnsupportedError: it asks for more than W8A8 linear layers.
    """

    def __init__(self, folder: Path | str) -> None:
        """Open a folder."""
        self.folder = Path(folder)
        self.config: dict[str, Any] = self._json(CONFIG)
        self._schemes = Schemes(self.config)
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        try:
            for file in self._list():
                handle = self._open.enter_context(_tensors(self.folder / file))
                self._files |= dict.fromkeys(handle.keys(), handle)
        except BaseException:
            self._open.close()
            raise
        self.names = frozenset(self._files)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Tensors that were read stay."""
        self._open.close()

    def tensor(self, name: str) -> Tensor:
        """The tensor ``name``, on the CPU.

        Raises:
            CheckpointError: there is none.
        """
        if name not in self._files:
            raise CheckpointError(f"{self.folder} holds no tensor {name!r}")
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def quantised(self, name: str, module: torch.nn.Module | None = None) -> bool:
        """Whether the layer ``name`` is quantised, by its configuration and by what is stored of it.

        Args:
            name: of the layer, as in the names of its tensors.
            module: what it is in the model, for configurations that choose by class; None is a torch.nn.Linear.

        Raises:
            CheckpointError: the two do not agree.
            UnsupportedError: it is quantised in a way that is not served.
        """
        config = self._schemes.config(name, _LINEAR if module is None else module)
        stored = f"{name}.weight_scale" in self.names
        if stored is not (config is not None):
            raise CheckpointError(
                f"layer {name!r} is {'' if stored else 'not '}stored quantised, but config.json says otherwise; the "
                "folder mixes two checkpoints, or was written by something that leaves ignored layers out"
            )
        return stored

    def linear(
        self,
        names: str | Sequence[str],
        *,
        module: torch.nn.Module | None = None,
        dtype: torch.dtype | None = None,
        overlap: str = CONSTANT_OVERLAP,
    ) -> W8A8Linear:
        """A quantised layer, or several fused to one.

        The shards of a fused layer keep a scale for each of their channels; if their weights have one each, and their
        configuration says so, it is expanded to the channels rather than rounded to a common one. Their static input
        scales are merged.

        Args:
            names: of the layer, or of those to fuse, in order; as in the names of their tensors.
            module: as for `quantised`.
            dtype: of results; the default is the bias's type, else that of the scales.
            overlap: as in `W8A8Config`.

        Raises:
            CheckpointError: a tensor is missing, is of another type or shape, or the layers do not go together.
            UnsupportedError: a layer is quantised in a way that is not served, or not at all.
        """
        shards = [names] if isinstance(names, str) else list(names)
        configs = [self._schemes.config(name, _LINEAR if module is None else module, overlap) for name in shards]
        if not configs or configs[0] is None:
            raise UnsupportedError(f"layers {shards} are not quantised in {self.folder}")
        config = configs[0]
        if any(other != config for other in configs):
            raise CheckpointError(f"layers {shards} are quantised in different ways; they cannot be fused")
        parts = [self.tensor(f"{name}.weight") for name in shards]
        for name, part in zip(shards, parts, strict=True):
            if part.dtype is not config.dtype or part.dim() != 2:
                raise CheckpointError(
                    f"{name}.weight is {part.dtype} {tuple(part.shape)}; its configuration says {config.dtype} [N, K]"
                )
            self._refuse_weight_zero_points(name)
        if len({part.shape[1] for part in parts}) > 1:
            raise CheckpointError(f"layers {shards} have different inputs; they cannot be fused")
        scales = [self._scale(name, part.shape[0], config.weight) for name, part in zip(shards, parts, strict=True)]
        if config.weight == "tensor" and len(shards) > 1:
            scales = [s.expand(part.shape[0]) for s, part in zip(scales, parts, strict=True)]
            config = type(config)(
                config.dtype, "channel", config.dynamic, config.granularity, config.symmetric, overlap
            )
        biases = [self.tensor(f"{name}.bias") for name in shards if f"{name}.bias" in self.names]
        if len(biases) not in (0, len(shards)):
            raise CheckpointError(f"of the layers {shards} some have a bias and some do not; they cannot be fused")
        if dtype is None:
            dtype = biases[0].dtype if biases else self.tensor(f"{shards[0]}.weight_scale").dtype
        whole = torch.cat([part.view(torch.int8) for part in parts]).view(config.dtype)
        try:
            return W8A8Linear.from_quantized(
                whole,
                torch.cat(scales),
                torch.cat(biases) if biases else None,
                config=config,
                input_scale=None if config.dynamic else self._inputs(shards, "input_scale").float(),
                input_azp=self._inputs(shards, "input_zero_point") if config.folds else None,
                dtype=dtype,
            )
        except ArgumentError as error:
            raise CheckpointError(f"layers {shards}: {error}") from error

    def _scale(self, name: str, n: int, granularity: str) -> Tensor:
        scale = self.tensor(f"{name}.weight_scale").float().flatten()
        if scale.numel() != (n if granularity == "channel" else 1):
            raise CheckpointError(
                f"{name}.weight_scale has {scale.numel()} values; per {granularity} it must have "
                f"{n if granularity == 'channel' else 1}"
            )
        return scale

    def _inputs(self, shards: Sequence[str], what: str) -> Tensor:
        values = [self.tensor(f"{name}.{what}").flatten() for name in shards]
        for name, value in zip(shards, values, strict=True):
            if value.numel() != 1:
                raise CheckpointError(f"{name}.{what} has {value.numel()} values; a static scale is one")
        return torch.cat(values)

    def _refuse_weight_zero_points(self, name: str) -> None:
        stored = f"{name}.weight_zero_point"
        if stored in self.names and bool(self.tensor(stored).float().ne(0).any()):
            raise UnsupportedError(
                f"{stored} is not 0: kernels take zero points of activations, not of weights; quantise weights "
                "symmetrically"
            )

    def _list(self) -> list[str]:
        if not (self.folder / INDEX).exists():
            return [ONE_FILE]
        files = self._json(INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise CheckpointError(f"{self.folder / INDEX} has no weight_map of tensors to files")
        return sorted(set(files.values()))

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}; pass the folder that holds {CONFIG}") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{path} holds no JSON object")
        return found


_LINEAR = torch.nn.Linear(1, 1, bias=False, device="meta")


def _tensors(path: Path) -> Any:
    """An open safetensors file."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError(f"{error}; pip install 'cutlass-w8a8[checkpoints]'") from error
    try:
        return safe_open(path, "pt")
    except Exception as error:  # its own type, OSError or ValueError
        raise CheckpointError(f"cannot read {path}: {error}; the download may be incomplete") from error
