"""How a quantisation kernel is launched: which entry point, and how many threads share a row."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cutlass_w8a8.spec import QUANT_HELD, QUANT_MAX_THREADS, QUANT_SCAN_VECTORS, Scheme

WARP = 32
ANY_ROW = "w8a8_kernel"
_HELD = {held: f"w8a8_held_{held}" for held in QUANT_HELD}
SCAN = "w8a8_scan"
# What one multiprocessor holds at once on data-centre chips; where it is less, this choice is merely less apt.
_RESIDENT_THREADS = 2048
_MIN_BLOCK = 128
# Vectors a thread holds where there are more rows than that.
_MANY = 4
# Elements that a thread of the any-row kernel is given where rows are short enough.
_LOOP_ELEMENTS = 8
# Threads of a block where a tensor without gaps is cut into rows anew.
_CUT_THREADS = 256
_SCAN_THREADS = 512
# So many are at work at once whatever registers they need, and leave few values to be put together.
_SCAN_BLOCKS = 2


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


@dataclass(frozen=True)
class WholeLaunch:
    """A launch over all of a tensor, seen as rows that need not be its own.

    Attributes:
        launch: which entry point, and its threads.
        m, k: rows, and elements of a row.
        last: elements of the last row.
        blocks: of the grid; 0 for as many as there are rows for.
    """

    launch: QuantLaunch
    m: int
    k: int
    last: int
    blocks: int = 0

    @property
    def partials(self) -> int:
        """How many values it leaves, if it is the one that looks for the scale."""
        return self.blocks * self.launch.rows


def quant_symbols(scheme: Scheme) -> tuple[str, ...]:
    """The entry points of a kernel."""
    return (ANY_ROW, *_HELD.values(), *((SCAN,) if scheme.scans else ()))


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


def whole_launch(
    m: int, k: int, source_bytes: int, *, aligned: bool, packed: bool, scans: bool, sm_count: int
) -> tuple[WholeLaunch | None, WholeLaunch]:
    """The launches for a tensor of [m, k] elements, not empty, that share a scale: the one that looks for it, and the
    one that quantises. The former is None where the scale is given (``scans`` is false), or where one block is enough.

    A ``packed`` tensor, whose rows lie without gaps, is cut into rows that suit the launch; ``aligned`` then if it may
    be accessed by vectors. Otherwise its rows are taken as they are.
    """
    if packed:
        total = m * k
        per_vector = 16 // source_bytes if aligned else 0
        items = total // per_vector if aligned else -(-total // _LOOP_ELEMENTS)
        if scans and items <= QUANT_MAX_THREADS * (QUANT_HELD[-1] if aligned else 1):
            return None, _one_row(total, items, per_vector)
        scan = _cut(total, items, per_vector, _SCAN_THREADS, sm_count * _SCAN_BLOCKS) if scans else None
        launch = _cut(total, items, per_vector, _CUT_THREADS, sm_count * _RESIDENT_THREADS // _CUT_THREADS)
        return scan and _in_turn(scan, sm_count), launch
    launch = WholeLaunch(quant_launch(m, k, source_bytes, aligned, sm_count), m, k, k)
    if not scans:
        return None, launch
    vectors = launch.launch.vectors
    count = _warps(vectors, QUANT_SCAN_VECTORS) if vectors else _warps(k, _LOOP_ELEMENTS)
    count = min(_SCAN_THREADS, count)
    return _in_turn(WholeLaunch(QuantLaunch(SCAN, count, _rows(count), vectors), m, k, k), sm_count), launch


def _one_row(total: int, items: int, per_vector: int) -> WholeLaunch:
    """All elements as the row of one block: ``items`` vectors, or what threads are given of single elements."""
    held = next(held for held in QUANT_HELD if items <= held * QUANT_MAX_THREADS)
    threads = _warps(items, held)
    symbol = _HELD[held] if per_vector else ANY_ROW
    return WholeLaunch(QuantLaunch(symbol, threads, 1, items if per_vector else 0), 1, total, total)


def _cut(total: int, items: int, per_vector: int, threads: int, enough: int) -> WholeLaunch:
    """Rows of as few vectors a thread as leave no more than ``enough`` rows, up to four; if unaligned, of elements."""
    if not per_vector:
        width = threads * _LOOP_ELEMENTS
        launch = QuantLaunch(ANY_ROW, threads, 1, 0)
    else:
        threads = min(threads, _warps(items, 1))
        held = next((held for held in QUANT_HELD if held < _MANY and items <= held * threads * enough), _MANY)
        width = threads * held * per_vector
        launch = QuantLaunch(_HELD[held], threads, 1, threads * held)
    rows = -(-total // width)
    return WholeLaunch(launch, rows, width, total - (rows - 1) * width)


def _in_turn(scan: WholeLaunch, sm_count: int) -> WholeLaunch:
    """A scan whose blocks, no more than run at once, go through the rows in turn, each through as many."""
    groups = -(-scan.m // scan.launch.rows)
    rounds = -(-groups // (sm_count * _SCAN_BLOCKS))
    return replace(scan, launch=replace(scan.launch, symbol=SCAN), blocks=-(-groups // rounds))


def _warps(items: int, each: int) -> int:
    """Threads, in whole warps, for ``items`` at ``each`` a thread."""
    return max(1, -(-items // (each * WARP))) * WARP


def _rows(threads: int) -> int:
    return max(1, _MIN_BLOCK // threads)
