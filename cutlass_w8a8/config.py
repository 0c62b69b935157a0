"""Kernel configurations: how a kernel is tiled and scheduled, apart from what it computes."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from enum import Enum

from cutlass_w8a8.errors import ConfigError


class Schedule(str, Enum):
    """How the main loop is organised; values are the tokens of a configuration's name."""

    MULTISTAGE = "multistage"
    WARP_SPECIALIZED = "ws"
    PINGPONG = "pingpong"
    COOPERATIVE = "cooperative"
    ONE_SM = "1sm"
    TWO_SM = "2sm"


class Scheduler(str, Enum):
    """How output tiles are given to blocks: one tile after another, or divided along K too."""

    PERSISTENT = "persistent"
    STREAM_K = "streamk"


class Raster(str, Enum):
    """The order in which tiles are visited; ``heuristic`` leaves it to CUTLASS."""

    HEURISTIC = "heuristic"
    ALONG_M = "along_m"
    ALONG_N = "along_n"


Tile = tuple[int, int, int]
# A number of a configuration's text.
_N = "[0-9]{1,6}"


@dataclass(frozen=True)
class KernelConfig:
    """One way to tile and schedule a GEMM.

    With ``swap_ab`` the kernel computes the transposed problem, so ``tile`` and ``cluster`` then count
    (n, m, k) of the caller's problem: their first extent runs along N.

    Attributes:
        tile: block tile (m, n, k), in elements.
        schedule: main loop organisation.
        cluster: thread-block cluster (m, n); (1, 1) is no cluster.
        warp: warp tile (m, n, k) of a multistage kernel; None for the warp-specialised families.
        stages: main loop pipeline depth; None lets the collective fill shared memory.
        swap_ab: compute D^T = B^T A^T, so that the wide MMA extent runs along N.
        scheduler: tile scheduler.
        fast_accum: fp8 only: keep partial sums in the tensor core. False promotes them to fp32 registers
            at intervals: more accurate, slower. Ignored (normalised to True) for int8, which is exact.
        slices: divide K among a cluster of this many blocks, which add their sums up in shared memory (Hopper's plain
            warp-specialised schedule only). K must be a multiple of 16 times it.
        splits: divide K among this many blocks (stream-K scheduler only). 0 lets the scheduler decide.
        swizzle: visit tiles in strips up to this many wide (1, 2, 4 or 8), narrower ones for small problems, so
            that neighbouring blocks share operands in L2. Multistage kernels always allow 8.
        raster: tile order.
    """

    tile: Tile
    schedule: Schedule
    cluster: tuple[int, int] = (1, 1)
    warp: Tile | None = None
    stages: int | None = None
    swap_ab: bool = False
    scheduler: Scheduler = Scheduler.PERSISTENT
    fast_accum: bool = True
    slices: int = 1
    splits: int = 1
    swizzle: int = 1
    raster: Raster = Raster.HEURISTIC

    def __post_init__(self) -> None:
        extents = (*self.tile, *self.cluster, *(self.warp or ()), self.swizzle, self.slices, self.stages or 1)
        if any(extent < 1 for extent in extents) or self.stages == 0:
            raise ConfigError(f"config {self.name!r} holds a zero or a negative number; extents start at 1")

    @property
    def blocks_per_tile(self) -> int:
        """Thread blocks that share a tile, dividing its m among them."""
        return 2 if self.schedule is Schedule.TWO_SM else 1

    @property
    def block_m(self) -> int:
        """Rows of the tile that belong to one block."""
        return self.tile[0] // self.blocks_per_tile

    @property
    def k_multiple(self) -> int:
        """What K must be a multiple of, beyond what every call asks: each slice begins at a multiple of 16 bytes."""
        return 1 if self.slices == 1 else 16 * self.slices

    @property
    def divides_k(self) -> bool:
        """Whether several blocks may work on one tile's K: then fp8 sums depend on how many."""
        return self.slices != 1 or self.splits != 1

    @property
    def compiled(self) -> KernelConfig:
        """The part that shapes the binary: launch-time choices reset to their defaults."""
        return replace(self, splits=1, swizzle=1, raster=Raster.HEURISTIC)

    @property
    def name(self) -> str:
        """The name, readable and parseable: ``128x128x128_2x1_pingpong_swap_s4``."""
        parts = ["x".join(map(str, self.tile)), "x".join(map(str, self.cluster)), self.schedule.value]
        if self.warp is not None:
            parts.append("w" + "x".join(map(str, self.warp)))
        if self.stages is not None:
            parts.append(f"s{self.stages}")
        if self.swap_ab:
            parts.append("swap")
        if self.scheduler is Scheduler.STREAM_K:
            parts.append("streamk")
        if not self.fast_accum:
            parts.append("accurate")
        if self.slices != 1:
            parts.append(f"slices{self.slices}")
        if self.splits != 1:
            parts.append(f"split{self.splits}")
        if self.swizzle != 1:
            parts.append(f"swizzle{self.swizzle}")
        if self.raster is not Raster.HEURISTIC:
            parts.append(self.raster.value)
        return "_".join(parts)

    @classmethod
    def parse(cls, text: str) -> KernelConfig:
        """The configuration that ``text``, written as by `name`, stands for.

        Tokens after the tile may come in any order and be left out; a missing schedule is an error.

        Raises:
            ConfigError: a token is not understood; the message names it and the accepted ones.
        """
        # "along_m" holds the separator; protect it while splitting.
        tokens = text.replace("along_m", "along-m").replace("along_n", "along-n").split("_")
        values: dict[str, object] = {}

        def put(field: str, value: object) -> None:
            if field in values:
                raise ConfigError(f"config {text!r} gives {field} twice")
            values[field] = value

        for token in tokens:
            if re.fullmatch(rf"{_N}x{_N}x{_N}", token):
                put("tile", tuple(map(int, token.split("x"))))
            elif re.fullmatch(rf"{_N}x{_N}", token):
                put("cluster", tuple(map(int, token.split("x"))))
            elif re.fullmatch(rf"w{_N}x{_N}x{_N}", token):
                put("warp", tuple(map(int, token[1:].split("x"))))
            elif match := re.fullmatch(rf"(s|split|slices|swizzle)({_N})", token):
                put(_NUMBERS[match[1]], int(match[2]))
            elif token in (schedule.value for schedule in Schedule):
                put("schedule", Schedule(token))
            elif token in ("along-m", "along-n"):
                put("raster", Raster(token.replace("-", "_")))
            elif token in _FLAGS:
                put(*_FLAGS[token])
            else:
                raise ConfigError(
                    f"config {text!r} has the token {token!r}; accepted are a tile MxNxK, a cluster MxN, a warp tile "
                    f"wMxNxK, a schedule ({', '.join(s.value for s in Schedule)}), s<stages>, slices<n>, split<n>, "
                    f"swizzle<n>, along_m, along_n, {', '.join(_FLAGS)}"
                )
        for required in ("tile", "schedule"):
            if required not in values:
                raise ConfigError(f"config {text!r} names no {required}; write it like 128x128x128_2x1_pingpong")
        return cls(**values)  # type: ignore[arg-type]


_NUMBERS = {"s": "stages", "split": "splits", "slices": "slices", "swizzle": "swizzle"}
_FLAGS: dict[str, tuple[str, object]] = {
    "swap": ("swap_ab", True),
    "streamk": ("scheduler", Scheduler.STREAM_K),
    "persistent": ("scheduler", Scheduler.PERSISTENT),
    "accurate": ("fast_accum", False),
}

CONFIG_FIELDS = tuple(field.name for field in fields(KernelConfig))
