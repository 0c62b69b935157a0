"""What makes a configuration possible: one predicate a rule, used wherever a configuration is accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from cutlass_w8a8.arch import Family
from cutlass_w8a8.config import KernelConfig, Raster, Schedule, Scheduler
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ConfigError
from cutlass_w8a8.evt.tree import Broadcast
from cutlass_w8a8.spec import KernelSpec

Rule = Callable[[KernelSpec], Iterator[str]]

_SCHEDULES = {
    Family.MULTISTAGE_2X: (Schedule.MULTISTAGE,),
    Family.TMA_WARP_SPECIALIZED_3X: (Schedule.WARP_SPECIALIZED, Schedule.PINGPONG, Schedule.COOPERATIVE),
}
_WARP_GROUP = 128
# Accumulator registers a thread can hold beside the main loop's own; CUTLASS gives a math warp group 240.
_MAX_ACCUMULATORS = 208


def _operands(spec: KernelSpec) -> Iterator[str]:
    if spec.operand not in spec.arch.operands:
        served = ", ".join(dtype.value for dtype in spec.arch.operands)
        yield f"operand type {spec.operand.value} has no kernels on {spec.arch.name}, which serves {served}"


def _schedule(spec: KernelSpec) -> Iterator[str]:
    served = _SCHEDULES[spec.arch.family]
    if spec.config.schedule not in served:
        yield (
            f"schedule {spec.config.schedule.value} does not exist on {spec.arch.name}; "
            f"use {' or '.join(s.value for s in served)}"
        )


def _launch_choices(config: KernelConfig, family: Family) -> Iterator[str]:
    if family is Family.MULTISTAGE_2X and (config.swizzle != 1 or config.raster is not Raster.HEURISTIC):
        yield "multistage kernels have a tile order of their own; leave out swizzle and raster"
    if config.swizzle not in (1, 2, 4, 8):
        yield f"swizzle {config.swizzle} is not 1, 2, 4 or 8"
    if config.splits != 1 and config.scheduler is not Scheduler.STREAM_K:
        yield f"splits {config.splits} needs the stream-K scheduler; add streamk"
    if not 0 <= config.splits <= 64:
        yield f"splits {config.splits} is outside 0 (scheduler's choice) to 64"


def _stages(spec: KernelSpec) -> Iterator[str]:
    stages = spec.config.stages
    if stages is not None and not 2 <= stages <= 32:
        yield f"stages {stages} is outside 2 to 32"


def _shared_memory(spec: KernelSpec) -> Iterator[str]:
    stages = spec.config.stages or 2
    # Left to itself the collective rounds down, and must not arrive at one stage.
    needed = smem_bytes(spec, stages) + (0 if spec.config.stages else 2048)
    if needed > spec.arch.smem_bytes:
        yield (
            f"{stages} stages of tile {'x'.join(map(str, spec.config.tile))} need {needed} bytes of shared memory, "
            f"{spec.arch.name} has {spec.arch.smem_bytes}; use a smaller tile, or fewer stages if you gave their number"
        )


def _tile_3x(spec: KernelSpec) -> Iterator[str]:
    m, n, k = spec.config.tile
    if m not in (64, 128, 256):
        yield f"tile m {m} is not 64, 128 or 256"
    if n % 16 or not 16 <= n <= 256:
        yield f"tile n {n} is not a multiple of 16 from 16 to 256"
    if k not in (64, 128, 256):
        yield f"tile k {k} is not 64, 128 or 256"


def _warp_groups(spec: KernelSpec) -> Iterator[str]:
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


def _cluster_3x(spec: KernelSpec) -> Iterator[str]:
    cluster, (_, n, _) = spec.config.cluster, spec.config.tile
    if any(extent not in (1, 2, 4, 8) for extent in cluster) or prod(cluster) > 8:
        yield f"cluster {cluster[0]}x{cluster[1]} is not a product of 1, 2, 4, 8 of at most 8 blocks"
        return
    # Multicast gives each block of the cluster a slice of the shared tile, in whole 8-row swizzle atoms; any legal
    # tile m has room for 8 slices.
    if n % (8 * cluster[0]):
        yield f"tile n {n} cannot be shared by {cluster[0]} blocks in slices of 8 rows"


def _options_3x(spec: KernelSpec) -> Iterator[str]:
    config = spec.config
    if config.warp is not None:
        yield "a warp tile is a choice of multistage kernels only"
    if config.scheduler is Scheduler.STREAM_K and config.schedule is not Schedule.COOPERATIVE:
        yield f"the stream-K scheduler needs the cooperative schedule, not {config.schedule.value}"
    if config.scheduler is Scheduler.STREAM_K and config.pdl:
        yield "CUTLASS's sm90 stream-K scheduler does not compile with programmatic dependent launch; drop one"


def _accurate_3x(spec: KernelSpec) -> Iterator[str]:
    k = spec.config.tile[2]
    if not spec.config.fast_accum and k > 128:
        yield f"accurate accumulation promotes partial sums every 128 of k; tile k {k} is larger; use 128"


def _options_2x(spec: KernelSpec) -> Iterator[str]:
    config = spec.config
    if config.swap_ab:
        yield "swap is impossible: 2.x visitors store along n only"
    if config.cluster != (1, 1):
        yield f"cluster {config.cluster[0]}x{config.cluster[1]}: clusters begin with sm90; use 1x1"
    if config.pdl:
        yield "programmatic dependent launch begins with sm90"
    if config.stages is None:
        yield "a multistage kernel needs a number of stages; add s3, s4 or s5"


def _tile_2x(spec: KernelSpec) -> Iterator[str]:
    tile, warp = spec.config.tile, spec.config.warp
    if warp is None:
        yield "a multistage kernel needs a warp tile; add one like w64x64x64"
        return
    for axis, block, part, unit in zip("mnk", tile, warp, (16, 32, 64), strict=True):
        if block % part:
            yield f"tile {axis} {block} is not a multiple of the warp tile's {part}"
        if part % unit:
            yield f"warp tile {axis} {part} is not a multiple of {unit}"
    warps = prod(block // part for block, part in zip(tile, warp, strict=True))
    if tile[2] not in (64, 128):
        yield f"tile k {tile[2]} is not 64 or 128"
    for axis, extent in zip("mn", tile, strict=False):
        # Every thread copies at least 16 bytes of each operand's tile.
        if extent * tile[2] < 16 * 32 * warps:
            yield f"tile {axis} {extent} with k {tile[2]} has too little for {warps} warps to copy; use fewer warps"
    if warps > 16:
        yield f"tile {tile} in warp tiles {warp} makes {warps} warps; at most 16"
    accumulators = warp[0] * warp[1] // 32
    if accumulators > 128:
        yield f"warp tile {warp[0]}x{warp[1]} needs {accumulators} accumulator registers a thread; at most 128"


_RULES: dict[Family, tuple[Rule, ...]] = {
    Family.MULTISTAGE_2X: (_operands, _schedule, _options_2x, _tile_2x, _stages, _shared_memory),
    Family.TMA_WARP_SPECIALIZED_3X: (
        _operands,
        _schedule,
        _options_3x,
        _accurate_3x,
        _tile_3x,
        _warp_groups,
        _cluster_3x,
        _stages,
        _shared_memory,
    ),
}


def smem_bytes(spec: KernelSpec, stages: int) -> int:
    """Shared memory a block needs with that many stages, in bytes.

    The main loop's tiles and barriers, and for the warp-specialised families the epilogue's: two (one when a
    single fits the tile) store buffers and one copy of each row vector.
    """
    config = spec.config
    m, n, k = config.tile
    mainloop = stages * (m + n) * k
    if spec.arch.family is Family.MULTISTAGE_2X:
        return mainloop
    tree = spec.epilogue.tree(spec.operand.accumulator, spec.out)
    row = Broadcast.COLUMN if config.swap_ab else Broadcast.ROW
    rows = sum(n * load.element.bytes for load in tree.loads if load.broadcast is row)
    sub_m, sub_n = (128 if config.schedule is Schedule.COOPERATIVE else 64), min(n, 32)
    buffers = min((m // sub_m) * (n // sub_n), 2)
    return mainloop + stages * 16 + buffers * sub_m * sub_n * spec.out.bytes + rows + 256


def problems(spec: KernelSpec, launch: KernelConfig | None = None) -> list[str]:
    """Every reason why ``spec`` (launched with ``launch``'s launch-time choices) is impossible; empty if none."""
    found = list(_launch_choices(launch or spec.config, spec.arch.family))
    for rule in _RULES[spec.arch.family]:
        found.extend(rule(spec))
    if spec.operand is DType.E4M3 and not found:
        spec.epilogue.tree(spec.operand.accumulator, spec.out)
    return found


def validate(spec: KernelSpec, launch: KernelConfig | None = None) -> None:
    """Refuse an impossible configuration with all its reasons, before a compiler runs.

    Raises:
        ConfigError: the configuration is impossible for its arch, types or epilogue.
        UnsupportedError: the epilogue does not suit the operand type.
    """
    reasons = problems(spec, launch)
    if reasons:
        raise ConfigError(f"config {spec.config.name!r} is impossible for {spec.arch.name}: " + "; ".join(reasons))
