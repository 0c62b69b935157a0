"""Hopper's main loops: warp groups of 64 rows, clusters, registers for the accumulators."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from cutlass_w8a8.config import Schedule, Scheduler
from cutlass_w8a8.dispatch.rules import common
from cutlass_w8a8.dispatch.rules.common import Rule
from cutlass_w8a8.spec import KernelSpec

_WARP_GROUP = 128
# Accumulator registers a thread can hold beside the main loop's own; CUTLASS gives a math warp group 240.
_MAX_ACCUMULATORS = 208


def tile(spec: KernelSpec) -> Iterator[str]:
    """Extents of wgmma, and of the swizzled rows in shared memory."""
    m, n, k = spec.config.tile
    if m not in (64, 128, 256):
        yield f"tile m {m} is not 64, 128 or 256"
    if n % 16 or not 16 <= n <= 256:
        yield f"tile n {n} is not a multiple of 16 from 16 to 256"
    if k not in (64, 128, 256, 512):
        yield f"tile k {k} is not 64, 128, 256 or 512"


def warp_groups(spec: KernelSpec) -> Iterator[str]:
    """Warp groups have rows to work on, and registers for the sums."""
    m, n, _ = spec.config.tile
    cooperative = spec.config.schedule is Schedule.COOPERATIVE
    if cooperative and m < 128:
        yield f"a cooperative kernel splits tile m over two warp groups of 64; tile m {m} is below 128"
    threads = _WARP_GROUP * (2 if cooperative else 1)
    # Accurate accumulation keeps the promoted sums beside the tensor core's.
    registers = m * n // threads * (1 if spec.config.fast_accum else 2)
    if registers > _MAX_ACCUMULATORS:
        yield (
            f"tile {m}x{n} needs {registers} accumulator registers a thread, at most {_MAX_ACCUMULATORS} fit; "
            "use a smaller tile" + ("" if cooperative else " or the cooperative schedule")
        )


def cluster(spec: KernelSpec) -> Iterator[str]:
    """Clusters are portable, and can share what they multicast."""
    extents, (_, n, _) = spec.config.cluster, spec.config.tile
    if any(extent not in (1, 2, 4, 8) for extent in extents) or prod(extents) > 8:
        yield f"cluster {extents[0]}x{extents[1]} is not a product of 1, 2, 4, 8 of at most 8 blocks"
        return
    # Multicast gives each block of the cluster a slice of the shared tile, in whole 8-row swizzle atoms; any legal
    # tile m has room for 8 slices.
    if n % (8 * extents[0]):
        yield f"tile n {n} cannot be shared by {extents[0]} blocks in slices of 8 rows"


def accurate(spec: KernelSpec) -> Iterator[str]:
    """Partial sums are promoted at intervals along k."""
    k = spec.config.tile[2]
    if not spec.config.fast_accum and k > 128:
        yield f"accurate accumulation promotes partial sums every 128 of k; tile k {k} is larger; use 128"


def scheduler(spec: KernelSpec) -> Iterator[str]:
    """What stream-K goes together with."""
    config = spec.config
    if config.scheduler is Scheduler.STREAM_K and config.schedule is not Schedule.COOPERATIVE:
        yield f"the stream-K scheduler needs the cooperative schedule, not {config.schedule.value}"


def slices(spec: KernelSpec) -> Iterator[str]:
    """Blocks that divide K leave their sums to the first of a cluster, from the registers of one warp group."""
    config = spec.config
    if config.slices == 1:
        return
    if config.slices not in (2, 4, 8):
        yield f"slices {config.slices} is not 1, 2, 4 or 8"
    if config.schedule is not Schedule.WARP_SPECIALIZED or config.cluster != (1, 1):
        yield f"slices {config.slices} needs the schedule ws and the cluster 1x1, which the slices then form"


RULES: tuple[Rule, ...] = (
    common.options_3x,
    scheduler,
    slices,
    accurate,
    tile,
    warp_groups,
    cluster,
    common.stages,
)


def smem_bytes(spec: KernelSpec, stages: int) -> int:
    """The main loop's tiles and barriers, two store buffers (one when a single fits the tile), the row vectors."""
    config = spec.config
    m, n, k = config.tile
    sub_m, sub_n = (128 if config.schedule is Schedule.COOPERATIVE else 64), min(n, 32)
    buffers = min((m // sub_m) * (n // sub_n), 2)
    store = buffers * sub_m * sub_n * spec.out.bytes
    exchange = common.round_up(128 + (config.slices - 1) * m * n * 4, 1024) if config.slices > 1 else 0
    return exchange + stages * ((m + n) * k + 16) + store + common.row_bytes(spec, n) + 256
