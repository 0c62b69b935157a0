"""What this process did with kernels on disk, counted. A module of its own, since most processes count nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cutlass_w8a8 import forks


@dataclass
class Stats:
    """What this process did with kernels on disk, counted.

    Attributes:
        lookups: kernels looked for.
        hits: those found.
        pack_hits: those of them that were in packs.
        compiles: compilations that succeeded in this process; those of `warmup` and of the background are others'.
        compile_seconds: what these took, each by its own clock.
        reused: misses served by an object that another key had brought in.
        temporary: kernels that the cache could not take, kept until the process ends.
        evictions: kernels removed from the cache to keep it within its size.
    """

    lookups: int = 0
    hits: int = 0
    pack_hits: int = 0
    compiles: int = 0
    compile_seconds: float = 0.0
    reused: int = 0
    temporary: int = 0
    evictions: int = 0

    def add(self, **counts: float) -> None:
        """Add to counters, of any thread."""
        with forks.guard:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


stats = Stats()


def snapshot() -> Stats:
    """What this process has done with kernels on disk so far: lookups, hits, compilations, evictions; a copy."""
    with forks.guard:
        return replace(stats)
