"""What weights, their scales and their zero points must be. All that is wrong with them is refused here."""

from __future__ import annotations

import torch

from cutlass_w8a8.dtypes import OPERAND_DTYPES, DType
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.evt.evaluate import TORCH_DTYPES
from cutlass_w8a8.request import FROM_TORCH, K_MULTIPLE, MAX_K_INT8, MAX_K_INT8_AZP, N_MULTIPLE

Tensor = torch.Tensor

INT8_LOW, INT8_HIGH = -128, 127


def padded(n: int, k: int) -> tuple[int, int]:
    """The least extents N', K' that kernels accept and a weight [n, k] fits into."""
    return -(-n // N_MULTIPLE) * N_MULTIPLE, -(-k // K_MULTIPLE) * K_MULTIPLE


def check_extents(n: int, k: int, dtype: torch.dtype, zero_points: bool) -> None:
    """Refuse extents that are not positive, or for which int8 sums could leave int32.

    Raises:
        ArgumentError: they are.
    """
    if n < 1 or k < 1:
        raise ArgumentError(f"a weight has N={n} and K={k}; both must be at least 1")
    limit = MAX_K_INT8_AZP if zero_points else MAX_K_INT8
    if dtype is torch.int8 and padded(n, k)[1] > limit:
        raise ArgumentError(
            f"K is {k}: int8 products {'with zero points ' if zero_points else ''}could overflow int32 beyond "
            f"K={limit}; quantise to float8_e4m3fn, or divide the layer along K"
        )


def check_scales(name: str, scales: Tensor) -> None:
    """Refuse scales that are none, not positive, or not finite. Waits for the device.

    Raises:
        ArgumentError: they are.
    """
    if not scales.numel():
        raise ArgumentError(f"{name}: there is none; pass one for each shard")
    if not bool(((scales > 0) & scales.isfinite()).all()):
        bad = scales[~((scales > 0) & scales.isfinite())][0].item()
        raise ArgumentError(f"{name} hold {bad}; each must be positive and finite")


def check_azps(azps: Tensor) -> None:
    """Refuse zero points that are not those of int8 data. Waits for the device.

    Raises:
        ArgumentError: they are not.
    """
    inside = (azps >= INT8_LOW) & (azps <= INT8_HIGH) & (azps == azps.round())
    if not bool(inside.all()):
        raise ArgumentError(
            f"a zero point is {azps[~inside][0].item()}; it must be an integer within {INT8_LOW}..{INT8_HIGH}: "
            "the real value is scale * (q - azp), and its range must hold 0"
        )


def operand_of(name: str, dtype: object) -> DType:
    """The operand type that is ``dtype``.

    Raises:
        ArgumentError: it is none; ``name`` says whose it is.
    """
    operand = FROM_TORCH.get(dtype) if isinstance(dtype, torch.dtype) else None
    if operand is None or operand not in OPERAND_DTYPES:
        accepted = " or ".join(str(TORCH_DTYPES[each]) for each in OPERAND_DTYPES)
        raise ArgumentError(f"{name} is {dtype}; accepted: {accepted}")
    return operand
