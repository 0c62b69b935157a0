"""Calibration: what goes into a model's linear layers is watched, to choose constant scales for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.nn import activations
from cutlass_w8a8.nn.config import W8A8Config

Tensor = torch.Tensor
Filter = Callable[[torch.nn.Module, str], bool]


def plain_linear(module: torch.nn.Module, name: str) -> bool:  # noqa: ARG001 (a filter is asked about both)
    """The default filter: torch.nn.Linear itself. Subclasses may be used in other ways than called."""
    return type(module) is torch.nn.Linear


@dataclass
class Calibration:
    """How far the inputs of layers reached, by the layers' names.

    Attributes:
        reach: float32 [2, 1] for each layer: how far below 0, and how far above.
    """

    reach: dict[str, Tensor] = field(default_factory=dict)

    def parameters(self, name: str, config: W8A8Config) -> tuple[Tensor, Tensor | None]:
        """The static input scale of a layer, float32 [1], and its zero point, int32 [1], or None if symmetric.

        Raises:
            ArgumentError: the layer saw no input, or one that was not finite.
        """
        reach = self.reach.get(name)
        if reach is None:
            raise ArgumentError(
                f"layer {name!r} was not calibrated: no input reached it within calibrate(); run the model on inputs "
                "that use it, or leave it out with filter_fn"
            )
        if not bool(reach.isfinite().all()):
            raise ArgumentError(f"an input of layer {name!r} held NaN or an infinity during calibration; leave it out")
        if config.symmetric:
            reach = reach.amax(0, keepdim=True)
        scale, azp = activations.parameters(reach, config.dtype, config.symmetric)
        return scale.flatten(), None if azp is None else azp.flatten()


@contextmanager
def calibrate(model: torch.nn.Module, filter_fn: Filter | None = None) -> Iterator[Calibration]:
    """Within this context, record how far the inputs of the model's linear layers reach::

        with calibrate(model) as calibration:
            for batch in batches:
                model(batch)
        quantize_(model, W8A8Config(dynamic=False), calibration=calibration)

    Limits stay on the device; nothing waits for it.

    Args:
        model: with float layers.
        filter_fn: which layers, by module and name, as for `quantize_`.
    """
    wanted = plain_linear if filter_fn is None else filter_fn
    calibration = Calibration()

    def watch(name: str) -> Callable[[torch.nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach()
            if x.numel():
                reach = activations.limits(x, "tensor", symmetric=False)
                before = calibration.reach.get(name)
                calibration.reach[name] = reach if before is None else torch.maximum(before, reach)

        return hook

    names = [(name, module) for name, module in model.named_modules() if wanted(module, name)]
    handles = [module.register_forward_pre_hook(watch(name)) for name, module in names]
    try:
        yield calibration
    finally:
        for handle in handles:
            handle.remove()
