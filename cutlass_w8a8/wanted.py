"""Which kernels calls will want: worked out by what serves calls, for tensors without memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cutlass_w8a8 import calls
from cutlass_w8a8.arch import Arch
from cutlass_w8a8.dtypes import OUTPUT_DTYPES
from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.evt.epilogues import Azp, EpilogueSpec, ScaleA, ScaleB
from cutlass_w8a8.evt.evaluate import TORCH_DTYPES
from cutlass_w8a8.prepared import PreparedMM
from cutlass_w8a8.request import FROM_TORCH, check
from cutlass_w8a8.settings import options
from cutlass_w8a8.spec import KernelSpec, QuantSpec, Scheme, Spec
from cutlass_w8a8.support import choose

Tensor = torch.Tensor

# Formulas that the operands of a call amount to.
_OF_CALLS = tuple(EpilogueSpec.of(azp=azp, bias=bias).formula for azp in Azp for bias in (False, True))


@dataclass(frozen=True)
class Target:
    """What kernels are chosen for.

    Attributes:
        arch: whose kernels.
        sm_count, name: multiprocessors and name of the device; None if they are not known.
    """

    arch: Arch
    sm_count: int | None = None
    name: str | None = None


@dataclass(frozen=True)
class LayerCall:
    """A prepared call as a layer makes it, which knows what its activations are like.

    Attributes:
        mm: the call.
        scheme: how they are quantised.
        source: the type from which they are.
    """

    mm: PreparedMM
    scheme: Scheme
    source: torch.dtype

    @property
    def azp(self) -> Azp:
        """How their zero points come: one that is given is in ``azp_adj``, one that is found goes with each row."""
        if not self.scheme.azp:
            return Azp.NONE
        return Azp.TENSOR if self.scheme.static else Azp.TOKEN


@dataclass(frozen=True)
class Weight:
    """Constant operands and options of calls, as `prepare` takes them; the tensors need no memory."""

    b: Tensor
    scale_b: Tensor
    out_dtype: torch.dtype
    bias: Tensor | None
    azp_adj: Tensor | None
    options: calls.Options

    @classmethod
    def of_shape(
        cls, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, epilogue: EpilogueSpec, options: calls.Options
    ) -> Weight:
        """An N x K weight of ``dtype`` whose products get this epilogue.

        Raises:
            ArgumentError: no call has this epilogue.
        """
        if epilogue.formula not in _OF_CALLS:
            raise ArgumentError(
                f"epilogue {epilogue.name} is not one that calls ask for; those are {', '.join(_OF_CALLS)}; name its "
                "kernels by their configurations"
            )
        scalar = _meta((), (), torch.float32)
        return cls(
            _meta((k, n), (1, k), dtype),
            _meta((1, n), (n, 1), torch.float32) if epilogue.scale_b is ScaleB.CHANNEL else scalar,
            out_dtype,
            _meta((n,), (1,), out_dtype) if epilogue.formula.endswith("bias") else None,
            _meta((n,), (1,), torch.int32) if "azp" in epilogue.formula else None,
            options,
        )

    @classmethod
    def of_prepared(cls, mm: PreparedMM) -> Weight:
        """The weight of a prepared call."""

        def like(tensor: Tensor) -> Tensor:
            return _meta(tensor.shape, tensor.stride(), tensor.dtype)

        def optional(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else like(tensor)

        b, scale_b, out_dtype, bias, azp_adj, *given = mm.given
        return cls(like(b), like(scale_b), out_dtype, optional(bias), optional(azp_adj), options(*given))

    def kernel(self, m: int, scale_a: ScaleA, azp: Azp, target: Target) -> KernelSpec:
        """The kernel of a call with ``m`` rows.

        Raises:
            ArgumentError: such a call is refused.
            ConfigError, TableError, UnsupportedError: as for the call.
        """
        request = check(
            _meta((m, self.b.shape[0]), (self.b.shape[0], 1), self.b.dtype),
            self.b,
            _meta((m, 1), (1, 1), torch.float32) if scale_a is ScaleA.TOKEN else _meta((), (), torch.float32),
            self.scale_b,
            self.out_dtype,
            self.bias,
            self.azp_adj,
            _meta((m, 1), (1, 1), torch.int32) if self.azp_adj is not None and azp is Azp.TOKEN else None,
            None,
        )
        return choose(
            request,
            target.arch,
            self.options.config,
            sm_count=target.sm_count,
            device=target.name,
            overlap=self.options.overlap,
            batch_invariant=self.options.batch_invariant,
        ).spec


def plan(
    items: Sequence[Any],
    ms: Sequence[int],
    target: Target | None,
    shaped: Callable[[int, int], Weight],
    *,
    scale_a: ScaleA = ScaleA.TOKEN,
    azp: Azp = Azp.NONE,
    quantize: torch.dtype | None = None,
    schemes: Sequence[Scheme] | None = None,
) -> list[Spec]:
    """The kernels that ``items`` want, each once.

    Args:
        items: as `items_of` gives them.
        ms: rows of activations.
        target: what to choose kernels for; None if all items are specifications.
        shaped: makes the `Weight` of an (N, K) pair.
        scale_a, azp: of activations, other than those of layers, which know.
        quantize: the type that activations are quantised from, likewise; None for no kernels that quantise.
        schemes: how, likewise; None: in every way that gives the scales and zero points that the kernels multiplying
            them take.

    Raises:
        ArgumentError: there is nothing to do, or an item is not acceptable.
        W8A8Error: otherwise as the call that an item stands for.
    """
    found: dict[Spec, None] = {}
    for item in items:
        if isinstance(item, (KernelSpec, QuantSpec)):
            found[item] = None
            continue
        if target is None or not ms:
            raise ArgumentError("ms is empty; name the rows of activations to expect, such as ms=(1, 16, 256)")
        source: torch.dtype | None
        ways: Sequence[Scheme]
        if isinstance(item, LayerCall):
            weight, scales, zero_points = Weight.of_prepared(item.mm), _scales(item.scheme), item.azp
            source, ways = item.source, (item.scheme,)
        else:
            weight = Weight.of_prepared(item) if isinstance(item, PreparedMM) else shaped(*item)
            zero_points = Azp.NONE
            if weight.azp_adj is not None:
                # Zero points that prepared weights have the sums for are those of tokens, if nothing else is said.
                zero_points = Azp.TOKEN if azp is Azp.NONE else azp
            scales, source = scale_a, quantize
            ways = _giving(scales, zero_points) if schemes is None else schemes
        kernels = [weight.kernel(m, scales, zero_points, target) for m in ms]
        if quantize is not None and source is not None:
            found |= dict.fromkeys(_quantisation(target.arch, source, weight.b.dtype, scheme) for scheme in ways)
        found |= dict.fromkeys(kernels)
    if not found:
        raise ArgumentError("what names no kernels: no specification, no weight, and no module with prepared weights")
    return list(found)


def items_of(what: object) -> Iterator[Any]:
    """The items of ``what``, modules and collections taken apart.

    Raises:
        ArgumentError: one is nothing that kernels could be wanted for.
    """
    if isinstance(what, (KernelSpec, QuantSpec, PreparedMM, LayerCall)):
        yield what
    elif isinstance(what, torch.nn.Module):
        for module in what.modules():
            yield from _prepared_in(vars(module).values())
            if (own := getattr(module, "prepared_mms", None)) is not None:
                yield from own()
    elif isinstance(what, tuple) and len(what) == 2 and not any(isinstance(each, (tuple, list)) for each in what):
        if all(isinstance(each, (KernelSpec, QuantSpec, PreparedMM, LayerCall, torch.nn.Module)) for each in what):
            for each in what:
                yield from items_of(each)
        else:
            yield tuple(positive("the weight's N and K", what))
    elif isinstance(what, Iterable) and not isinstance(what, (str, bytes, Tensor)):
        for each in what:
            yield from items_of(each)
    else:
        raise ArgumentError(
            f"what holds a {type(what).__name__}; pass (N, K) pairs, what prepare() returned, modules, or "
            "specifications"
        )


def _prepared_in(values: Iterable[object]) -> Iterator[PreparedMM]:
    for value in values:
        if isinstance(value, PreparedMM):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _prepared_in(value)
        elif isinstance(value, dict):
            yield from _prepared_in(value.values())


def _scales(scheme: Scheme) -> ScaleA:
    return ScaleA.TENSOR if scheme.whole else ScaleA.TOKEN


def _giving(scale_a: ScaleA, azp: Azp) -> list[Scheme]:
    """What quantises activations to such scales and zero points."""
    return [
        scheme
        for scheme in Scheme
        if _scales(scheme) is scale_a
        and scheme.azp is (azp is not Azp.NONE)
        # A tensor's zero point can be in ``azp_adj`` or go with each row; those of rows cannot be in it.
        and (scheme.whole or azp is not Azp.TENSOR)
    ]


def _quantisation(arch: Arch, source: torch.dtype, target: torch.dtype, scheme: Scheme) -> QuantSpec:
    wanted = FROM_TORCH.get(source)
    if wanted not in OUTPUT_DTYPES or wanted is None:
        accepted = ", ".join(str(TORCH_DTYPES[each]) for each in OUTPUT_DTYPES)
        raise ArgumentError(f"quantize is {source}; accepted: {accepted}, or None for no kernels that quantise")
    return QuantSpec(arch, wanted, FROM_TORCH[target], scheme)


def positive(name: str, values: Iterable[Any]) -> list[int]:
    """``values`` as positive numbers.

    Raises:
        ArgumentError: one of them is something else.
    """
    try:
        if not isinstance(values, (str, bytes)):
            found = [operator.index(value) for value in values]
            if all(value > 0 for value in found) and not any(isinstance(value, bool) for value in values):
                return found
    except TypeError:
        pass
    raise ArgumentError(f"{name}: {values!r}; pass positive integers, such as (1, 16, 256)")


def _meta(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
