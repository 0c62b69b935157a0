"""Quantisation by rows: the public call, eager dispatch and launch, and the same in torch for the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling

from cutlass_w8a8.calls import PLAIN
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.evt.evaluate import TORCH_DTYPES
from cutlass_w8a8.memo import Memo
from cutlass_w8a8.quant_request import QuantRequest, check_quantize, check_quantize_kinds, check_quantize_types
from cutlass_w8a8.request import ALIGNMENT, refuse_gradients
from cutlass_w8a8.runtime.device import arch_of, current_device, device, on_change, raw_stream
from cutlass_w8a8.runtime.quantize import PreparedQuantize
from cutlass_w8a8.spec import QUANT_FLOOR, QUANT_LARGEST, QuantSpec

Tensor = torch.Tensor

# Prepared calls by everything their validity depends on.
_prepared: Memo[tuple[Any, ...], _Prepared] = Memo()
# The first capability whose kernels wait for the one before them themselves.
_OVERLAPPING = (9, 0)
_E4M3_NAN = 0x7F


@dataclass(frozen=True)
class _Prepared:
    """What one signature of a call resolves to.

    Attributes:
        request: the checked call.
        call: the launch; None where no kernel runs (CPU, empty).
        x_span, q_span: bytes from the first to the last of x, and of the result.
    """

    request: QuantRequest
    call: PreparedQuantize | None
    x_span: int
    q_span: int


def quantize_per_token(
    x: Tensor,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    scale: Tensor | None = None,
    overlap: str = "none",
) -> tuple[Tensor, Tensor]:
    """Quantise each row of x by a scale of its own, as the first operand of `scaled_mm`.

    float8_e4m3fn: ``scale = max(amax / 448, 1 / (448 * 512))``, ``q = e4m3(x * (1 / scale))``, rounded to nearest
    even. int8: ``scale = max(amax / 127, 2**-126)``, ``q = rint(x * (1 / scale))``, within -127..127. ``amax`` is the
    row's largest magnitude; every operation is a float32 one, correctly rounded, so GPUs and the CPU agree to the bit.

    A row of zeros has the least scale and zeros (with their signs, for fp8). A NaN anywhere makes its row's scale NaN,
    q NaN (fp8, 0x7f) or 0 (int8). Otherwise an infinity makes its row's scale infinite, and q 0 but for the infinities
    themselves, which become NaN (fp8) or 0 (int8). Either way the row's products are NaN: nothing is hidden.

    vLLM's ``dynamic_per_token_scaled_fp8_quant`` divides by the scale, where this multiplies by its reciprocal, and can
    bound ``amax``; its ``dynamic_scaled_int8_quant`` multiplies by ``127 / amax``, and gives rows of zeros the scale 0.
    Otherwise scales follow the same formula; values may differ by one step.

    The first call of a kind compiles its kernel, which takes seconds; one kernel serves all shapes.

    Args:
        x: [..., K], torch.bfloat16, torch.float16 or torch.float32, contiguous along K; leading dimensions are
            flattened to M, rows may be padded. Rows on 16-byte boundaries are read 16 bytes at a time, others
            element by element.
        dtype: torch.float8_e4m3fn or torch.int8.
        out: result tensor of x's shape and this dtype, rows may be padded; allocated if None.
        scale: float32 [M, 1], contiguous, for the scales; allocated if None.
        overlap: ``"none"`` is an ordinary launch, and the only one of kernels for GPUs before 9.0. ``"launch"`` has the
            kernel start while the one before it in the stream ends, though it reads and writes nothing before that one
            has ended, and lets the next one start likewise if it is launched to, as `scaled_mm` can be.

    Returns:
        q, of x's shape, and the scales, float32 [M, 1]: ``x`` is about ``scale * q``.

    Raises:
        ArgumentError: an argument is not acceptable (nothing was launched).
        UnsupportedError: no kernel serves this device.
        ToolchainError: a kernel must be compiled and cannot be (`CompileError`: the compiler failed).
        CacheError: the cache cannot be written, or ``CUTLASS_W8A8_JIT=off`` and the kernel is not in it.
        LaunchError: the driver refused to load or launch the kernel.
    """
    if is_compiling() or type(x) not in PLAIN or x.is_meta:
        return _traced(x, dtype, out, scale, overlap)
    return _run(x, dtype, out, scale, overlap)


def _run(
    x: Tensor, dtype: torch.dtype, out: Tensor | None, scale: Tensor | None, overlap: str
) -> tuple[Tensor, Tensor]:
    try:
        pointer = x.data_ptr()
        index = x.get_device()
        key = (
            x.shape,
            x.stride(),
            x.dtype,
            index,
            x.is_neg(),
            pointer % ALIGNMENT,
            dtype,
            overlap,
            None if out is None else (*_signature(out), out.data_ptr() % ALIGNMENT),
            None if scale is None else _signature(scale),
        )
        prepared = _prepared.get(key)
    except (AttributeError, TypeError, RuntimeError):
        check_quantize_kinds(x, dtype, out, scale, overlap)
        raise
    if (x.requires_grad or (scale is not None and scale.requires_grad)) and torch.is_grad_enabled():
        refuse_gradients(x, scale)
    if prepared is None:
        prepared = _prepare(x, dtype, out, scale, overlap)
        _prepared.keep(key, prepared)
    request, call = prepared.request, prepared.call
    q = torch.empty(x.shape, dtype=dtype, device=x.device) if out is None else out
    if scale is None:
        scale = torch.empty((request.m, 1), dtype=torch.float32, device=x.device)
    q_pointer, scale_pointer = q.data_ptr(), scale.data_ptr()
    x_end, q_end, scale_end = pointer + prepared.x_span, q_pointer + prepared.q_span, scale_pointer + 4 * request.m
    if q_pointer < x_end and pointer < q_end:
        raise _shared("out", "x")
    if scale_pointer < x_end and pointer < scale_end:
        raise _shared("scale", "x")
    if scale_pointer < q_end and q_pointer < scale_end:
        raise _shared("scale", "out")
    if call is None:
        values, scales = quantize_rows(x.reshape(request.m, request.k), request.target)
        return q.copy_(values.view(x.shape)), scale.copy_(scales)
    if current_device() == index:
        call(raw_stream(index), pointer, q_pointer, scale_pointer)
    else:
        with torch.cuda.device(index):
            call(raw_stream(index), pointer, q_pointer, scale_pointer)
    return q, scale


def _signature(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.get_device(), tensor.stride()


def _prepare(x: Tensor, dtype: torch.dtype, out: Tensor | None, scale: Tensor | None, overlap: str) -> _Prepared:
    request = check_quantize(x, dtype, out, scale, overlap)
    spans = (
        ((request.m - 1) * request.ldx + request.k) * request.source.bytes,
        (request.m - 1) * request.ldq + request.k,
    )
    if not x.is_cuda and x.device.type != "cpu":
        raise ArgumentError(f"x is on {x.device}; kernels run on CUDA devices, and the CPU is served by torch")
    if not x.is_cuda or not request.m:
        return _Prepared(request, None, *spans)
    from cutlass_w8a8.acquire import entry_points
    from cutlass_w8a8.dispatch import QUANT_SYMBOLS, quant_launch

    where = device(x.get_device())
    arch = arch_of(where)
    # A fresh tensor starts on a boundary; what 16 bytes of x become is stored at once, too.
    aligned = x.data_ptr() % ALIGNMENT == 0 and (
        out is None or out.data_ptr() % (ALIGNMENT // request.source.bytes) == 0
    )
    plan = quant_launch(request.m, request.k, request.source.bytes, request.aligned and aligned, where.sm_count)
    call = PreparedQuantize(
        entry_points(QuantSpec(arch, request.source, request.target), where, QUANT_SYMBOLS)[plan.symbol],
        where,
        strides=(request.ldx, request.ldq),
        extents=(request.m, request.k, plan.vectors),
        block=(plan.threads, plan.rows),
        # Older kernels do not wait: launched so, they would read what is still being written.
        overlap=overlap == "launch" and arch.capability >= _OVERLAPPING,
    )
    return _Prepared(request, call, *spans)


def _shared(name: str, other: str) -> ArgumentError:
    return ArgumentError(f"{name} shares memory with {other}, which it would overwrite; pass another tensor as {name}")


def quantize_rows(x: Tensor, target: DType) -> tuple[Tensor, Tensor]:
    """What the kernels compute, in torch, to the bit, on any device.

    Args:
        x: [M, K] of a floating type no wider than float32.
        target: e4m3 or int8.

    Returns:
        q [M, K], and the scales, float32 [M, 1].
    """
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True) if x.shape[1] else wide.new_zeros(x.shape[0], 1)
    # Division by a number is a product with its rounded reciprocal on CUDA; by a tensor it is a division.
    scale = torch.maximum(
        largest / torch.full_like(largest, QUANT_LARGEST[target]), torch.full_like(largest, QUANT_FLOOR[target])
    )
    # One NaN of the many, as in the kernels.
    scale = torch.where(scale.isnan(), torch.nan, scale)
    scaled = wide * (torch.ones_like(scale) / scale)
    if target is DType.INT8:
        return torch.where(scaled.isnan(), 0.0, scaled).round().to(torch.int8), scale
    # The conversion does not saturate: a quotient rounded up past the largest value would become NaN.
    largest_finite = QUANT_LARGEST[target]
    bits = scaled.clamp(-largest_finite, largest_finite).to(TORCH_DTYPES[target]).view(torch.uint8)
    return torch.where(scaled.isnan(), _E4M3_NAN, bits).to(torch.uint8).view(TORCH_DTYPES[target]), scale


def quantize_fake(x: Tensor, dtype: torch.dtype, overlap: str = "none") -> tuple[Tensor, Tensor]:
    """Tensors like the results, without values, for tracing.

    Raises:
        ArgumentError: the types are not served.
    """
    check_quantize_kinds(x, dtype, None, None, overlap)
    check_quantize_types(x, dtype)
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    return q, torch.empty((math.prod(x.shape[:-1]), 1), dtype=torch.float32, device=x.device)


def _traced(
    x: Tensor, dtype: torch.dtype, out: Tensor | None, scale: Tensor | None, overlap: str
) -> tuple[Tensor, Tensor]:
    check_quantize_kinds(x, dtype, out, scale, overlap)
    if torch.is_grad_enabled():
        refuse_gradients(x, scale)
    if out is None and scale is None:
        q, fresh = torch.ops.cutlass_w8a8.quantize_per_token(x, dtype, overlap)
        return q, fresh
    check_quantize_types(x, dtype)
    if out is None:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    elif out.dtype is not dtype:
        raise ArgumentError(f"out has dtype {out.dtype} but dtype is {dtype}; make them alike")
    if scale is None:
        scale = torch.empty((math.prod(x.shape[:-1]), 1), dtype=torch.float32, device=x.device)
    torch.ops.cutlass_w8a8.quantize_per_token_out(out, scale, x, overlap)
    return out, scale


# Another arch's kernels are other kernels.
on_change.append(_prepared.forget)
