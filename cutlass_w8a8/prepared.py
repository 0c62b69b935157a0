"""Calls with fixed weights, prepared: what does not change between them is checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling

from cutlass_w8a8 import calls
from cutlass_w8a8.calls import PLAIN, signature
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.memo import Memo
from cutlass_w8a8.ops import evaluated, traced
from cutlass_w8a8.problem import CONSTANT_OVERLAP, Overlap
from cutlass_w8a8.request import check, check_kinds, refuse_gradients
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
    overlap: str = CONSTANT_OVERLAP,
    batch_invariant: bool | None = None,
) -> PreparedMM:
    """`scaled_mm` (with ``azp_adj``: `scaled_mm_azp`) for fixed weights: a call takes activations only.

    It spends less host time than the plain call, and loads weights while the kernel before it still runs.

    Args:
        b, scale_b, bias, azp_adj: constant operands, as `scaled_mm` and `scaled_mm_azp` take them. They are kept, and
            must not be given other memory after the first call (``.data =``, ``.cuda()`` of their module). Unless
            ``overlap`` is another, b must not be written by work that may still run when a call is made. This function
            waits for what is on the current stream now; after updating b in place synchronise again, and do not write
            it within a graph that also holds calls.
        out_dtype, config, batch_invariant: as in `scaled_mm`.
        overlap: as in `scaled_mm`, but ``"weights"`` unless asked otherwise.

    Raises:
        ArgumentError: an operand is not acceptable.
        ConfigError: ``config`` is not understood.
    """
    return PreparedMM(b, scale_b, out_dtype, bias, azp_adj, config, overlap, batch_invariant)


def settle(b: Tensor, overlap: str) -> None:
    """Wait for what writes b on the current stream, if calls with this overlap would not wait for it themselves."""
    # Where CUDA has not begun, nothing runs: b has no memory.
    running = b.is_cuda and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if running and overlap == Overlap.WEIGHTS.value and not torch.cuda.is_current_stream_capturing():
        # It lets calls start that load b before they wait.
        torch.cuda.current_stream(b.device).synchronize()


@dataclass(frozen=True)
class _Common:
    """A call with contiguous activations and no zero points.

    Attributes:
        launch: `calls.Resolved.launch` of what it resolves to.
        dtype, index: the activations' type and device.
        shape: of the result.
        b: address of the weights.
        rest: addresses of the operands after scale_a.
        generation: what it is valid as long as.
    """

    launch: Callable[..., None]
    dtype: torch.dtype
    index: int
    shape: tuple[int, ...]
    b: int
    rest: tuple[int, ...]
    generation: object


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
        if torch.is_grad_enabled():
            refuse_gradients(scale_b, bias)
        options(config, overlap, batch_invariant)
        self._given = (config, overlap, batch_invariant)
        self._b, self._scale_b, self._out_dtype, self._bias, self._azp_adj = b, scale_b, out_dtype, bias, azp_adj
        self._plain = type(b) in PLAIN and type(scale_b) in PLAIN and not b.is_meta
        settle(b, overlap)
        if self._plain:
            # One row of any activations: what is wrong with the weights shows now.
            row = torch.empty((1, *b.shape[:1]), dtype=b.dtype, device=b.device)
            check(row, b, torch.empty((1, 1), device=b.device), scale_b, out_dtype, bias, azp_adj, None, None)
        self._kept: Memo[tuple[Any, ...], calls.Resolved] = Memo(_MAX_KEPT)
        # Those of them that the shapes of contiguous tensors tell apart.
        self._common: Memo[tuple[torch.Size, torch.Size, torch.Size | None], _Common] = Memo(_MAX_KEPT)
        self._generation = calls.generation()

    def __call__(self, a: Tensor, scale_a: Tensor, azp: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """D = scale_a * scale_b * (a @ b - azp * azp_adj) + bias.

        Args:
            a, scale_a, azp, out: as in `scaled_mm` and `scaled_mm_azp`.

        Returns:
            [..., N] of the prepared out_dtype: ``out`` if given.

        Raises:
            W8A8Error: as `scaled_mm` says.
        """
        if azp is not None and self._azp_adj is None:
            raise ArgumentError("azp is given, but prepare() got no azp_adj; pass the int32 column sums of b there")
        if is_compiling():
            return self._traced(a, scale_a, azp, out)
        # The common call: plain contiguous tensors, shapes met before. What is asked here is what `_call` keeps such
        # a call under; it takes the time it takes, so nothing is asked twice.
        if type(a) is Tensor and type(scale_a) is Tensor and azp is None:
            found = self._common.get((a.shape, scale_a.shape, None if out is None else out.shape))
            if (
                found is not None
                and a.dtype is found.dtype
                and a.is_contiguous()
                and a.get_device() == found.index
                and scale_a.dtype is torch.float32
                and scale_a.is_contiguous()
                and scale_a.get_device() == found.index
                and not scale_a.is_neg()
                and not scale_a.requires_grad
                and found.generation is calls.generation()
            ):
                if out is None:
                    result = torch.empty(found.shape, dtype=self._out_dtype, device=a.device)
                elif (
                    out.dtype is self._out_dtype
                    and out.is_contiguous()
                    and out.get_device() == found.index
                    and not out.is_neg()
                ):
                    result = out
                else:
                    return self._call(a, scale_a, azp, out)
                found.launch(found.index, a.data_ptr(), found.b, result.data_ptr(), scale_a.data_ptr(), *found.rest)
                return result
        return self._call(a, scale_a, azp, out)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled by its operands and options; what it keeps of calls is worked out again."""
        return PreparedMM, self.given

    @property
    def given(self) -> tuple[Any, ...]:
        """What it was made of, in the order of its constructor's arguments."""
        return self._b, self._scale_b, self._out_dtype, self._bias, self._azp_adj, *self._given

    def __repr__(self) -> str:
        k, n = self._b.shape
        config, overlap, batch_invariant = self._given
        return (
            f"PreparedMM(k={k}, n={n}, {self._b.dtype} to {self._out_dtype}, bias={self._bias is not None}, "
            f"azp={self._azp_adj is not None}, config={config}, overlap={overlap!r}, batch_invariant={batch_invariant})"
        )

    def _call(self, a: Tensor, scale_a: Tensor, azp: Tensor | None, out: Tensor | None) -> Tensor:
        if not self._plain or type(a) not in PLAIN or type(scale_a) not in PLAIN or a.is_meta:
            return self._traced(a, scale_a, azp, out)
        try:
            key = (
                signature(a),
                signature(scale_a),
                None if azp is None else signature(azp),
                None if out is None else signature(out),
            )
        except (AttributeError, TypeError, RuntimeError):
            check_kinds(a, self._b, scale_a, self._scale_b, self._out_dtype, self._bias, self._azp_adj, azp, out)
            raise
        if scale_a.requires_grad and torch.is_grad_enabled():
            refuse_gradients(scale_a)
        if self._generation is not calls.generation():
            self._forget()
        resolved = self._kept.get(key) or self._resolve(key, a, scale_a, azp, out)
        given = (scale_a, self._scale_b, azp, self._azp_adj, self._bias)
        if resolved.call is None:
            return evaluated(resolved.request, a, self._b, given, out)
        request = resolved.request
        result = torch.empty((request.m, request.n), dtype=self._out_dtype, device=a.device) if out is None else out
        operands = calls.addresses(resolved.order, given)
        resolved.launch(a.get_device(), a.data_ptr(), self._b.data_ptr(), result.data_ptr(), *operands)
        return result if out is not None or a.dim() == 2 else result.view(request.shape)

    def _traced(self, a: Tensor, scale_a: Tensor, azp: Tensor | None, out: Tensor | None) -> Tensor:
        return traced(
            a, self._b, scale_a, self._scale_b, self._out_dtype, self._azp_adj, azp, self._bias, out, *self._given
        )

    def _resolve(
        self, key: tuple[Any, ...], a: Tensor, scale_a: Tensor, azp: Tensor | None, out: Tensor | None
    ) -> calls.Resolved:
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
            self._kept.superseded.get(key),
        )
        calls.keep(key, resolved, self._kept)
        plain = a.is_contiguous() and scale_a.is_contiguous() and (out is None or out.is_contiguous())
        if resolved.call is not None and azp is None and plain and resolved.order[0] == 0:
            # Constant operands are kept by their addresses; scale_a comes first in every formula.
            given = (None, self._scale_b, None, self._azp_adj, self._bias)
            common = _Common(
                resolved.launch,
                a.dtype,
                a.get_device(),
                resolved.request.shape,
                self._b.data_ptr(),
                calls.addresses(resolved.order[1:], given),
                self._generation,
            )
            shapes = a.shape, scale_a.shape, None if out is None else out.shape
            if resolved.awaits is None:
                self._common.keep(shapes, common)
            else:
                resolved.awaits.keep(self._common, shapes, common)
        return resolved

    def _forget(self) -> None:
        self._kept.forget()
        self._common.forget()
        self._generation = calls.generation()
