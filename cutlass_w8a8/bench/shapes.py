"""The problems that are measured."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = (  # N x K: Llama 3 8B (qkv, out, gate-up, down) and 70B (qkv, down, ...) with and without tensor parallelism
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (10240, 8192),
    (8192, 28672),
    (1280, 8192),
    (8192, 1024),
)
BATCHES = (1, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)


@dataclass(frozen=True)
class Point:
    """One problem: per-token x per-channel scales, no bias, bf16 out. Extents in elements."""

    dtype: str
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        """Type and extents, such as ``fp8 16x4096x4096``."""
        return f"{self.dtype} {self.m}x{self.n}x{self.k}"
