"""Shapes, combinations and operands the kernels are tested on. Deterministic; independent of the package.

Operands come in three layouts: ``packed``; ``padded``, whose leading strides exceed the rows by 64 elements; and
``offset``, padded slices that start 16 bytes into a larger allocation. Padding of the inputs holds NaN (fp8) or 127
(int8), so that a kernel that reads it gives itself away. Outputs are filled with NaN and framed by guard elements.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import cache

import torch

Shape = tuple[int, int, int]

FP8, INT8 = torch.float8_e4m3fn, torch.int8
OUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPERAND_DTYPES = {"e4m3": FP8, "int8": INT8}
LAYOUTS = ("packed", "padded", "offset")

M_VALUES = (*range(1, 18), 31, 33, 63, 65, 100, 127, 129, 255, 257, 1000)
_SMALL = tuple(16 * n for n in (1, 2, 3, 5, 7, 8, 9, 11, 13, 15, 16, 17, 19, 21, 24, 27))
_MEDIUM = tuple(16 * n for n in (31, 32, 33, 37, 48, 63, 64, 65, 71, 96, 101, 127, 128, 129))
_LARGE = (4096, 4112, 6160, 8208)
_KINDS = (
    # Which pools N and K come from; every M meets each pair of them.
    (_SMALL, _SMALL),
    (_SMALL, _SMALL),
    (_SMALL, _SMALL),
    (_SMALL, _MEDIUM),
    (_SMALL, _MEDIUM),
    (_MEDIUM, _SMALL),
    (_MEDIUM, _SMALL),
    (_MEDIUM, _MEDIUM),
    (_MEDIUM, _MEDIUM),
    (_SMALL, (*_LARGE, 14336)),
    (_MEDIUM, _LARGE),
    (_LARGE, _MEDIUM),
)
GUARD = 64
"""Guard elements before and after an output, and beyond each of its rows."""


@cache
def shapes() -> tuple[Shape, ...]:
    """More than 300 (M, N, K): tile multiples and odd multiples of 16, from 16 to 14336, in a fixed order."""
    chosen: dict[Shape, None] = {}
    rng = random.Random(20)
    for m in M_VALUES:
        for n_pool, k_pool in _KINDS:
            shape = (m, rng.choice(n_pool), rng.choice(k_pool))
            while shape in chosen:
                shape = (m, rng.choice(n_pool), rng.choice(k_pool))
            chosen[shape] = None
    chosen |= dict.fromkeys(((128, 128, 128), (256, 256, 512), (64, 4096, 4096), (512, 1024, 4096), (1, 16, 16)))
    # N that are multiples of 8 only, down to the smallest.
    chosen |= dict.fromkeys(
        ((1, 8, 16), (5, 24, 48), (16, 1000, 528), (33, 40, 272), (64, 136, 144), (130, 1000, 336), (257, 72, 4096))
    )
    return tuple(chosen)


SMALL_SHAPES: tuple[Shape, ...] = (
    (1, 16, 16),
    (1, 48, 4112),
    (3, 16, 528),
    (7, 112, 80),
    (16, 240, 144),
    (17, 272, 272),
    (33, 16, 1040),
    (63, 1008, 48),
    (65, 144, 144),
    (129, 176, 336),
    (257, 304, 208),
    (100, 2064, 112),
    (5, 8, 32),
    (130, 136, 272),
)
"""A dozen odd shapes, for runs under a sanitizer and on the CPU."""


@dataclass(frozen=True)
class Combination:
    """What one kernel computes, apart from its tiling: types, epilogue and granularities, by their names."""

    operand: str
    out: str
    azp: str = "none"
    bias: bool = False
    scale_a: str = "token"
    scale_b: str = "channel"

    @property
    def epilogue(self) -> str:
        """The package's name of the epilogue."""
        formula = {"none": "scaled", "tensor": "azp", "token": "azp-token"}[self.azp] + ("-bias" if self.bias else "")
        return f"{formula}_{self.scale_a}_{self.scale_b}"

    @property
    def name(self) -> str:
        return f"{self.operand}_{self.out}_{self.epilogue}"

    @property
    def operand_dtype(self) -> torch.dtype:
        return OPERAND_DTYPES[self.operand]

    @property
    def out_dtype(self) -> torch.dtype:
        return OUT_DTYPES[self.out]


@cache
def combinations() -> tuple[Combination, ...]:
    """Every epilogue, granularity and type there is: 72 of int8 and 24 of fp8."""
    return tuple(
        Combination(operand, out, azp, bias, scale_a, scale_b)
        for operand, azp in (("e4m3", "none"), ("int8", "none"), ("int8", "tensor"), ("int8", "token"))
        for bias, out in itertools.product((False, True), OUT_DTYPES)
        for scale_a, scale_b in itertools.product(("token", "tensor"), ("channel", "tensor"))
    )


@dataclass
class Inputs:
    """The operands of one call; vectors in their full length, whatever a combination uses of them.

    ``a`` [M, K] row-major and ``b`` [K, N] column-major; ``scale_a`` [M], ``scale_b`` [N] float32; ``bias`` by output
    name [N]; ``azp`` [M], ``azp_adj`` [N] (column sums of b) and ``azp_adj_folded`` [N] int32, None for fp8.
    """

    shape: Shape
    seed: int
    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    bias: dict[str, torch.Tensor]
    azp: torch.Tensor | None = None
    azp_adj: torch.Tensor | None = None
    azp_adj_folded: torch.Tensor | None = None


@dataclass(frozen=True)
class Epilogue:
    """The arguments of one combination, in one of the shapes the API accepts."""

    scale_a: torch.Tensor
    scale_b: torch.Tensor
    bias: torch.Tensor | None
    azp: torch.Tensor | None
    azp_adj: torch.Tensor | None


def _values(rows: int, columns: int, dtype: torch.dtype, wide: bool, generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    if dtype is INT8:
        return torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8, device=device)
    if not wide:
        return torch.randn(rows, columns, generator=generator, device=device).to(FP8)
    # Every finite bit pattern: magnitudes from 2**-9 to 448, zeros and subnormals included.
    bits = torch.randint(0, 254, (rows, columns), generator=generator, dtype=torch.uint8, device=device)
    return torch.where(bits < 127, bits, bits + 1).view(FP8)


def frame(values: torch.Tensor, layout: str) -> torch.Tensor:
    """``values`` [R, C] of one-byte elements, laid out as ``layout`` says in poisoned surroundings; row-major."""
    if layout == "packed":
        return values.contiguous()
    rows, columns = values.shape
    stride, offset = columns + 64, 16 if layout == "offset" else 0
    backing = torch.full((offset + rows * stride,), 0x7F, dtype=torch.uint8, device=values.device)
    view = backing.view(values.dtype).as_strided((rows, columns), (stride, 1), offset)
    view.view(torch.uint8).copy_(values.view(torch.uint8))
    return view


def make_inputs(
    shape: Shape, dtype: torch.dtype, layout: str = "packed", seed: int = 0, device: str = "cpu", wide: bool = False
) -> Inputs:
    """Random operands: full-range int8, or fp8 of a normal (``wide``: of every finite) value; signed scales.

    Scales are such that outputs are of the order of one; biases of the order of ten.
    """
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(hash((shape, seed)) & 0x7FFFFFFF)
    a = _values(m, k, dtype, wide, generator)
    weight = _values(n, k, dtype, wide, generator)
    magnitude = 74.0 if dtype is INT8 else (104.0 if wide else 1.0)
    amplitude = 1 / (magnitude * k**0.25)
    scale_a, scale_b, bias, extra = (torch.randn(length, generator=generator, device=device) for length in (m, n, n, m))
    inputs = Inputs(
        shape=shape,
        seed=seed,
        a=frame(a, layout),
        b=frame(weight, layout).t(),
        scale_a=scale_a * amplitude,
        scale_b=scale_b * amplitude,
        bias={name: (bias * 10).to(out) for name, out in OUT_DTYPES.items()},
    )
    if dtype is INT8:
        inputs.azp = (extra * 60).clamp(-128, 127).to(torch.int32)
        inputs.azp_adj = weight.sum(1, dtype=torch.int32)
        inputs.azp_adj_folded = inputs.azp_adj * (7 + seed % 100)
    return inputs


def make_epilogue(combination: Combination, inputs: Inputs, form: int = 0) -> Epilogue:
    """The operands ``combination`` uses; ``form`` picks one of the accepted shapes of each.

    With an odd ``form`` vectors start one element into a larger one, aligned to no more than their element. For a
    single row the shape alone tells a per-token scale, (1, 1), from a per-tensor one.
    """
    single_row = inputs.a.shape[0] == 1

    def shaped(vector: torch.Tensor, per_element: bool, column: bool) -> torch.Tensor:
        if form % 2:
            vector = torch.cat([vector[:1], vector])[1:]
        if per_element:
            flat = form % 2 == 0 and not (column and single_row)
            return vector if flat else vector.reshape((-1, 1) if column else (1, -1))
        return vector[:1].reshape(((1,), (), (1,) if column and single_row else (1, 1))[form % 3])

    azp_adj = {"none": None, "tensor": inputs.azp_adj_folded, "token": inputs.azp_adj}[combination.azp]
    azp = inputs.azp if combination.azp == "token" else None
    bias = inputs.bias[combination.out] if combination.bias else None
    return Epilogue(
        scale_a=shaped(inputs.scale_a, combination.scale_a == "token", True),
        scale_b=shaped(inputs.scale_b, combination.scale_b == "channel", False),
        bias=torch.cat([bias[:1], bias])[1:] if bias is not None and form % 2 else bias,
        azp=None if azp is None else shaped(azp, True, True),
        azp_adj=None if azp_adj is None else shaped(azp_adj, True, False),
    )


@dataclass
class Output:
    """A poisoned output [M, N] inside a guarded allocation.

    Attributes:
        view: what the kernel may write.
        backing: the whole allocation, flat, as integers.
    """

    view: torch.Tensor
    backing: torch.Tensor
    poison: int

    def touched(self) -> torch.Tensor:
        """How many guard elements no longer hold the poison: a 0-d int64 tensor on the output's device."""
        changed = self.backing != self.poison
        inside = changed.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        return changed.sum() - inside.sum()


def make_output(m: int, n: int, dtype: torch.dtype, layout: str, device: str = "cpu") -> Output:
    """A row-major output whose rows are ``n`` (packed) or ``n + 64`` elements apart; NaN everywhere."""
    size = dtype.itemsize
    integers, poison = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}[size]
    stride = n if layout == "packed" else n + GUARD
    # The first guard is a multiple of 16 bytes; an odd multiple for ``offset``.
    start = GUARD + (16 // size if layout == "offset" else 0)
    backing = torch.full((start + m * stride + GUARD,), poison, dtype=integers, device=device)
    view = backing.view(dtype).as_strided((m, n), (stride, 1), start)
    return Output(view, backing, poison)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The elements' bit patterns as signed integers."""
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])
