#!/usr/bin/env python3
"""Have processes fight for cold kernels while one of them is killed, round after round; needs neither compiler nor GPU.

    python scripts/stress_cache.py --rounds 200

Each round, four processes of two threads want one kernel that is not in the cache, and a random one is killed by
SIGKILL at a random moment. The compilers are shell scripts. Nobody may hang, every other process must get the right
library, the compiler may run twice at most, and in the end the cache must be intact and hold nothing that was left
behind. Exits 1 otherwise. The cache is in a temporary folder, which is removed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.installed import require_package

require_package()

from cutlass_w8a8.cache import upkeep
from cutlass_w8a8.cache.location import PACKS_VARIABLE, ROOT_VARIABLE
from cutlass_w8a8.cache.store import Store
from tests import stress
from tests.fake_tools import FakeTools


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random choices; default: %(default)s")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="stress-") as folder:
        tools = FakeTools(Path(folder) / "tools")
        tools.write(device="sleep 0.05", host="sleep 0.02")
        tools.write_headers()
        os.environ |= {**tools.environment, ROOT_VARIABLE: str(Path(folder) / "cache"), PACKS_VARIABLE: "none"}
        return run(tools, Store(Path(folder) / "cache"), options.rounds, random.Random(options.seed))


def run(tools: FakeTools, store: Store, rounds: int, chance: random.Random) -> int:
    played = []
    faults = []
    for number in range(rounds):
        result = stress.play_round(tools, number, chance)
        played.append(result)
        faults += [f"round {number}: {fault}" for fault in result.faults]
    faults += [f"{broken.path}: {broken.cause}" for broken in upkeep.verify(store)]
    if (kept := len(store.entry_files())) != rounds:
        faults.append(f"{kept} entries instead of {rounds}")
    left = [str(item.path) for item in upkeep.prune(store, None)]
    rest = [str(path) for path in (*store.layout.work.iterdir(), *store.layout.users.iterdir())]
    faults += [f"not removed: {path}" for path in rest]
    if (kept := len(store.entry_files())) != rounds:
        faults.append(f"prune left {kept} entries instead of {rounds}")
    seconds = [result.seconds for result in played]
    print(
        f"{rounds} rounds, {sum(result.killed for result in played)} processes killed; "
        f"{sum(result.compiles for result in played)} compilations, at most {max(r.compiles for r in played)} a round; "
        f"{statistics.median(seconds):.2f} s a round, at most {max(seconds):.2f} s; "
        f"{len(left)} remains of killed processes removed; {len(faults)} faults"
    )
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
