"""How a quantisation kernel is launched: which entry point, and how many threads share a row."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_w8a8.spec import QUANT_HELD, QUANT_MAX_THREADS

WARP = 32
ANY_ROW = "w8a8_kernel"
_HELD = {held: f"w8a8_held_{held}" for held in QUANT_HELD}
QUANT_SYMBOLS = (ANY_ROW, *_HELD.values())
# What one multiprocessor holds at once on data-centre chips; where it is less, this choice is merely less apt.
_RESIDENT_THREADS = 2048
_MIN_BLOCK = 128
# Vectors a thread holds where there are more rows than that.
_MANY = 4
# Elements that a thread of the any-row kernel is given where rows are short enough.
_LOOP_ELEMENTS = 8


@dataclass(frozen=True)
class QuantLaunch:
    """A launch.

    Attributes:
        symbol: the kernel's entry point.
        threads: threads that share a row, a multiple of 32.
        rows: rows of a block.
        vectors: 16-byte vectors that each row begins with.
    """

    symbol: str
    threads: int
    rows: int
    vectors: int


def quant_launch(m: int, k: int, source_bytes: int, aligned: bool, sm_count: int) -> QuantLaunch:
    """The launch for [m, k] elements of ``source_bytes``; ``aligned`` if every row may be accessed by vectors.

    Rows that are all vectors are held in registers: by as many threads as it takes for all rows to be under way at
    once, or, if they are too many for that, with four vectors a thread, which keeps enough bytes in flight.
    """
    per_vector = 16 // source_bytes
    vectors = k // per_vector if aligned else 0
    if vectors * per_vector == k and 0 < vectors <= QUANT_MAX_THREADS * QUANT_HELD[-1]:
        fitting = [held for held in QUANT_HELD if vectors <= held * QUANT_MAX_THREADS]
        threads = {held: _warps(vectors, held) for held in fitting}
        at_once = (held for held in fitting if held < _MANY and m * threads[held] <= sm_count * _RESIDENT_THREADS)
        held = next(at_once, max(_MANY, fitting[0]))
        # A row of few vectors has fewer threads than it takes to need that many each.
        held = next(x for x in fitting if x * threads[held] >= vectors)
        return QuantLaunch(_HELD[held], threads[held], _rows(threads[held]), vectors)
    count = min(QUANT_MAX_THREADS, _warps(k, _LOOP_ELEMENTS))
    return QuantLaunch(ANY_ROW, count, _rows(count), vectors)


def _warps(items: int, each: int) -> int:
    """Threads, in whole warps, for ``items`` at ``each`` a thread."""
    return max(1, -(-items // (each * WARP))) * WARP


def _rows(threads: int) -> int:
    return max(1, _MIN_BLOCK // threads)
