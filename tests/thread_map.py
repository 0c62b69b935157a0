"""CUTLASS's arithmetic for multistage kernels: which thread copies and stores what, and what falls through.

Its maps divide rounding down, and assert only that nothing becomes zero. What a remainder stood for is then not copied
or not stored, and nobody says so. This is that arithmetic written down again (`PitchLinearWarpRakedThreadMap`, the row
arrangement of `OutputTileOptimalThreadMap`, the ldmatrix iterations of m8n8k16), independent of the package's rules,
which are simpler and must refuse all that is wrong here.
"""

from __future__ import annotations

Extents = tuple[int, int, int]


def faults(tile: Extents, warp: Extents, out_bytes: int, *, turing: bool) -> list[str]:
    """What a kernel of this block and warp tile would leave out, or fail to compile for; empty if nothing.

    Args:
        tile, warp: (m, n, k) of one-byte operands.
        out_bytes: size of an element of D; 2-byte ones are stored eight at a time, others four at a time.
        turing: operands are fetched by ldmatrix of k = 16.
    """
    (m, n, k), (warp_m, warp_n, warp_k) = tile, warp
    along_m = m // warp_m
    warps = along_m * (n // warp_n) * (k // warp_k)
    found = []
    for name, rows in (("A", m), ("B", n)):
        # A warp copies 32 accesses of 16 bytes: so many rows of k bytes.
        if (rows // (32 // (k // 16))) % warps:
            found.append(f"copy of {name}")
    found += _store(n, along_m, warps, out_bytes)
    if turing and warp_m > 16 and (warp_m // 8) % 4:
        found.append("ldmatrix of A")
    return found


def _store(n: int, along_m: int, warps: int, out_bytes: int) -> list[str]:
    elements = 8 if out_bytes == 2 else 4
    element_bits = 16 if out_bytes == 2 else 32
    if along_m > warps:
        return ["more rows of warps than warps"]
    if warps % along_m:
        return ["rows of warps"]
    warps_for_rows = warps // along_m
    # Groups of 8 rows are shared among the warps that are left over.
    if warps_for_rows >= 8:
        return ["one-dimensional rows"] if n % (32 * elements) else []
    rows, accesses = 8 // warps_for_rows, n // elements
    target_width = 256 // (elements * element_bits // 8)
    if 32 // target_width > rows:
        width, height = 32 // rows, rows
    else:
        width = min(accesses, 32, target_width)
        height = min(8, 32 // width)
    if width * elements > n or accesses // width == 0 or rows // height == 0:
        return ["stores do not compile"]
    whole = accesses // width * width == accesses and rows // height * height * warps_for_rows == 8
    return [] if whole and width * height == 32 else ["stores"]
