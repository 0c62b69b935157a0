"""From a call's tensors to a launch: what a signature resolves to is worked out once, and kept."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from cutlass_w8a8 import pipeline
from cutlass_w8a8.arch import Family
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.evt.tree import Broadcast
from cutlass_w8a8.problem import Overlap
from cutlass_w8a8.request import Request, check, misaligned, overlapping
from cutlass_w8a8.runtime.abi import OVERLAPPING
from cutlass_w8a8.runtime.device import arch_of, current_device, device, on_change, raw_stream
from cutlass_w8a8.runtime.launch import Extents, PreparedCall
from cutlass_w8a8.runtime.loader import LoadedKernel, load
from cutlass_w8a8.spec import KernelSpec
from cutlass_w8a8.support import choose

Tensor = torch.Tensor
Key = TypeVar("Key")
Value = TypeVar("Value")

# Types whose data pointer is their data; any other tensor goes through the dispatcher.
PLAIN = frozenset((Tensor, torch.nn.Parameter))

# The epilogue's operands in the order calls hand them around.
OPERANDS = ("scale_a", "scale_b", "azp", "azp_adj", "bias")

# Calls by everything their validity depends on. Serving sees a bounded set of shapes; should it not, the oldest are
# forgotten.
MAX_KEPT = 16384
_kept: dict[tuple[Any, ...], Resolved] = {}
# Kernels in use, so that a new shape needs no look at the cache.
_kernels: dict[tuple[KernelSpec, int], LoadedKernel] = {}
_lock = threading.Lock()
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
    overlap: Overlap = Overlap.NONE
    batch_invariant: bool = False


@dataclass(frozen=True)
class Resolved:
    """What one signature of a call resolves to.

    Attributes:
        request: the checked call.
        call: the kernel's launch; None where no kernel runs (CPU, empty).
        order: positions in OPERANDS of the kernel's operands, in its own order.
        wide: for each of these, whether the kernel reads it 16 bytes at a time.
    """

    request: Request
    call: PreparedCall | None
    order: tuple[int, ...]
    wide: tuple[bool, ...] = ()

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


def remember(memo: dict[Key, Value], key: Key, value: Value, most: int = MAX_KEPT) -> None:
    """Put ``value`` into ``memo``, forgetting the oldest should there ever be more than ``most``."""
    with _lock:
        while len(memo) >= most:
            memo.pop(next(iter(memo)))
        memo[key] = value


def keep(key: tuple[Any, ...], resolved: Resolved) -> None:
    """Have `find` give ``resolved`` for ``key``, until `forget`."""
    remember(_kept, key, resolved)


def forget() -> None:
    """Resolve all calls anew: a setting of the process has changed."""
    with _lock:
        _kept.clear()
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
) -> Resolved:
    """Check a call and prepare its launch: choose its kernel, compile it if need be, load it.

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
    where = device(a.get_device())
    chosen = choose(
        request,
        arch_of(where),
        options.config,
        sm_count=where.sm_count,
        device=where.name,
        overlap=options.overlap,
        batch_invariant=options.batch_invariant,
    )
    kernel = _kernels.get((chosen.spec, where.index))
    if kernel is None:
        kernel = _kernels[chosen.spec, where.index] = load(pipeline.build(chosen.spec).library, where)
    # Row visitors of the 2.x family load vectors; those of the 3.x family load element by element.
    vectors = chosen.spec.family is Family.MULTISTAGE
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
    return Resolved(request, PreparedCall(kernel, where, extents, chosen.config, options.overlap), order, wide)


def addresses(order: Sequence[int], given: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Addresses of a kernel's operands, which ``given`` holds in the order of OPERANDS."""
    return tuple([given[position].data_ptr() for position in order])  # type: ignore[union-attr]
