"""The public calls: eager dispatch and launch, and the same as torch custom operators."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from cutlass_w8a8 import calls
from cutlass_w8a8.calls import PLAIN, signature
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.evt.evaluate import TORCH_DTYPES, accumulate, evaluate
from cutlass_w8a8.problem import DEFAULT_OVERLAP
from cutlass_w8a8.request import Request, check_kinds, refuse_gradients
from cutlass_w8a8.settings import options
from cutlass_w8a8.support import Config

Tensor = torch.Tensor

_SCALES = (0, 1)


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
    overlap: str = DEFAULT_OVERLAP,
    batch_invariant: bool | None = None,
) -> Tensor:
    """D = scale_a * scale_b * (a @ b) + bias, in one kernel.

    Computes ``round_to_out(fma(scale_a, round_f32(scale_b * float(acc)), float(bias)))``; without a bias the outer
    operation is a float32 product. For int8 ``acc`` is the exact int32 product, so the result does not depend on
    the configuration; for fp8 it is the tensor core's float32 accumulation over K.
    The first call of a kind compiles its kernel, which takes up to a minute; later ones, and later processes, find
    it in the cache. With ``CUTLASS_W8A8_JIT=background`` a kernel at hand serves meanwhile, if there is one that can;
    `warmup` compiles and loads kernels beforehand. CPU tensors are served by an evaluator of the same formula.

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
        config: a `KernelConfig` or its text form, instead of the heuristic's choice; its kernel is waited for under
            any policy. On the CPU its form is checked, and it has no effect.
        overlap: how the kernel may overlap with the one before it on the stream (Hopper; elsewhere without effect).
            ``"none"``: it starts when that one has ended. ``"launch"``, the default: it may start before, if that one
            lets it, and waits for its end before it touches memory. ``"weights"``: it also loads b before it waits;
            that is wrong if b is written by work that may still run, so ask for it where weights are constant. Both
            rely on kernels of others that are launched like this to wait for what precedes them.
        batch_invariant: whether the bits of a row must not depend on M: fp8 kernels that divide K among blocks are then
            left out. None: as the context `batch_invariant` says, and otherwise not.

    K must be a multiple of 16, N of 8. All pointers must be 16-byte aligned.

    Returns:
        [..., N] of out_dtype: ``out`` if given.

    Raises:
        ArgumentError: an operand is not acceptable (nothing was launched).
        ConfigError: ``config`` is impossible.
        UnsupportedError: no kernel serves this device or these types.
        ToolchainError: a kernel must be compiled and cannot be (`CompileError`: the compiler failed).
        CacheError: the cache cannot be written, or ``CUTLASS_W8A8_JIT=off`` and the kernel is not in it.
        LaunchError: the driver refused to load or launch the kernel, or it is not loaded and a CUDA graph is being
            captured.
    """
    if (
        is_compiling()
        or type(a) not in PLAIN
        or type(b) not in PLAIN
        or type(scale_a) not in PLAIN
        or type(scale_b) not in PLAIN
        or a.is_meta
    ):
        return traced(a, b, scale_a, scale_b, out_dtype, None, None, bias, out, config, overlap, batch_invariant)
    return _run(a, b, scale_a, scale_b, out_dtype, None, None, bias, out, config, overlap, batch_invariant)


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
    overlap: str = DEFAULT_OVERLAP,
    batch_invariant: bool | None = None,
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
        or type(a) not in PLAIN
        or type(b) not in PLAIN
        or type(scale_a) not in PLAIN
        or type(scale_b) not in PLAIN
        or a.is_meta
    ):
        return traced(a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias, out, config, overlap, batch_invariant)
    return _run(a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias, out, config, overlap, batch_invariant)


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
    overlap: str,
    batch_invariant: bool | None,
) -> Tensor:
    try:
        # `signature`, written out for the tensors of every call: calling it takes as long as what it asks.
        key = (
            a.shape,
            a.stride(),
            a.dtype,
            a.get_device(),
            b.shape,
            b.stride(),
            b.dtype,
            b.get_device(),
            scale_a.shape,
            scale_a.stride(),
            scale_a.dtype,
            scale_a.get_device(),
            scale_a.is_neg(),
            scale_b.shape,
            scale_b.stride(),
            scale_b.dtype,
            scale_b.get_device(),
            scale_b.is_neg(),
            out_dtype,
            None if bias is None else signature(bias),
            None if azp_adj is None else signature(azp_adj),
            None if azp is None else signature(azp),
            None if out is None else (out.shape, out.stride(), out.dtype, out.get_device(), out.is_neg()),
            config,
            overlap,
            batch_invariant,
        )
        resolved = calls.find(key)
    except (AttributeError, TypeError, RuntimeError):
        check_kinds(a, b, scale_a, scale_b, out_dtype, bias, azp_adj, azp, out)
        options(config, overlap, batch_invariant)
        raise
    if (scale_a.requires_grad or scale_b.requires_grad or (bias is not None and bias.requires_grad)) and (
        torch.is_grad_enabled()
    ):
        refuse_gradients(scale_a, scale_b, bias)
    if resolved is None:
        wanted = options(config, overlap, batch_invariant)
        given = (a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias, out)
        resolved = calls.resolve(*given, wanted, calls.superseded(key))
        if resolved.call is not None:
            calls.keep(key, resolved)
    if resolved.call is None:
        return evaluated(resolved.request, a, b, (scale_a, scale_b, azp, azp_adj, bias), out)
    request = resolved.request
    result = torch.empty((request.m, request.n), dtype=out_dtype, device=a.device) if out is None else out
    if resolved.order == _SCALES:
        operands: tuple[int, ...] = (scale_a.data_ptr(), scale_b.data_ptr())
    else:
        operands = calls.addresses(resolved.order, (scale_a, scale_b, azp, azp_adj, bias))
    resolved.launch(a.get_device(), a.data_ptr(), b.data_ptr(), result.data_ptr(), *operands)
    return result if out is not None or a.dim() == 2 else result.view(request.shape)


def evaluated(request: Request, a: Tensor, b: Tensor, given: tuple[Tensor | None, ...], out: Tensor | None) -> Tensor:
    """The call without a kernel: on the CPU, and where M, N or K is 0."""
    if request.m and request.n:
        operands = {name: tensor for name, tensor in zip(calls.OPERANDS, given, strict=True) if tensor is not None}
        tree = request.epilogue.tree(request.operand.accumulator, request.out)
        result = evaluate(tree, accumulate(a.reshape(request.m, request.k), b), operands)
    else:
        result = torch.empty(0, dtype=TORCH_DTYPES[request.out], device=a.device)
    result = result.view(request.shape)
    return result if out is None else out.copy_(result)


def traced(
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
    overlap: str,
    batch_invariant: bool | None,
) -> Tensor:
    check_kinds(a, b, scale_a, scale_b, out_dtype, bias, azp_adj, azp, out)
    if torch.is_grad_enabled():
        refuse_gradients(scale_a, scale_b, bias)
    name = config.name if isinstance(config, KernelConfig) else config
    if out is not None:
        if out.dtype is not out_dtype:
            raise ArgumentError(f"out has dtype {out.dtype} but out_dtype is {out_dtype}; make them alike")
        torch.ops.cutlass_w8a8.scaled_mm_out(
            out, a, b, scale_a, scale_b, azp_adj, azp, bias, name, overlap, batch_invariant
        )
        return out
    result: Tensor
    if azp_adj is None:
        result = torch.ops.cutlass_w8a8.scaled_mm(
            a, b, scale_a, scale_b, out_dtype, bias, name, overlap, batch_invariant
        )
    else:
        result = torch.ops.cutlass_w8a8.scaled_mm_azp(
            a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias, name, overlap
        )
    return result
