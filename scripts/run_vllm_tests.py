#!/usr/bin/env python3
"""Run a test file of vLLM's W8A8 kernels, as vLLM publishes it, against this package's kernels.

    python scripts/run_vllm_tests.py .../tests/kernels/quantization/test_cutlass_scaled_mm.py
    python scripts/run_vllm_tests.py .../test_int8_quant.py -x -k static       # further options are pytest's
    python scripts/run_vllm_tests.py --on-cpu .../test_cutlass_scaled_mm.py -k int8_azp

    python scripts/run_vllm_tests.py --print-plan 9.0 --sm-count 132 --device "NVIDIA H200" > plan.json

The last prints the kernels that vLLM's GEMM tests use, so that ``cutlass-w8a8 build --plan plan.json`` can compile them
elsewhere. The file is read where it is; vLLM must not be installed. `tests/vllm_stub` stands in for what such a file
imports. Of kernels that this package does not have (block scales, grouped) the tests are skipped, and say so. With
``--on-cpu`` what asks for "cuda" gets the CPU and its exact evaluator; tests of CUDA itself fail there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import vllm_grid, vllm_stub
from tests.vllm_stub.platform import DeviceCapability, current_platform

MISSING = {
    "blockwise": "this package has no block-scaled kernels (cutlass_scaled_mm_supports_block_fp8 is False)",
    "group_gemm": "this package has no grouped kernels (cutlass_group_gemm_supported is False)",
}


class _Skips:
    """A pytest plugin that skips the tests of kernels that are not there."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for part, reason in MISSING.items():
                if part in item.name:
                    item.add_marker(pytest.mark.skip(reason=reason))


class _OnCpu(TorchFunctionMode):
    """Has "cuda" mean the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(each, str) and each.startswith("cuda") else each for each in args)
        return func(*args, **kwargs)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on-cpu", action="store_true", help="run on the CPU what asks for CUDA")
    parser.add_argument("--print-plan", metavar="CAPABILITY", help="print the kernels for such a GPU, and end")
    parser.add_argument("--sm-count", type=int, metavar="N", help="with --print-plan: its multiprocessors")
    parser.add_argument("--device", metavar="NAME", help="with --print-plan: its name, for a tuned table")
    parser.add_argument("file", type=Path, nargs="?", help="the test file")
    options, rest = parser.parse_known_args(words)
    if options.print_plan:
        major, minor = map(int, options.print_plan.split("."))
        print(json.dumps(vllm_grid.plan((major, minor), options.sm_count, options.device), indent=0))
        return 0
    if options.file is None or not options.file.is_file():
        parser.error(f"{options.file} is not a file; pass one of vLLM's tests/kernels/quantization/test_*.py")
    vllm_stub.install()
    # Nothing of this repository's pytest configuration, and nothing written beside the file.
    sys.dont_write_bytecode = True
    arguments = [str(options.file), "-c", os.devnull, "--rootdir", str(options.file.parent), "--import-mode=importlib"]
    arguments += ["-p", "no:cacheprovider", "-rs", *rest]
    if not options.on_cpu:
        return int(pytest.main(arguments, plugins=[_Skips()]))
    current_platform.pretended = DeviceCapability(9, 0)
    with _OnCpu():
        return int(pytest.main(arguments, plugins=[_Skips()]))


if __name__ == "__main__":
    torch.manual_seed(0)
    raise SystemExit(main(sys.argv[1:]))
