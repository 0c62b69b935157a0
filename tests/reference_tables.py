"""The reference's choice of configuration (vLLM 0.33), by arch and operand type, to be compared with ours.

Written from its heuristics' rules as functions of (m, n, k); names are those of our configurations.
"""

from __future__ import annotations

from collections.abc import Callable

Choice = Callable[[int, int, int], str]


def _pow2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def sm75_int8(m: int, n: int, k: int) -> str:
    if m <= 32:
        return "32x128x64_w32x64x64_multistage_s2"
    if m <= 64:
        return "64x128x128_w64x64x64_multistage_s2"
    return f"128x128x{128 if 128 < m <= 256 else 64}_w64x64x64_multistage_s2"


def sm80_int8(m: int, n: int, k: int) -> str:
    if m <= 16:
        return "16x64x128_w16x64x64_multistage_s5"
    if m <= 32:
        return "32x64x128_w32x64x64_multistage_s5"
    if m <= 64 or (m <= 128 and n < 8192):
        return "64x128x128_w64x64x64_multistage_s5"
    return "128x128x64_w64x64x64_multistage_s5"


def sm86_int8(m: int, n: int, k: int) -> str:
    # What does not fit this chip's shared memory falls back to the configuration for 32 rows.
    config = sm80_int8(m, n, k)
    return "32x64x128_w32x64x64_multistage_s5" if config.startswith("64x128x128") else config


def sm89_int8(m: int, n: int, k: int) -> str:
    width = _pow2(n)
    wide, widest = width > 8192, width > 16384
    if m <= 16:
        return "16x128x128_w16x64x64_multistage_s4" if wide else "16x64x128_w16x64x64_multistage_s5"
    if m <= 32:
        return "32x128x128_w32x64x64_multistage_s4" if wide else "32x64x128_w16x64x64_multistage_s5"
    if m <= 64:
        return "64x128x128_w64x64x64_multistage_s3" if wide else "64x64x128_w32x64x64_multistage_s5"
    if m <= 128:
        if widest:
            return "64x64x128_w32x64x64_multistage_s5"
        return "128x128x64_w64x64x64_multistage_s5" if wide else "64x128x128_w64x64x64_multistage_s3"
    if m <= 256 and width <= 4096:
        return "64x128x128_w64x64x64_multistage_s3"
    tall = (8192 < width <= 16384) if m <= 256 else (4096 < width <= 8192 or widest)
    return "256x128x64_w64x64x64_multistage_s3" if tall else "128x128x64_w64x64x64_multistage_s5"


def sm89_e4m3(m: int, n: int, k: int) -> str:
    width = _pow2(n)
    wide, widest = width > 8192, width > 16384
    if m <= 16:
        return (
            "32x64x128_w16x64x64_multistage_s5"
            if widest
            else "16x128x64_w16x64x64_multistage_s5"
            if wide
            else "16x64x128_w16x64x64_multistage_s5"
        )
    if m <= 32:
        middle = wide and not widest
        return "32x128x128_w32x64x64_multistage_s4" if middle else "32x64x128_w16x64x64_multistage_s5"
    if m <= 64:
        middle = wide and not widest
        return "64x128x128_w64x64x64_multistage_s3" if middle else "64x64x128_w32x64x64_multistage_s5"
    if m <= 128:
        if widest:
            return "128x64x128_w64x64x64_multistage_s3"
        return "128x128x64_w64x64x64_multistage_s5" if wide else "64x128x128_w64x64x64_multistage_s3"
    if m <= 256 and width <= 4096:
        return "64x128x128_w64x64x64_multistage_s3"
    tall = m > 256 and 4096 < width <= 8192
    return "256x128x64_w64x64x64_multistage_s3" if tall else "128x128x64_w64x64x64_multistage_s5"


def sm100_e4m3(m: int, n: int, k: int) -> str:
    if m <= 16:
        return "128x32x128_4x1_2sm_swap"
    if m <= 64:
        return "64x64x128_1sm" if m == 64 and k < 4096 else "128x64x256_4x1_2sm_swap"
    return "128x128x128_2x1_2sm" if m <= 256 else "256x128x128_2x2_2sm"


def sm120_e4m3(m: int, n: int, k: int) -> str:
    if m <= 16:
        return "16x64x128_pingpong"
    if m <= 32:
        return "32x64x128_pingpong"
    return "64x64x128_pingpong" if m <= 256 else "128x128x128_cooperative"


REFERENCE: dict[tuple[str, str], Choice] = {
    ("sm75", "int8"): sm75_int8,
    ("sm80", "int8"): sm80_int8,
    ("sm86", "int8"): sm86_int8,
    ("sm87", "int8"): sm80_int8,
    ("sm89", "int8"): sm89_int8,
    ("sm89", "e4m3"): sm89_e4m3,
    ("sm100", "e4m3"): sm100_e4m3,
    ("sm103", "e4m3"): sm100_e4m3,
    ("sm110", "e4m3"): sm100_e4m3,
    ("sm120", "e4m3"): sm120_e4m3,
    ("sm121", "e4m3"): sm120_e4m3,
}
