"""From a call that quantises to its launches: what a signature resolves to is worked out once, and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cutlass_w8a8.calls import signature
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.memo import Memo
from cutlass_w8a8.quant_eval import quantized
from cutlass_w8a8.quant_request import Names, QuantRequest, check_quantize, check_quantize_kinds
from cutlass_w8a8.request import ALIGNMENT, refuse_gradients
from cutlass_w8a8.runtime.device import Device, arch_of, current_device, device, on_change, raw_stream
from cutlass_w8a8.runtime.loader import LoadedKernel
from cutlass_w8a8.runtime.quantize import PreparedQuantize
from cutlass_w8a8.spec import QuantSpec, Scheme

if TYPE_CHECKING:
    from cutlass_w8a8.dispatch import WholeLaunch

Tensor = torch.Tensor

# Prepared calls by everything their validity depends on.
_prepared: Memo[tuple[Any, ...], _Prepared] = Memo()
# The first capability whose kernels wait for the one before them themselves.
_OVERLAPPING = (9, 0)
# Words of what is seen of a tensor by one row of threads: the magnitude, or the extremes.
_SEEN_WORDS = {Scheme.TENSOR: 1, Scheme.TENSOR_AZP: 2}


@dataclass(frozen=True)
class _Prepared:
    """What one signature of a call resolves to.

    Attributes:
        request: the checked call.
        call: the launch that quantises; None where no kernel runs (CPU, empty).
        scan: the launch before it that looks for the scale; None where there is none.
        words: int32 that the scan leaves for the other one.
        static, azp, scans: the scheme's, looked up once.
        x_span, q_span, scale_span: bytes from the first to the last of x, of the result, and of the scales; the zero
            points take as many.
    """

    request: QuantRequest
    call: PreparedQuantize | None
    scan: PreparedQuantize | None
    words: int
    static: bool
    azp: bool
    scans: bool
    x_span: int
    q_span: int
    scale_span: int


def run(
    x: Tensor,
    dtype: torch.dtype,
    scheme: str,
    out: Tensor | None,
    scale: Tensor | None,
    azp: Tensor | None,
    overlap: str,
    names: Names,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise eagerly.

    Args:
        scheme: the value of a `Scheme`.
        scale, azp: what static schemes are given; else where to write, None to allocate.
        names: what the caller calls them.

    Returns:
        The values, the scales, and the zero points, None without.

    Raises:
        W8A8Error: as `cutlass_w8a8.quantize` says.
    """
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
            scheme,
            overlap,
            None if out is None else (*signature(out), out.data_ptr() % ALIGNMENT),
            None if scale is None else signature(scale),
            None if azp is None else signature(azp),
        )
        prepared = _prepared.get(key)
    except (AttributeError, TypeError, RuntimeError):
        check_quantize_kinds(x, dtype, out, scale, azp, overlap, names)
        raise
    if (x.requires_grad or (scale is not None and scale.requires_grad)) and torch.is_grad_enabled():
        refuse_gradients(x, scale)
    if prepared is None:
        prepared = _prepare(x, dtype, Scheme(scheme), out, scale, azp, overlap, names)
        _prepared.keep(key, prepared)
    request, call = prepared.request, prepared.call
    q = torch.empty(x.shape, dtype=dtype, device=x.device) if out is None else out
    if scale is None:
        scale = torch.empty(request.scales, dtype=torch.float32, device=x.device)
    q_pointer, scale_pointer = q.data_ptr(), scale.data_ptr()
    x_end, q_end = pointer + prepared.x_span, q_pointer + prepared.q_span
    scale_end = scale_pointer + prepared.scale_span
    if q_pointer < x_end and pointer < q_end:
        raise _shared("out", "x")
    if scale_pointer < q_end and q_pointer < scale_end:
        raise _shared(names[0], "out")
    if scale_pointer < x_end and pointer < scale_end and not prepared.static:
        raise _shared(names[0], "x")
    pointers: tuple[int, ...] = (pointer, q_pointer, scale_pointer)
    if prepared.azp:
        if azp is None:
            azp = torch.empty(request.scales, dtype=torch.int32, device=x.device)
        azp_pointer = azp.data_ptr()
        azp_end = azp_pointer + prepared.scale_span
        if azp_pointer < q_end and q_pointer < azp_end:
            raise _shared(names[1], "out")
        if not prepared.static:
            if azp_pointer < x_end and pointer < azp_end:
                raise _shared(names[1], "x")
            if azp_pointer < scale_end and scale_pointer < azp_end:
                raise _shared(names[1], names[0])
        pointers = (*pointers, azp_pointer)
    if call is None:
        return _evaluated(request, x, q, scale, azp)
    if current_device() == index:
        _launch(prepared, call, index, pointers)
    else:
        with torch.cuda.device(index):
            _launch(prepared, call, index, pointers)
    return q, scale, azp


def _launch(prepared: _Prepared, call: PreparedQuantize, index: int, pointers: tuple[int, ...]) -> None:
    stream = raw_stream(index)
    if not prepared.scans:
        call(stream, *pointers)
        return
    if prepared.scan is None:
        call(stream, *pointers, 0)
        return
    # Freed at the end of this call and, like any tensor, reused by what comes later in this stream.
    partial = torch.empty(prepared.words, dtype=torch.int32, device=index).data_ptr()
    prepared.scan(stream, *pointers, partial)
    call(stream, *pointers, partial)


def _evaluated(
    request: QuantRequest, x: Tensor, q: Tensor, scale: Tensor, azp: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    given = (scale, azp) if request.scheme.static else None
    values, scales, zeros = quantized(x.reshape(request.m, request.k), request.target, request.scheme, given)
    q.copy_(values.view(x.shape))
    if given is None:
        scale.copy_(scales)
        if azp is not None and zeros is not None:
            azp.copy_(zeros)
    return q, scale, azp


def _prepare(
    x: Tensor,
    dtype: torch.dtype,
    scheme: Scheme,
    out: Tensor | None,
    scale: Tensor | None,
    azp: Tensor | None,
    overlap: str,
    names: Names,
) -> _Prepared:
    request = check_quantize(x, dtype, scheme, out, scale, azp, overlap, names)
    m, k = request.m, request.k
    rest = (
        scheme.static,
        scheme.azp,
        scheme.scans,
        ((m - 1) * request.ldx + k) * request.source.bytes,
        (m - 1) * request.ldq + k,
        4 * (1 if scheme.whole else m),
    )
    if not x.is_cuda and x.device.type != "cpu":
        raise ArgumentError(f"x is on {x.device}; kernels run on CUDA devices, and the CPU is served by torch")
    if not x.is_cuda or not m or (scheme.whole and not k):
        return _Prepared(request, None, None, 0, *rest)
    # Here because cache, compilers and tables take as long to import as the rest, and many processes never need them.
    from cutlass_w8a8.acquire import entry_points
    from cutlass_w8a8.dispatch import quant_symbols

    where = device(x.get_device())
    arch = arch_of(where)
    # A fresh tensor starts on a boundary; what 16 bytes of x become is stored at once, too.
    aligned = x.data_ptr() % ALIGNMENT == 0 and (
        out is None or out.data_ptr() % (ALIGNMENT // request.source.bytes) == 0
    )
    spec = QuantSpec(arch, request.source, request.target, scheme)
    kernels = entry_points(spec, where, quant_symbols(scheme))
    # Older kernels do not wait: launched so, they would read what is still being written.
    early = overlap == "launch" and arch.capability >= _OVERLAPPING
    scan, call, words = launches(request, aligned, kernels, where, early)
    return _Prepared(request, call, scan, words, *rest)


def launches(
    request: QuantRequest, aligned: bool, kernels: Mapping[str, LoadedKernel], where: Device, early: bool
) -> tuple[PreparedQuantize | None, PreparedQuantize, int]:
    """The launches of a call that is not empty.

    Args:
        request: the call.
        aligned: whether the first row of x, and that of the result, may be accessed by vectors.
        kernels: the entry points of its kernel.
        where: the device.
        early: start while the kernel before is running.

    Returns:
        The launch that looks for a tensor's scale, None where there is none; the launch that quantises; and how many
        int32 the first leaves for the second.
    """
    from cutlass_w8a8.dispatch import WholeLaunch, quant_launch, whole_launch

    m, k, scheme = request.m, request.k, request.scheme
    scan: WholeLaunch | None = None
    if scheme.whole:
        scan, quantise = whole_launch(
            m,
            k,
            request.source.bytes,
            aligned=aligned and (request.packed or request.aligned),
            packed=request.packed,
            scans=scheme.scans,
            sm_count=where.sm_count,
        )
    else:
        plan = quant_launch(m, k, request.source.bytes, request.aligned and aligned, where.sm_count)
        quantise = WholeLaunch(plan, m, k, k)
    partials = scan.partials if scan else 0

    def prepared(plan: WholeLaunch) -> PreparedQuantize:
        return PreparedQuantize(
            kernels[plan.launch.symbol],
            where,
            # Rows cut anew follow one another.
            strides=(plan.k, plan.k) if scheme.whole and request.packed else (request.ldx, request.ldq),
            extents=(plan.m, plan.k, plan.launch.vectors),
            block=(plan.launch.threads, plan.launch.rows),
            overlap=early,
            pointers=3 + scheme.azp + scheme.scans,
            whole=(plan.last, partials) if scheme.whole else None,
            blocks=plan.blocks,
        )

    return prepared(scan) if scan else None, prepared(quantise), partials * _SEEN_WORDS.get(scheme, 0)


def _shared(name: str, other: str) -> ArgumentError:
    return ArgumentError(f"{name} shares memory with {other}, which it would overwrite; pass another tensor as {name}")


# Another arch's kernels are other kernels.
on_change.append(_prepared.forget)
