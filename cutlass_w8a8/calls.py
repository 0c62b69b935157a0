"""From a call's tensors to a launch: what a signature resolves to is worked out once, and kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cutlass_w8a8.arch import Family
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.errors import ArgumentError, ConfigError
from cutlass_w8a8.evt.tree import Broadcast
from cutlass_w8a8.memo import Memo
from cutlass_w8a8.problem import CALL_OVERLAP, Overlap
from cutlass_w8a8.request import Request, check, misaligned, overlapping
from cutlass_w8a8.runtime.abi import OVERLAPPING
from cutlass_w8a8.runtime.device import arch_of, current_device, device, on_change, raw_stream
from cutlass_w8a8.runtime.launch import Extents, PreparedCall
from cutlass_w8a8.runtime.loader import NotLoadedError
from cutlass_w8a8.support import alternatives, choose

if TYPE_CHECKING:
    from cutlass_w8a8.background import Compilation

Tensor = torch.Tensor

# Types whose data pointer is their data; any other tensor goes through the dispatcher.
PLAIN = frozenset((Tensor, torch.nn.Parameter))

# The epilogue's operands in the order calls hand them around.
OPERANDS = ("scale_a", "scale_b", "azp", "azp_adj", "bias")

# Calls by everything their validity depends on.
_kept: Memo[tuple[Any, ...], Resolved] = Memo()
# One element: what lasts until the next `forget`.
_generation: list[object] = [object()]

find = _kept.get


@dataclass(frozen=True)
class Options:
    """How a call asks to be served, apart from its tensors.

    Attributes:
        config: the configuration to use; None leaves it to the heuristic.
        overlap: how the kernel may overlap with the one before it.
        batch_invariant: whether a row's bits must not depend on the number of rows.
    """

    config: KernelConfig | None = None
    overlap: Overlap = CALL_OVERLAP
    batch_invariant: bool = False


@dataclass(frozen=True)
class Resolved:
    """What one signature of a call resolves to.

    Attributes:
        request: the checked call.
        call: the kernel's launch; None where no kernel runs (CPU, empty).
        order: positions in OPERANDS of the kernel's operands, in its own order.
        wide: for each of these, whether the kernel reads it 16 bytes at a time.
        awaits: the compilation of the kernel whose place this one's takes; None if it is the one to stay.
    """

    request: Request
    call: PreparedCall | None
    order: tuple[int, ...]
    wide: tuple[bool, ...] = ()
    awaits: Compilation | None = None

    def launch(self, index: int, a: int, b: int, d: int, *operands: int) -> None:
        """Enqueue the kernel on the current stream of device ``index``, with these addresses.

        Args:
            index: the device.
            a, b, d: addresses of the matrices.
            operands: addresses of the kernel's operands, in its own order.

        Raises:
            ArgumentError: a pointer is misaligned, or the result shares memory with an input.
            LaunchError: the driver refused the launch.
        """
        if current_device() == index:
            refused = self.call(raw_stream(index), a, b, d, *operands)  # type: ignore[misc]
        else:
            with torch.cuda.device(index):
                refused = self.call(raw_stream(index), a, b, d, *operands)  # type: ignore[misc]
        if refused:
            read = zip(self.order, operands, self.wide, strict=True)
            wide = [(OPERANDS[position], pointer) for position, pointer, wide in read if wide]
            raise overlapping() if refused == OVERLAPPING else misaligned((("a", a), ("b", b), ("out", d), *wide))


def keep(key: tuple[Any, ...], resolved: Resolved, memo: Memo[tuple[Any, ...], Resolved] = _kept) -> None:
    """Have `find` give ``resolved`` for ``key``, until `forget`; or until the kernel that is to take over is there."""
    if resolved.awaits is None:
        memo.keep(key, resolved)
    else:
        resolved.awaits.keep(memo, key, resolved)


def superseded(key: tuple[Any, ...]) -> Resolved | None:
    """What served ``key`` until a better kernel was there."""
    return _kept.superseded.get(key)


def forget() -> None:
    """Resolve all calls anew: a setting of the process has changed."""
    _kept.forget()
    _generation[0] = object()


on_change.append(forget)


def generation() -> object:
    """What lasts until the next `forget`: what others keep of resolved calls is valid as long as this is the same."""
    return _generation[0]


def signature(tensor: Tensor) -> tuple[Any, ...]:
    """What the validity of a call depends on, of one of its tensors."""
    return tensor.shape, tensor.dtype, tensor.get_device(), tensor.stride(), tensor.is_neg()


def resolve(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    azp_adj: Tensor | None,
    azp: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None,
    options: Options,
    previous: Resolved | None = None,
) -> Resolved:
    """Check a call and prepare its launch: choose its kernel, compile it if need be, load it.

    ``previous`` is what served the call until a better kernel was there; it still does while a graph is being captured,
    when the better one cannot be loaded.

    Raises:
        W8A8Error: as `cutlass_w8a8.scaled_mm` says.
    """
    request = check(a, b, scale_a, scale_b, out_dtype, bias, azp_adj, azp, out)
    tree = request.epilogue.tree(request.operand.accumulator, request.out)
    order = tuple(OPERANDS.index(operand.name) for operand in tree.loads)
    if not a.is_cuda and a.device.type != "cpu":
        raise ArgumentError(f"a is on {a.device}; kernels run on CUDA devices, the evaluator on the CPU")
    if not a.is_cuda or not (request.m and request.n and request.k):
        return Resolved(request, None, order)
    # Here because cache and compilers take as long to import as the rest together, and most processes never need them.
    from cutlass_w8a8 import acquire

    where = device(a.get_device())
    arch = arch_of(where)
    facts: dict[str, Any] = {
        "sm_count": where.sm_count,
        "device": where.name,
        "overlap": options.overlap,
        "batch_invariant": options.batch_invariant,
    }
    chosen = choose(request, arch, options.config, **facts)
    others = partial(alternatives, request, arch, **facts) if options.config is None else None
    try:
        served = acquire.gemm(chosen, where, others)
    except NotLoadedError:
        if previous is None:
            raise
        return previous
    # Row visitors of the 2.x family load vectors; those of the 3.x family load element by element.
    vectors = served.spec.family is Family.MULTISTAGE
    wide = tuple(vectors and operand.broadcast is Broadcast.ROW for operand in tree.loads)
    extent = {Broadcast.SCALAR: 1, Broadcast.ROW: request.n, Broadcast.COLUMN: request.m}
    extents = Extents(
        request.m,
        request.n,
        request.k,
        request.lda,
        request.ldb,
        request.ldd,
        bytes_a=(request.m - 1) * request.lda + request.k,
        bytes_b=(request.n - 1) * request.ldb + request.k,
        bytes_d=((request.m - 1) * request.ldd + request.n) * request.out.bytes,
        bytes_operands=tuple(extent[operand.broadcast] * operand.element.bytes for operand in tree.loads),
        wide=wide,
    )
    try:
        call = PreparedCall(served.kernel, where, extents, served.config, options.overlap)
    except ConfigError:
        if served.spec == chosen.spec:
            raise
        # CUTLASS refuses what no rule knows of: the caller has not asked for this one, and waits for the other.
        return resolve(
            a, b, scale_a, scale_b, out_dtype, azp_adj, azp, bias, out, replace(options, config=chosen.config), previous
        )
    return Resolved(request, call, order, wide, served.awaits)


def addresses(order: Sequence[int], given: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Addresses of a kernel's operands, which ``given`` holds in the order of OPERANDS."""
    return tuple([given[position].data_ptr() for position in order])  # type: ignore[union-attr]
