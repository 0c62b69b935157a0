"""Inputs for quantisation, laid out in every way that is accepted, and the comparison with the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import cutlass_w8a8
from tests import quant_reference
from tests.harness import Check

SOURCES = (torch.bfloat16, torch.float16, torch.float32)
TARGETS = (torch.float8_e4m3fn, torch.int8)
# Every scheme with every type it quantises to.
WAYS = (
    ("token", torch.float8_e4m3fn), ("token", torch.int8), ("token-azp", torch.int8),
    ("tensor", torch.float8_e4m3fn), ("tensor", torch.int8), ("tensor-azp", torch.int8),
    ("static", torch.float8_e4m3fn), ("static", torch.int8), ("static-azp", torch.int8),
)  # fmt: skip
# Ways to quantise a matrix other than by rows and symmetric, in an order in which every two in turn differ.
OTHER_WAYS = tuple(way for way in WAYS if way[0] != "token")
# Ordinary scales, one that makes every second value a tie, and such as nobody should give.
SCALES = (0.037, 0.5, 3.0, 2.0**-9, 1e-30, 1e30, 1e-41, 0.0, -0.25, float("inf"), float("nan"))
AZPS = (0, 7, -128, 127, -1, 1000)
POISON = 0xA5
# Every way a row may be cut: odd, around a vector, a warp, a block, what registers hold, and models' own.
KS = (
    1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 255, 256, 257, 512, 1000, 1024, 1040, 1536, 2048, 2050,
    3584, 4096, 4097, 4104, 5120, 7168, 8192, 11008, 14336, 16384, 16392, 28672, 28673, 32768, 65536, 70000,
)  # fmt: skip
MS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 64, 100, 131, 132, 133, 256, 512, 1000, 2112, 4096)
LARGEST_CASE = 1 << 26
# Elements of a buffer around what may be written, and how many of them lie before it.
_GUARD, _BEGIN = 64, 16


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
    """[m, k] of normal values at many magnitudes; of 16 rows in turn, 11 hold or are something special."""
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
    number = (torch.arange(m, device=device) + seed) % 16
    x[number == 12] = 5.0
    x[number == 13] = -x[number == 13].abs()
    # Far from zero, and close together.
    x[number == 14] = (1000 + torch.arange(k, device=device) % 5 / 4).to(dtype)
    # A range that exceeds float32, where the type does.
    x[number == 15] = torch.where(torch.arange(k, device=device) % 2 == 0, limits.max, -limits.max).to(dtype)
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


def values(scheme: str, m: int, k: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> torch.Tensor:
    """[m, k] as `rows`; where one scale is found for all, with one kind of row for all."""
    if scheme.startswith("tensor") and m * k:
        return rows(1, m * k, dtype, seed, device).view(m, k)
    return rows(m, k, dtype, seed, device)


def given(scheme: str, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The scale and the zero point that a static scheme is given; nothing for others. Some have no dimension."""
    if not scheme.startswith("static"):
        return {}
    shape = ((1,), (), (1, 1))[seed % 3]
    found = {"scale": torch.full(shape, SCALES[seed % len(SCALES)], device=device)}
    if scheme.endswith("-azp"):
        found["azp"] = torch.full(shape, AZPS[seed % len(AZPS)], dtype=torch.int32, device=device)
    return found


def quantize(x: torch.Tensor, target: torch.dtype, scheme: str, **options: Any) -> tuple[torch.Tensor, ...]:
    """The public call of a scheme; ``options`` are those of `cutlass_w8a8.quantize`."""
    if scheme == "token":
        found = {"scale": options.pop("scale_out")} if "scale_out" in options else {}
        return cutlass_w8a8.quantize_per_token(x, target, **found, **options)
    if not scheme.startswith("static"):
        options |= {"granularity": scheme.removesuffix("-azp"), "symmetric": not scheme.endswith("-azp")}
    return cutlass_w8a8.quantize(x, target, **options)


def compare_ways(check: Check, number: int, case: tuple[int, int, torch.dtype, Layout, str], device: str) -> None:
    """Two of `OTHER_WAYS`, in turn, on one input each."""
    for way in (2 * number, 2 * number + 1):
        scheme, target = OTHER_WAYS[way % len(OTHER_WAYS)]
        compare(check, *case, device, scheme, (target,), seed=number)


def compare(
    check: Check,
    m: int,
    k: int,
    source: torch.dtype,
    layout: Layout,
    overlap: str,
    device: str,
    scheme: str = "token",
    targets: Sequence[torch.dtype] = TARGETS,
    seed: int | None = None,
) -> None:
    """One input quantised by one scheme: bits, scales, zero points, and that nothing else was written."""
    seed = m + k if seed is None else seed
    x = laid_out(values(scheme, m, k, source, seed, device), layout.x_pad, layout.x_offset)
    for target in targets:
        options: dict[str, Any] = given(scheme, seed, device)
        wanted = quant_reference.quantize(x, target, scheme, **options)
        title = f"{m}x{k} {source} to {target} {scheme} {seed} {layout} {overlap}"
        guards = []
        if layout.out is not None:
            pad, offset = layout.out
            buffer = torch.full((offset + m * (k + pad) + _GUARD,), POISON, dtype=torch.uint8, device=device)
            out = buffer.view(target).as_strided((m, k), (k + pad, 1), offset)
            inside = torch.zeros_like(buffer, dtype=torch.bool)
            inside.as_strided((m, k), (k + pad, 1), offset).fill_(True)
            guards.append((buffer, inside, POISON))
            options["out"] = out
            if not scheme.startswith("static"):
                names = {"scale_out": torch.float32} | ({"azp_out": torch.int32} if "azp" in scheme else {})
                shape = (1,) if scheme.startswith("tensor") else (m, 1)
                for name, dtype in names.items():
                    buffer = torch.full((shape[0] + _GUARD,), -7, dtype=dtype, device=device)
                    inside = torch.zeros_like(buffer, dtype=torch.bool)
                    inside[_BEGIN : _BEGIN + shape[0]] = True
                    guards.append((buffer, inside, -7))
                    options[name] = buffer[_BEGIN : _BEGIN + shape[0]].view(shape)
        found = quantize(x, target, scheme, overlap=overlap, **options)
        asked = [options.get(name) for name in ("out", "scale_out", "azp_out")]
        same = all(want is None or got is want for got, want in zip(found, asked, strict=False))
        check.record(same, f"{title}: other tensors were returned")
        check.record(found[0].shape == x.shape and found[0].dtype is target, f"{title}: the result's shape")
        check.record(layout.out is not None or found[0].is_contiguous(), f"{title}: the result's layout")
        untouched = all(bool((buffer[~inside] == value).all()) for buffer, inside, value in guards)
        check.record(untouched, f"{title}: something else was written")
        bits = (found[0].view(torch.uint8), found[1].view(torch.int32), *found[2:])
        for what, got, want in zip(("values", "scales", "zero points"), bits, wanted, strict=False):
            wrong = int((got != want).sum()) if got.shape == want.shape else -1
            check.record(not wrong, f"{title}: {wrong} of {want.numel()} {what} differ")
        check.record(len(found) == 2 + ("azp" in scheme), f"{title}: {len(found)} results")
