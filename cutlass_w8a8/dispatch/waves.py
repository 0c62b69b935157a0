"""What a Hopper kernel takes by a few rates of its device, for configurations and problems that nobody has measured."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cutlass_w8a8.config import KernelConfig, Schedule
from cutlass_w8a8.dispatch.table import blocks, traffic

# Multiprocessors that a cluster can lie in: those of one GPC, of which some have two more.
GPC = 16


def resident(cluster: int, sms: int) -> int:
    """How many blocks run at once on ``sms`` multiprocessors, one on each, in clusters of ``cluster`` blocks.

    A cluster needs multiprocessors of one GPC. Pairs leave none over; of clusters of four, an H200's 132 hold 32: the
    33rd of 33 ran in a second wave.
    """
    usable = sms if cluster <= 2 or sms < GPC else sms // GPC * GPC
    return max(cluster, usable // cluster * cluster)


@dataclass(frozen=True)
class Waves:
    """How long a Hopper kernel takes in clocks, by what its device can do.

    A block multiplies its tile, or takes its operands in, whichever takes longer; a wave of blocks also fills its
    pipelines and stores, which pingpong hides behind the next tile. Meanwhile the operands come from memory, with a
    bandwidth that few blocks cannot draw. The rates are fitted to an H200's times (benchmarks/README.md); near the best
    they are off by 7 %.

    Attributes:
        sms: multiprocessors.
        tb_per_s: memory bandwidth as the data sheet gives it, in TB/s.
    """

    sms: int = 132
    tb_per_s: float = 4.8

    MACS = 3500
    INGEST_BYTES = 74
    WAVE_CLOCKS = 3450
    # The part of it that pingpong does not hide from the second tile on.
    PINGPONG = 0.18
    DRAM_BYTES_PER_TB_S = 465
    UNHIDDEN = 0.15
    LAUNCH_CLOCKS = 3750
    # Below this n wgmma waits for the 64 rows of its other operand.
    NARROWEST = 32

    def time(self, config: KernelConfig, m: int, n: int, k: int) -> float:
        """The clocks that an m x n x k problem takes."""
        rows, columns, block_k = config.block_m, config.tile[1], k / config.slices
        count = blocks(config, m, n)
        cluster = prod(config.cluster) * config.slices
        waves = -(-count // resident(cluster, self.sms))
        multiply = rows * max(columns, self.NARROWEST) * block_k / self.MACS
        # Rows that a tile has and the problem has not are not loaded.
        of_rows, of_columns = (n, m) if config.swap_ab else (m, n)
        ingest = (min(rows, of_rows) + min(columns, of_columns)) * block_k / self.INGEST_BYTES
        # The sums of a tile's slices travel between them as float32.
        exchange = rows * columns * 4 / self.INGEST_BYTES if config.slices > 1 else 0.0
        later = self.PINGPONG if config.schedule is Schedule.PINGPONG else 1.0
        work = waves * (max(multiply, ingest) + exchange) + (1 + (waves - 1) * later) * self.WAVE_CLOCKS
        bandwidth = self.tb_per_s * self.DRAM_BYTES_PER_TB_S
        memory = traffic(m, n, k) / min(bandwidth, count * self.INGEST_BYTES)
        return max(work, memory) + self.UNHIDDEN * min(work, memory) + self.LAUNCH_CLOCKS
