"""Main loops of Blackwell without tensor memory: mma.sync m16n8k32 in eight warps, or two times four."""

from __future__ import annotations

from collections.abc import Iterator

from cutlass_w8a8.config import Schedule, Scheduler
from cutlass_w8a8.dispatch.rules import common
from cutlass_w8a8.dispatch.rules.common import Rule, round_up
from cutlass_w8a8.spec import KernelSpec

_MAX_ACCUMULATORS = 208
_SCHEDULER_BYTES = 96


def options(spec: KernelSpec) -> Iterator[str]:
    """What is not offered on this family."""
    config = spec.config
    if config.cluster != (1, 1):
        yield f"cluster {config.cluster[0]}x{config.cluster[1]}: this chip has no multicast; use 1x1"
    if config.scheduler is Scheduler.STREAM_K:
        yield "the stream-K scheduler does not exist on this family; leave out streamk"
    if not config.fast_accum:
        yield "accurate: this main loop accumulates in one way, in float32; leave it out"


def tile(spec: KernelSpec) -> Iterator[str]:
    """Warps divide the tile evenly, the epilogue's parts too, and a stage holds more than one instruction along k."""
    m, n, k = spec.config.tile
    cooperative = spec.config.schedule is Schedule.COOPERATIVE
    allowed = (128, 256) if cooperative else (16, 32, 64, 128, 256)
    if m not in allowed:
        yield f"tile m {m} is not {' or '.join(map(str, allowed))}, as {spec.config.schedule.value} needs"
    if n % 32 or not 32 <= n <= 256:
        yield f"tile n {n} is not a multiple of 32 from 32 to 256"
    if k not in (64, 128, 256):
        yield f"tile k {k} is not 64, 128 or 256"
    registers = m * n // (256 if cooperative else 128)
    if registers >= _MAX_ACCUMULATORS:
        yield (
            f"tile {m}x{n} needs {registers} accumulator registers a thread, fewer than {_MAX_ACCUMULATORS} fit; "
            "use a smaller tile"
        )


RULES: tuple[Rule, ...] = (
    common.options_3x,
    options,
    tile,
    common.stages,
    common.no_slices,
)


def smem_bytes(spec: KernelSpec, stages: int) -> int:
    """The main loop's tiles, two store buffers (one when a single fits the tile), the row vectors, barriers."""
    m, n, k = spec.config.tile
    part_m, part_n = min(m, 64), 32
    buffers = min((m // part_m) * (n // part_n), 2)
    pingpong = 0 if spec.config.schedule is Schedule.COOPERATIVE else 32
    barriers = 16 * (stages + buffers + 1) + pingpong + _SCHEDULER_BYTES
    store = buffers * part_m * part_n * spec.out.bytes + max(common.row_bytes(spec, n), 1)
    return sum(round_up(part, 1024) for part in (barriers, store, m * k * stages, n * k * stages))
