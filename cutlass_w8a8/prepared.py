"""Calls with fixed weights, prepared: what does not change between them is checked once."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.compiler import is_compiling

from cutlass_w8a8 import calls
from cutlass_w8a8.calls import signature
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.ops import PLAIN, evaluated, traced
from cutlass_w8a8.request import check_kinds, refuse_gradients
from cutlass_w8a8.settings import options
from cutlass_w8a8.support import Config

Tensor = torch.Tensor

# Signatures of activations kept for each prepared object; the oldest are forgotten.
_MAX_KEPT = 4096


def prepare(
    b: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    *,
    azp_adj: Tensor | None = None,
    config: Config = None,
    overlap: str = "weights",
    batch_invariant: bool | None = None,
) -> PreparedMM:
    """`scaled_mm` (with ``azp_adj``: `scaled_mm_azp`) for fixed weights: a call takes activations only.

    It spends less host time than the plain call, and by default loads weights while the kernel before it still runs.

    Args:
        b, scale_b, bias, azp_adj: constant operands, as `scaled_mm` and `scaled_mm_azp` take them. They are kept, must
            not be replaced by other memory (``.data =``, ``resize_``), and with ``overlap="weights"`` b must not be
            written by work that may still run when a call is made; synchronise after loading or updating it.
        out_dtype, config, batch_invariant: as in `scaled_mm`.
        overlap: as in `scaled_mm`.

    Raises:
        ArgumentError: an operand is not acceptable.
        ConfigError: ``config`` is not understood.
    """
    return PreparedMM(b, scale_b, out_dtype, bias, azp_adj, config, overlap, batch_invariant)


class PreparedMM:
    """What `prepare` makes: ``mm(a, scale_a)``."""

    def __init__(
        self,
        b: Tensor,
        scale_b: Tensor,
        out_dtype: torch.dtype,
        bias: Tensor | None,
        azp_adj: Tensor | None,
        config: Config,
        overlap: str,
        batch_invariant: bool | None,
    ) -> None:
        activation = torch.empty(0)
        check_kinds(activation, b, activation, scale_b, out_dtype, bias, azp_adj, None, None)
        refuse_gradients(b, scale_b, bias)
        options(config, overlap, batch_invariant)
        self._given = (config, overlap, batch_invariant)
        self._b, self._scale_b, self._out_dtype, self._bias, self._azp_adj = b, scale_b, out_dtype, bias, azp_adj
        self._plain = type(b) in PLAIN and type(scale_b) in PLAIN and not b.is_meta
        self._b_address = b.data_ptr() if self._plain and b.is_cuda else 0
        self._scale_b_address = scale_b.data_ptr() if self._plain and b.is_cuda else 0
        self._kept: dict[tuple[Any, ...], calls.Resolved] = {}
        self._generation = calls.generation()
        self._lock = threading.Lock()

    def __call__(self, a: Tensor, scale_a: Tensor, azp: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """D = scale_a * scale_b * (a @ b - azp * azp_adj) + bias.

        Args:
            a, scale_a, azp, out: as in `scaled_mm` and `scaled_mm_azp`.

        Returns:
            [..., N] of the prepared out_dtype: ``out`` if given.

        Raises:
            W8A8Error: as `scaled_mm` says.
        """
        if is_compiling() or not self._plain or type(a) not in PLAIN or type(scale_a) not in PLAIN or a.is_meta:
            return traced(
                a, self._b, scale_a, self._scale_b, self._out_dtype, self._azp_adj, azp, self._bias, out, *self._given
            )
        try:
            # Without calls of `signature`, which take as long as what they ask.
            index = a.get_device()
            key: tuple[Any, ...] = (a.shape, a.stride(), a.dtype, index)
            key += (scale_a.shape, scale_a.stride(), scale_a.dtype, scale_a.get_device(), scale_a.is_neg())
            if out is not None:
                key += (out.shape, out.stride(), out.dtype, out.get_device())
            if azp is not None:
                key += ("azp", signature(azp))
        except (AttributeError, TypeError, RuntimeError):
            check_kinds(a, self._b, scale_a, self._scale_b, self._out_dtype, self._bias, self._azp_adj, azp, out)
            raise
        if scale_a.requires_grad and torch.is_grad_enabled():
            refuse_gradients(scale_a)
        if self._generation is not calls.generation():
            self._forget()
        resolved = self._kept.get(key) or self._resolve(key, a, scale_a, azp, out)
        if resolved.call is None:
            given = (scale_a, self._scale_b, azp, self._azp_adj, self._bias)
            return evaluated(resolved.request, a, self._b, given, out)
        request = resolved.request
        result = torch.empty((request.m, request.n), dtype=self._out_dtype, device=a.device) if out is None else out
        if resolved.order == (0, 1):
            operands: tuple[int, ...] = (scale_a.data_ptr(), self._scale_b_address)
        else:
            given = (scale_a, self._scale_b, azp, self._azp_adj, self._bias)
            operands = calls.addresses(resolved.order, given)
        resolved.launch(index, a.data_ptr(), self._b_address, result.data_ptr(), *operands)
        return result if out is not None or a.dim() == 2 else result.view(request.shape)

    def _resolve(
        self, key: tuple[Any, ...], a: Tensor, scale_a: Tensor, azp: Tensor | None, out: Tensor | None
    ) -> calls.Resolved:
        if azp is not None and self._azp_adj is None:
            raise ArgumentError("azp is given, but prepare() got no azp_adj; pass the int32 column sums of b there")
        resolved = calls.resolve(
            a,
            self._b,
            scale_a,
            self._scale_b,
            self._out_dtype,
            self._azp_adj,
            azp,
            self._bias,
            out,
            options(*self._given),
        )
        with self._lock:
            while len(self._kept) >= _MAX_KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = resolved
        return resolved

    def _forget(self) -> None:
        with self._lock:
            self._kept.clear()
            self._generation = calls.generation()
