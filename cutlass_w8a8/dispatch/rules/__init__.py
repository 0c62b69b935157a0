"""What makes a configuration possible: one predicate a rule, used wherever a configuration is accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cutlass_w8a8.arch import Family
from cutlass_w8a8.config import KernelConfig, Raster, Schedule, Scheduler
from cutlass_w8a8.dispatch.rules import blackwell, geforce, hopper, multistage
from cutlass_w8a8.dispatch.rules.common import Rule
from cutlass_w8a8.errors import ConfigError, UnsupportedError
from cutlass_w8a8.spec import KernelSpec

_SCHEDULES = {
    Family.MULTISTAGE: (Schedule.MULTISTAGE,),
    Family.HOPPER: (Schedule.WARP_SPECIALIZED, Schedule.PINGPONG, Schedule.COOPERATIVE),
    Family.BLACKWELL: (Schedule.ONE_SM, Schedule.TWO_SM),
    Family.GEFORCE: (Schedule.PINGPONG, Schedule.COOPERATIVE),
}
_RULES: dict[Family, tuple[Rule, ...]] = {
    Family.MULTISTAGE: multistage.RULES,
    Family.HOPPER: hopper.RULES,
    Family.BLACKWELL: blackwell.RULES,
    Family.GEFORCE: geforce.RULES,
}
_SMEM_BYTES: dict[Family, Callable[[KernelSpec, int], int]] = {
    Family.MULTISTAGE: multistage.smem_bytes,
    Family.HOPPER: hopper.smem_bytes,
    Family.BLACKWELL: blackwell.smem_bytes,
    Family.GEFORCE: geforce.smem_bytes,
}


def schedules(family: Family) -> tuple[Schedule, ...]:
    """How main loops of ``family`` can be organised."""
    return _SCHEDULES[family]


def _schedule(spec: KernelSpec) -> Iterator[str]:
    served = schedules(spec.family)
    if spec.config.schedule not in served:
        yield (
            f"schedule {spec.config.schedule.value} does not exist for {spec.operand.value} on {spec.arch.name}; "
            f"use {' or '.join(s.value for s in served)}"
        )


def _launch_choices(config: KernelConfig, family: Family) -> Iterator[str]:
    if family is Family.MULTISTAGE and (config.swizzle != 1 or config.raster is not Raster.HEURISTIC):
        yield "multistage kernels have a tile order of their own; leave out swizzle and raster"
    if config.swizzle not in (1, 2, 4, 8):
        yield f"swizzle {config.swizzle} is not 1, 2, 4 or 8"
    if config.splits != 1 and config.scheduler is not Scheduler.STREAM_K:
        yield f"splits {config.splits} needs the stream-K scheduler; add streamk"
    if not 0 <= config.splits <= 64:
        yield f"splits {config.splits} is outside 0 (scheduler's choice) to 64"


def _shared_memory(spec: KernelSpec) -> Iterator[str]:
    stages = spec.config.stages or 2
    # Left to itself the collective rounds down, and must not arrive at one stage.
    needed = smem_bytes(spec, stages) + (0 if spec.config.stages else 2048)
    if needed > spec.arch.smem_bytes:
        yield (
            f"{stages} stages of tile {'x'.join(map(str, spec.config.tile))} need {needed} bytes of shared memory, "
            f"{spec.arch.name} has {spec.arch.smem_bytes}; use a smaller tile, or fewer stages if you gave their number"
        )


def smem_bytes(spec: KernelSpec, stages: int) -> int:
    """Shared memory a block needs with that many stages, in bytes."""
    return _SMEM_BYTES[spec.family](spec, stages)


def problems(spec: KernelSpec, launch: KernelConfig | None = None) -> list[str]:
    """Every reason why ``spec`` (launched with ``launch``'s launch-time choices) is impossible; empty if none."""
    try:
        return _reasons(spec, launch or spec.config)
    except UnsupportedError as error:
        return [str(error)]


def validate(spec: KernelSpec, launch: KernelConfig | None = None) -> None:
    """Refuse an impossible configuration with all its reasons, before a compiler runs.

    Raises:
        ConfigError: the configuration is impossible for its arch, types or epilogue.
        UnsupportedError: the arch does not multiply the operand type, or the epilogue does not suit it.
    """
    config = launch or spec.config
    if reasons := _reasons(spec, config):
        raise ConfigError(f"config {config.name!r} is impossible for {spec.arch.name}: " + "; ".join(reasons))


def _reasons(spec: KernelSpec, launch: KernelConfig) -> list[str]:
    """Raises UnsupportedError where no configuration could help."""
    family = spec.family
    spec.epilogue.tree(spec.operand.accumulator, spec.out)
    found = [*_launch_choices(launch, family), *_schedule(spec)]
    if found:
        # The family's own rules would only repeat that this configuration is another family's.
        return found
    for rule in _RULES[family]:
        found.extend(rule(spec))
    return found or list(_shared_memory(spec))
