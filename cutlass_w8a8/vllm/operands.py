"""Operands as vLLM takes them, made into those that `cutlass_w8a8.scaled_mm` takes."""

from __future__ import annotations

import torch

from cutlass_w8a8.errors import UnsupportedError
from cutlass_w8a8.request import K_MULTIPLE, N_MULTIPLE

Tensor = torch.Tensor

BLOCK = 128
"""Extent of the blocks that vLLM's block scales are for."""


def flat(vector: Tensor | None, extent: int) -> Tensor | None:
    """``vector`` [extent], whatever the shape its ``extent`` values came in; others as they are, to be refused."""
    if vector is None or vector.dim() == 1 or vector.numel() != extent or not vector.is_contiguous():
        return vector
    return vector.view(extent)


def scale(name: str, value: Tensor, extent: int, blocks: tuple[int, int]) -> Tensor:
    """A scale of one value, or [extent, 1], as it is; any other of ``extent`` values as [extent].

    Args:
        name: of the argument.
        value: the scale.
        extent: M for the first operand, N for the second.
        blocks: the shape of vLLM's block scales for this operand.

    Raises:
        UnsupportedError: it holds a scale for each block.
    """
    if value.dim() < 2 or value.numel() == 1 or value.shape == (extent, 1):
        return value
    if value.numel() != extent and tuple(value.shape) == blocks:
        raise UnsupportedError(
            f"{name} of shape {tuple(value.shape)} has a scale for each block of {BLOCK}; kernels here take one value "
            f"or {extent}; leave block-scaled layers to others, as cutlass_scaled_mm_supports_block_fp8 says"
        )
    flattened = flat(value, extent)
    return value if flattened is None else flattened


def missing(k: int, n: int) -> tuple[int, int]:
    """By how much K and N fall short of what kernels take."""
    return -k % K_MULTIPLE, -n % N_MULTIPLE


def pad_weight(b: Tensor, k: int, n: int) -> Tensor:
    """b [K, N] with ``k`` rows and ``n`` columns of zeros added, column-major."""
    padded = b.new_zeros((b.shape[1] + n, b.shape[0] + k))
    padded[: b.shape[1], : b.shape[0]].copy_(b.t())
    return padded.t()


def pad_rows(a: Tensor, k: int) -> Tensor:
    """a [..., K] with ``k`` columns of zeros added; a itself if ``k`` is 0."""
    if not k:
        return a
    padded = a.new_zeros((*a.shape[:-1], a.shape[-1] + k))
    padded[..., : a.shape[-1]].copy_(a)
    return padded


def pad_columns(vector: Tensor, n: int, more: int) -> Tensor:
    """vector [N] or [N, 1] with ``more`` zeros added, [N + more]; what does not hold ``n`` values as it is."""
    if not more or not vector.dim() or vector.numel() != n:
        return vector
    padded = vector.new_zeros(n + more)
    padded[:n].copy_(vector.reshape(n))
    return padded
