"""The public calls: eager dispatch and launch, and the same as torch custom operators."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling

from cutlass_w8a8 import pipeline
from cutlass_w8a8.arch import Family, arch_named
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.evt.evaluate import TORCH_DTYPES, accumulate, evaluate
from cutlass_w8a8.evt.tree import Broadcast
from cutlass_w8a8.request import ALIGNMENT, Request, check, check_kinds, misaligned, overlapping, refuse_gradients
from cutlass_w8a8.runtime.device import arch_of, device, force_arch
from cutlass_w8a8.runtime.launch import Extents, PreparedCall
from cutlass_w8a8.runtime.loader import LoadedKernel, load
from cutlass_w8a8.spec import KernelSpec
from cutlass_w8a8.support import Config, choose, parse_config

Tensor = torch.Tensor

# The epilogue's operands in the order this module hands them around.
OPERANDS = ("scale_a", "scale_b", "azp", "azp_adj", "bias")
_SCALES = (0, 1)

# Prepared calls by everything their validity depends on. Serving sees a bounded set of shapes; should it not, the
# oldest are forgotten.
_MAX_PREPARED = 16384
_prepared: dict[tuple[Any, ...], _Prepared] = {}
# Kernels in use, so that a new shape needs no look at the cache.
_kernels: dict[tuple[KernelSpec, int], LoadedKernel] = {}
_lock = threading.Lock()

# Types whose data pointer is their data; any other tensor goes through the dispatcher.
_PLAIN = frozenset((Tensor, torch.nn.Parameter))

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)


@dataclass(frozen=True)
class _Prepared:
    """What one signature of a call resolves to. ``call`` is None where no kernel runs (CPU, empty)."""

    request: Request
    call: PreparedCall | None
    # Positions in OPERANDS of the kernel's operands, in its own order.
    order: tuple[int, ...]
    # Those among them that the kernel reads 16 bytes at a time.
    wide: tuple[int, ...]
    # Bytes from the first to the last of the result, and of a, b and the kernel's operands in its own order.
    out_span: int = 0
    spans: tuple[int, ...] = ()


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    config: Config = None,
) -> Tensor:
    """D = scale_a * scale_b * (a @ b) + bias, in one kernel.

    Computes ``round_to_out(fma(scale_a, round_f32(scale_b * float(acc)), float(bias)))``; without a bias the outer
    operation is a float32 product. For int8 ``acc`` is the exact int32 product, so the result does not depend on
    the configuration; for fp8 it is the tensor core's float32 accumulation over K.
    The first call of a kind compiles its kernel, which takes up to a minute; later ones, and later processes, find
    it in the cache. CPU tensors are served by an evaluator of the same formula.

    Args:
        a: [M, K] or [..., M, K], torch.float8_e4m3fn or torch.int8, contiguous along K; rows may be padded
            to any multiple of 16 bytes. Leading dimensions are flattened.
        b: [K, N] of a's dtype, contiguous along K (column-major: the transpose of a [N, K] weight), columns padded
            likewise.
        scale_a: float32, one value (shape (), (1,), (1, 1)) or one per row of a ((M,), (M, 1)).
        scale_b: float32, one value or one per column of b ((N,), (1, N), (N, 1)).
        out_dtype: torch.bfloat16, torch.float16 or torch.float32.
        bias: [N] of out_dtype, or None.
        out: result tensor [..., N] of out_dtype, rows padded to any multiple of 16 bytes; allocated if None.
        config: a `KernelConfig` or its text form, instead of the heuristic's choice. On the CPU its form is checked,
            and it has no effect.

    K must be a multiple of 16, N of 8. All pointers must be 16-byte aligned.

    Returns:
        [..., N] of out_dtype: ``out`` if given.

    Raises:
        ArgumentError: an operand is not acceptable (nothing was launched).
        ConfigError: ``config`` is impossible.
        UnsupportedError: no kernel serves this device or these types.
        ToolchainError: a kernel must be compiled and cannot be (`CompileError`: the compiler failed).
        CacheError: the cache cannot be written, or ``CUTLASS_W8A8_JIT=off`` and the kernel is not in it.
        LaunchError: the driver refused to load or launch the kernel.
    """
    if (
        is_compiling()
        or type(a) not in _PLAIN
        or type(b) not in _PLAIN
        or type(scale_a) not in _PLAIN
        or type(scale_b) not in _PLAIN
        or a.is_meta
    ):
        return _traced(a, b, scale_a, scale_b, out_dtype, None, None, bias, out, config)
    return _run(a, b, scale_a, scale_b, out_dtype, None, None, bias, out, config)


def scaled_mm_azp(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    azp_adj: Tensor,
    azp: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    config: Config = None,
) -> Tensor:
    """D = scale_a * scale_b * (a @ b - azp * azp_adj) + bias for int8 operands, in one kernel.

    The real activation is ``scale_a * (a - azp)``. The subtraction is exact int32 arithmetic as long as the zero
    points are those of int8 data (-128..127) and K <= 65793.

    Args:
        azp_adj: int32 [N] (or [1, N]). With ``azp``: the column sums of b over K. Without it: those sums already
            multiplied by the per-tensor zero point.
        azp: int32 [M] (or [M, 1]), the zero point of each row of a; None for a per-tensor zero point.

    The other arguments, the result and the errors are those of `scaled_mm`; a and b must be torch.int8.
    """
    if azp_adj is None:
        raise ArgumentError("azp_adj is None; pass the int32 column sums of b, or call scaled_mm")
    if (
        is_compiling()
        or type(a) not in _PLAIN
        or type(b) not in _PLAIN
        or type(scale_a) not in _PLAIN
        or type(scale_b) not in _PLAIN
        or a.is_meta
    ):
        return _traced(a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias, out, config)
    return _run(a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias, out, config)


def cutlass_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """`scaled_mm` under the name and argument order of vLLM's ``_custom_ops`` (not of its ``torch.ops._C``)."""
    return scaled_mm(a, b, scale_a, scale_b, out_dtype, bias)


def cutlass_scaled_mm_azp(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    azp_adj: Tensor,
    azp: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`scaled_mm_azp` under the name and argument order of vLLM's ``_custom_ops`` (not of its ``torch.ops._C``)."""
    return scaled_mm_azp(a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias)


@contextmanager
def use_arch(name: str, device: int | torch.device | str | None = None) -> Iterator[None]:
    """Within this context, serve calls with the kernels of another architecture than the GPU's own.

    For tests and comparisons: kernels of sm75 to sm89 carry PTX, so any newer GPU runs them. Holds for the whole
    process; do not enter or leave it while other threads make calls. Of nested contexts that concern a device the
    innermost holds. ``CUTLASS_W8A8_ARCH`` does the same from outside.

    Args:
        name: the architecture, such as ``"sm80"``.
        device: the CUDA device it is for: index, torch.device, or text such as ``"cuda:1"``; all of them if None.

    Raises:
        ArgumentError: ``device`` is none of these, or not a CUDA device of this machine.
        UnsupportedError: there is no such architecture. Calls raise it if the device cannot run its kernels.
    """
    end = force_arch(_device_index(device), arch_named(name))
    _forget()
    try:
        yield
    finally:
        end()
        _forget()


def _device_index(device: int | torch.device | str | None) -> int | None:
    if device is None:
        return None
    try:
        index = device if isinstance(device, int) else torch.device(device).index
        cuda = isinstance(device, int) or torch.device(device).type == "cuda"
    except (TypeError, RuntimeError):
        index, cuda = None, False
    if isinstance(device, bool) or not cuda or index is None or not 0 <= index < torch.cuda.device_count():
        raise ArgumentError(
            f"device is {device!r}; pass the index of a CUDA device, a torch.device or text like 'cuda:0', or None for "
            f"all; this machine has {torch.cuda.device_count()}"
        )
    return index


def _forget() -> None:
    with _lock:
        _prepared.clear()


def _run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    azp_adj: Tensor | None,
    azp: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None,
    config: Config,
) -> Tensor:
    try:
        key = (
            a.shape,
            a.stride(),
            a.dtype,
            a.get_device(),
            b.shape,
            b.stride(),
            b.dtype,
            b.get_device(),
            _signature(scale_a),
            _signature(scale_b),
            out_dtype,
            None if bias is None else _signature(bias),
            None if azp_adj is None else (_signature(azp_adj), None if azp is None else _signature(azp)),
            None if out is None else _signature(out),
            config,
        )
        prepared = _prepared.get(key)
    except (AttributeError, TypeError, RuntimeError):
        check_kinds(a, b, scale_a, scale_b, out_dtype, bias, azp_adj, azp, out)
        parse_config(config)
        raise
    if (scale_a.requires_grad or scale_b.requires_grad or (bias is not None and bias.requires_grad)) and (
        torch.is_grad_enabled()
    ):
        refuse_gradients(scale_a, scale_b, bias)
    if prepared is None:
        prepared = _prepare(a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias, out, config)
        if prepared.call is not None:
            with _lock:
                while len(_prepared) >= _MAX_PREPARED:
                    _prepared.pop(next(iter(_prepared)))
                _prepared[key] = prepared
    call = prepared.call
    if call is None:
        return _evaluate(prepared.request, a, b, (scale_a, scale_b, azp, azp_adj, bias), out)
    request = prepared.request
    index = a.get_device()
    if out is None:
        result = torch.empty((request.m, request.n), dtype=out_dtype, device=a.device)
    else:
        result = out
    pointers = a.data_ptr(), b.data_ptr(), result.data_ptr()
    if prepared.order == _SCALES:
        operands: tuple[int, ...] = (scale_a.data_ptr(), scale_b.data_ptr())
    else:
        given = (scale_a, scale_b, azp, azp_adj, bias)
        operands = tuple([given[position].data_ptr() for position in prepared.order])  # type: ignore[union-attr]
    if (pointers[0] | pointers[1] | pointers[2]) % ALIGNMENT:
        raise misaligned(zip(("a", "b", "out"), pointers, strict=True))
    if out is not None:
        start = pointers[2]
        end = start + prepared.out_span
        for pointer, span in zip(pointers[:2] + operands, prepared.spans, strict=True):
            if pointer < end and start < pointer + span:
                raise overlapping()
    for position in prepared.wide:
        if operands[prepared.order.index(position)] % ALIGNMENT:
            raise misaligned([(OPERANDS[position], operands[prepared.order.index(position)])])
    if _current_device() == index:  # type: ignore[misc]
        call(_raw_stream(index), *pointers, operands)  # type: ignore[misc]
    else:
        with torch.cuda.device(index):
            call(_raw_stream(index), *pointers, operands)  # type: ignore[misc]
    return result if out is not None or a.dim() == 2 else result.view(request.shape)


def _signature(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.get_device(), tensor.stride(), tensor.is_neg()


def _prepare(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    azp_adj: Tensor | None,
    azp: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None,
    config: Config,
) -> _Prepared:
    request = check(a, b, scale_a, scale_b, out_dtype, bias, azp_adj, azp, out)
    tree = request.epilogue.tree(request.operand.accumulator, request.out)
    order = tuple(OPERANDS.index(operand.name) for operand in tree.loads)
    if not a.is_cuda and a.device.type != "cpu":
        raise ArgumentError(f"a is on {a.device}; kernels run on CUDA devices, the evaluator on the CPU")
    parse_config(config)
    if not a.is_cuda or not (request.m and request.n and request.k):
        return _Prepared(request, None, order, ())
    where = device(a.get_device())
    chosen = choose(request, arch_of(where), config, where.sm_count, where.name)
    kernel = _kernels.get((chosen.spec, where.index))
    if kernel is None:
        kernel = _kernels[chosen.spec, where.index] = load(pipeline.build(chosen.spec).library, where)
    extents = Extents(request.m, request.n, request.k, request.lda, request.ldb, request.ldd)
    rows = [operand.name for operand in tree.loads if operand.broadcast is Broadcast.ROW]
    # Row visitors of the 2.x family load vectors; those of the 3.x family load element by element.
    wide = tuple(OPERANDS.index(name) for name in rows) if chosen.spec.family is Family.MULTISTAGE else ()
    extent = {Broadcast.SCALAR: 1, Broadcast.ROW: request.n, Broadcast.COLUMN: request.m}
    spans = (
        (request.m - 1) * request.lda + request.k,
        (request.n - 1) * request.ldb + request.k,
        *(extent[operand.broadcast] * operand.element.bytes for operand in tree.loads),
    )
    out_span = ((request.m - 1) * request.ldd + request.n) * request.out.bytes
    return _Prepared(request, PreparedCall(kernel, where, extents, chosen.config), order, wide, out_span, spans)


def _evaluate(request: Request, a: Tensor, b: Tensor, given: tuple[Tensor | None, ...], out: Tensor | None) -> Tensor:
    """The call without a kernel: on the CPU, and where M, N or K is 0."""
    if request.m and request.n:
        operands = {name: tensor for name, tensor in zip(OPERANDS, given, strict=True) if tensor is not None}
        tree = request.epilogue.tree(request.operand.accumulator, request.out)
        result = evaluate(tree, accumulate(a.reshape(request.m, request.k), b), operands)
    else:
        result = torch.empty(0, dtype=TORCH_DTYPES[request.out], device=a.device)
    result = result.view(request.shape)
    return result if out is None else out.copy_(result)


def _traced(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    azp_adj: Tensor | None,
    azp: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None,
    config: Config,
) -> Tensor:
    check_kinds(a, b, scale_a, scale_b, out_dtype, bias, azp_adj, azp, out)
    if torch.is_grad_enabled():
        refuse_gradients(scale_a, scale_b, bias)
    name = config.name if isinstance(config, KernelConfig) else config
    if out is not None:
        if out.dtype is not out_dtype:
            raise ArgumentError(f"out has dtype {out.dtype} but out_dtype is {out_dtype}; make them alike")
        torch.ops.cutlass_w8a8.scaled_mm_out(out, a, b, scale_a, scale_b, azp_adj, azp, bias, name)
        return out
    result: Tensor
    if azp_adj is None:
        result = torch.ops.cutlass_w8a8.scaled_mm(a, b, scale_a, scale_b, out_dtype, bias, name)
    else:
        result = torch.ops.cutlass_w8a8.scaled_mm_azp(a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias, name)
    return result
