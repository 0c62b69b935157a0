"""A Triton kernel for the same product and epilogue: what a fused kernel costs without CUTLASS."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# By the largest M served: tile of M, N, K, warps, stages. The last serves any M.
_TILES = (
    (16, (16, 64, 256, 4, 4)),
    (32, (32, 64, 256, 4, 4)),
    (64, (64, 64, 128, 4, 4)),
    (128, (64, 128, 128, 4, 4)),
    (512, (128, 128, 128, 8, 4)),
    (None, (128, 256, 128, 8, 3)),
)


@triton.jit(do_not_specialize=["m"])  # else M = 1 and multiples of 16 are compiled anew
def _scaled_mm(
    a, b, out, scale_a, scale_b, m, n, k, stride_a, stride_b, stride_out,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr, group: tl.constexpr,
    accumulator: tl.constexpr, even_k: tl.constexpr,
):  # fmt: skip
    # Tiles of a group of rows follow each other, so that those in flight share columns of b.
    block = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, tile_m), tl.cdiv(n, tile_n)
    first_m = block // (group * tiles_n) * group
    rows = min(tiles_m - first_m, group)
    block_m = first_m + block % (group * tiles_n) % rows
    block_n = block % (group * tiles_n) // rows

    # Rows and columns beyond the end wrap around: they are computed, and not stored.
    row = (block_m * tile_m + tl.arange(0, tile_m)) % m
    column = (block_n * tile_n + tl.arange(0, tile_n)) % n
    depth = tl.arange(0, tile_k)
    a_at = a + row[:, None].to(tl.int64) * stride_a + depth[None, :]
    b_at = b + column[None, :].to(tl.int64) * stride_b + depth[:, None]
    total = tl.zeros((tile_m, tile_n), dtype=accumulator)
    for begin in range(0, k, tile_k):
        if even_k:
            left, right = tl.load(a_at), tl.load(b_at)
        else:
            left = tl.load(a_at, mask=depth[None, :] < k - begin, other=0.0)
            right = tl.load(b_at, mask=depth[:, None] < k - begin, other=0.0)
        total = tl.dot(left, right, total, out_dtype=accumulator)
        a_at += tile_k
        b_at += tile_k

    scaled = tl.load(scale_b + column)[None, :] * total.to(tl.float32)
    scaled = tl.load(scale_a + row)[:, None] * scaled
    out_row = block_m * tile_m + tl.arange(0, tile_m)
    out_column = block_n * tile_n + tl.arange(0, tile_n)
    out_at = out + out_row[:, None].to(tl.int64) * stride_out + out_column[None, :]
    tl.store(out_at, scaled.to(out.dtype.element_ty), mask=(out_row[:, None] < m) & (out_column[None, :] < n))


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """``out`` = scale_a * scale_b * (a @ b).

    Args:
        a: fp8 or int8 [M, K], contiguous along K.
        b: of the same type, [K, N], column-major.
        scale_a, scale_b: float32, M and N of them.
        out: [M, N], contiguous along N.
    """
    (m, k), n = a.shape, b.shape[1]
    tile_m, tile_n, tile_k, warps, stages = next(tile for limit, tile in _TILES if limit is None or m <= limit)
    _scaled_mm[(triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n),)](
        a, b, out, scale_a, scale_b, m, n, k, a.stride(0), b.stride(1), out.stride(0),
        tile_m, tile_n, tile_k, 8, tl.int32 if a.dtype is torch.int8 else tl.float32, k % tile_k == 0,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
