"""The public calls that quantise, and how they are traced."""

from __future__ import annotations

import math

import torch
from torch.compiler import is_compiling

from cutlass_w8a8.calls import PLAIN
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.problem import DEFAULT_OVERLAP
from cutlass_w8a8.quant_calls import run
from cutlass_w8a8.quant_request import (
    Names,
    check_one,
    check_quantize_kinds,
    check_quantize_types,
    check_scheme,
)
from cutlass_w8a8.request import refuse_gradients
from cutlass_w8a8.spec import Scheme

Tensor = torch.Tensor

GIVEN: Names = ("scale", "azp")
_FOUND: Names = ("scale_out", "azp_out")


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None = None,
    azp: Tensor | None = None,
    *,
    granularity: str | None = None,
    symmetric: bool | None = None,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    azp_out: Tensor | None = None,
    overlap: str = DEFAULT_OVERLAP,
) -> tuple[Tensor, ...]:
    """Quantise x: by rows or as a whole, by scales that are found or given, with a zero point or without.

    ``x`` is about ``scale * q``, with a zero point about ``scale * (q - azp)``, which is how `scaled_mm` and
    `scaled_mm_azp` take it. Every operation is a float32 one, correctly rounded, so GPUs and the CPU agree to the bit:

    ====================== ========================================== =============================================
    scale                  symmetric                                  with a zero point (int8 only)
    ====================== ========================================== =============================================
    found, ``token``,      ``max(amax / L, floor)``; L and floor are  ``max((high - low) / 255, 2**-126)``,
    ``tensor``             448, 1 / (448 * 512) for float8_e4m3fn,    ``azp = rint(-128 - low / scale)``, where high
                           127, 2**-126 for int8                      and low are the extremes of the values and 0
    given                  ``scale``                                  ``scale``, ``azp``
    ====================== ========================================== =============================================

    float8_e4m3fn: ``q = e4m3(x * (1 / scale))``, rounded to nearest even, within -448..448.
    int8: ``q = rint(x * (1 / scale)) + azp``, within -128..127; rint rounds to nearest even. The range includes 0, so
    that 0 is represented exactly and ``azp`` is an int8. It is halved before the subtraction, and cannot overflow.

    **NaN and infinity.** A scale that is found carries them: a NaN makes it NaN, an infinity infinite, and all products
    of the row (of the tensor) are then NaN; q is 0, or azp, or (fp8) NaN where x is or would be 0 * infinity. A scale
    that is given cannot: infinities saturate as large values do; fp8 keeps NaN (0x7f), int8 has none, and x's NaN
    become 0, or azp, that is, zeros. Look for them first where they can occur.

    A call whose scale is found for a tensor, unless that is small, launches two kernels: the first leaves maxima of
    parts of x in memory of this call's own, the second puts them together and quantises. Neither needs anything to be
    reset, and the order of blocks does not matter to the result. All other calls launch one.

    vLLM's ``static_scaled_int8_quant`` divides by the scale where there is no zero point, and multiplies by its
    reciprocal, as this does, where there is; at halves of a step the quotient can round the other way. Its
    ``dynamic_scaled_int8_azp_quant`` does not include 0 in the range: for rows that do not, zero points need not fit
    int8, and those of constant rows are undefined. See `quantize_per_token` for the others.

    Args:
        x: [..., K], torch.bfloat16, torch.float16 or torch.float32, contiguous along K; leading dimensions are
            flattened to M, rows may be padded. Memory on 16-byte boundaries is read 16 bytes at a time, other memory
            element by element.
        dtype: torch.float8_e4m3fn or torch.int8.
        scale: float32, one value, on x's device, which is not looked at on the host; None to have it found.
        azp: int32, one value from -128 to 127 likewise, to go with ``scale``.
        granularity: ``"token"``, a scale for each row, or ``"tensor"``, one for all. None: ``"tensor"`` where ``scale``
            is given, ``"token"`` where it is found.
        symmetric: False to have a zero point found. None: whether ``azp`` is given.
        out: result tensor of x's shape and this dtype, rows may be padded; allocated if None.
        scale_out, azp_out: where to put what is found, float32 and int32, [M, 1] by rows or [1], contiguous; allocated
            if None.
        overlap: as of `quantize_per_token`.

    Returns:
        ``(q, scale)``, or ``(q, scale, azp)`` with a zero point: q of x's shape; scale and azp as given, or found:
        [M, 1] by rows, else [1].

    Raises:
        As `quantize_per_token`.
    """
    scheme = check_scheme(granularity, symmetric, dtype, scale, azp, scale_out, azp_out)
    names = GIVEN if scheme.static else _FOUND
    scale, azp = (scale, azp) if scheme.static else (scale_out, azp_out)
    if is_compiling() or type(x) not in PLAIN or x.is_meta:
        results = _traced(x, dtype, scheme, out, scale, azp, overlap, names)
    else:
        results = run(x, dtype, scheme.value, out, scale, azp, overlap, names)
    return results if results[2] is not None else results[:2]  # type: ignore[return-value]


def quantize_per_token(
    x: Tensor,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    scale: Tensor | None = None,
    overlap: str = DEFAULT_OVERLAP,
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
        LaunchError: the driver refused to load or launch the kernel, or it is not loaded and a CUDA graph is being
            captured.
    """
    if is_compiling() or type(x) not in PLAIN or x.is_meta:
        return _traced(x, dtype, Scheme.TOKEN, out, scale, None, overlap, GIVEN)[:2]
    return run(x, dtype, "token", out, scale, None, overlap, GIVEN)[:2]


def quantize_fake(
    x: Tensor, dtype: torch.dtype, granularity: str = "token", overlap: str = DEFAULT_OVERLAP
) -> tuple[Tensor, Tensor]:
    """Tensors like the values and scales, without memory of their own, for tracing.

    Raises:
        ArgumentError: the types are not served.
    """
    check_quantize_kinds(x, dtype, None, None, None, overlap, GIVEN)
    check_quantize_types(x, dtype)
    shape = (1,) if granularity == "tensor" else (math.prod(x.shape[:-1]), 1)
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    return q, torch.empty(shape, dtype=torch.float32, device=x.device)


def _traced(
    x: Tensor,
    dtype: torch.dtype,
    scheme: Scheme,
    out: Tensor | None,
    scale: Tensor | None,
    azp: Tensor | None,
    overlap: str,
    names: Names,
) -> tuple[Tensor, Tensor, Tensor | None]:
    check_quantize_kinds(x, dtype, out, scale, azp, overlap, names)
    if torch.is_grad_enabled():
        refuse_gradients(x, scale)
    ops = torch.ops.cutlass_w8a8
    if out is not None and out.dtype is not dtype:
        raise ArgumentError(f"out has dtype {out.dtype} but dtype is {dtype}; make them alike")
    if scheme.static and scale is not None:
        check_one(names[0], scale, torch.float32)
        if azp is not None:
            check_one(names[1], azp, torch.int32)
        if out is None:
            return ops.quantize_static(x, dtype, scale, azp, overlap), scale, azp
        ops.quantize_static_out(out, x, scale, azp, overlap)
        return out, scale, azp
    granularity = "tensor" if scheme.whole else "token"
    if out is None and scale is None and azp is None:
        if scheme is Scheme.TOKEN:
            q, scale = ops.quantize_per_token(x, dtype, overlap)
        elif scheme.azp:
            q, scale, azp = ops.quantize_azp(x, dtype, granularity, overlap)
        else:
            q, scale = ops.quantize(x, dtype, granularity, overlap)
        return q, scale, azp
    q, found = quantize_fake(x, dtype, granularity, overlap)
    out = q if out is None else out
    scale = found if scale is None else scale
    if scheme is Scheme.TOKEN:
        ops.quantize_per_token_out(out, scale, x, overlap)
        return out, scale, None
    if scheme.azp and azp is None:
        azp = torch.empty(found.shape, dtype=torch.int32, device=x.device)
    ops.quantize_out(out, scale, azp, x, granularity, overlap)
    return out, scale, azp
