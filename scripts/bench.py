#!/usr/bin/env python3
"""``cutlass-w8a8 bench`` from a checkout: measure ours and its peers side by side in one run, on one GPU.

    python scripts/bench.py --vllm _C_stable_libtorch.abi3.so --json bench.json
    python scripts/bench.py --configs 64x16x128_1x1_pingpong_swap,128x128x128_2x1_pingpong --json configs.json

Method and how to read the result: benchmarks/README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.installed import require_package

require_package()

from cutlass_w8a8.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
