"""Inputs for quantisation, laid out in every way that is accepted, and the comparison with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import cutlass_w8a8
from tests import quant_reference
from tests.harness import Check

SOURCES = (torch.bfloat16, torch.float16, torch.float32)
TARGETS = (torch.float8_e4m3fn, torch.int8)
POISON = 0xA5
# Every way a row may be cut: odd, around a vector, a warp, a block, what registers hold, and models' own.
KS = (
    1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 255, 256, 257, 512, 1000, 1024, 1040, 1536, 2048, 2050,
    3584, 4096, 4097, 4104, 5120, 7168, 8192, 11008, 14336, 16384, 16392, 28672, 28673, 32768, 65536, 70000,
)  # fmt: skip
MS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 64, 100, 131, 132, 133, 256, 512, 1000, 2112, 4096)
LARGEST_CASE = 1 << 26


@dataclass(frozen=True)
class Layout:
    """Elements between a row's end and the next row's begin, and before the first row, of x and of out.

    ``out`` is None where it is left to the call.
    """

    x_pad: int = 0
    x_offset: int = 0
    out: tuple[int, int] | None = None


LAYOUTS = (
    Layout(),
    Layout(out=(0, 0)),
    Layout(x_pad=16, out=(16, 16)),
    Layout(x_pad=8, x_offset=8, out=(8, 8)),
    Layout(x_pad=4, out=(4, 4)),
    Layout(x_pad=1, out=(1, 0)),
    Layout(x_offset=1),
    Layout(x_pad=16, out=(3, 1)),
    Layout(x_pad=16, out=(16, 2)),
)


def laid_out(values: torch.Tensor, pad: int, offset: int) -> torch.Tensor:
    """``values`` [M, K] as a view of a larger buffer, all of whose other elements are NaN (1 for integers)."""
    m, k = values.shape
    filler = float("nan") if values.is_floating_point() else 1
    buffer = torch.full((offset + m * (k + pad),), filler, device=values.device).to(values.dtype)
    view = buffer.as_strided((m, k), (k + pad, 1), offset)
    view.copy_(values)
    return view


def rows(m: int, k: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> torch.Tensor:
    """[m, k] of normal values at many magnitudes; of 16 rows in turn, 8 hold something special."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(m, k, generator=generator, device=device)
    magnitude = torch.randint(-20, 5 if dtype is torch.float16 else 60, (m, 1), generator=generator, device=device)
    x = (x * 2.0**magnitude).to(dtype)
    limits = torch.finfo(dtype)
    at = torch.randint(k, (m,), generator=generator, device=device)
    kinds: tuple[float | None, ...] = (
        None, float("nan"), None, float("inf"), None, -float("inf"), None, limits.max, None, limits.tiny,
    )  # fmt: skip
    for kind, value in enumerate(kinds):
        chosen = torch.arange(m, device=device)[(torch.arange(m, device=device) + seed) % 16 == kind]
        if value is None or not len(chosen):
            continue
        if value == limits.tiny:
            x[chosen] = (x[chosen].float().sign() * torch.arange(k, device=device) * limits.tiny / 16).to(dtype)
        x[chosen, at[chosen]] = value
    zero = (torch.arange(m, device=device) + seed) % 16 == 10
    x[zero] = torch.where(torch.arange(k, device=device) % 2 == 0, 0.0, -0.0).to(dtype)
    # Halves of the last place: every second of these products lies between two integers.
    ties = (torch.arange(m, device=device) + seed) % 16 == 11
    x[ties] = ((torch.arange(k, device=device) % 255 - 127) / 2).to(dtype)
    return x


def cases(limit: int = LARGEST_CASE, step: int = 1) -> Iterator[tuple[int, int, torch.dtype, Layout, str]]:
    """Shapes, types, layouts and overlaps: each shape with all types, the others in turn."""
    number = 0
    for k in KS:
        for m in MS:
            for source in SOURCES:
                number += 1
                if m * k <= limit and number % step == 0:
                    yield m, k, source, LAYOUTS[number % len(LAYOUTS)], ("launch", "none")[number // 3 % 2]


def compare(check: Check, m: int, k: int, source: torch.dtype, layout: Layout, overlap: str, device: str) -> None:
    """One input quantised to both types: bits, scales, and that nothing else was written."""
    x = laid_out(rows(m, k, source, m + k, device), layout.x_pad, layout.x_offset)
    for target in TARGETS:
        codes, scales = quant_reference.quantize(x, target)
        title = f"{m}x{k} {source} to {target} {layout} {overlap}"
        guard, begin = 64, 16
        scale_buffer = torch.full((m + guard,), -7.0, device=device)
        scale = scale_buffer[begin : begin + m].view(m, 1)
        if layout.out is None:
            q, returned = cutlass_w8a8.quantize_per_token(x, target, overlap=overlap)
            check.record(q.is_contiguous() and q.shape == x.shape, f"{title}: the result's layout")
            untouched = True
        else:
            pad, offset = layout.out
            buffer = torch.full((offset + m * (k + pad) + guard,), POISON, dtype=torch.uint8, device=device)
            out = buffer.view(target).as_strided((m, k), (k + pad, 1), offset)
            q, returned = cutlass_w8a8.quantize_per_token(x, target, out=out, scale=scale, overlap=overlap)
            check.record(q is out and returned is scale, f"{title}: other tensors were returned")
            inside = torch.zeros_like(buffer, dtype=torch.bool)
            inside.as_strided((m, k), (k + pad, 1), offset).fill_(True)
            around = torch.cat([scale_buffer[:begin], scale_buffer[begin + m :]])
            untouched = bool((buffer[~inside] == POISON).all()) and bool((around == -7.0).all())
        check.record(untouched, f"{title}: something else was written")
        wrong = int((q.view(torch.uint8) != codes).sum())
        check.record(not wrong, f"{title}: {wrong} of {m * k} values differ")
        wrong = int((returned.view(torch.int32) != scales).sum())
        check.record(not wrong, f"{title}: {wrong} of {m} scales differ")
