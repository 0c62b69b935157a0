#!/usr/bin/env python3
"""Prove on a GPU that the kernels are right: bits, bounds, writes, graphs, streams, threads, torch.compile.

The section ``quantize`` also measures: bandwidth against a copy's, and latency.

    python scripts/prove.py --cache DIR --plan kernels.json --no-compile --json proof.json

Without a plan every combination runs with the configuration that dispatch picks. Exits 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = (
    "correctness",
    "portable",
    "graph",
    "compile",
    "arguments",
    "quantize",
    "overlap",
    "encoder",
    "sanitizer",
    "devices",
    "host",
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, metavar="DIR", help="kernel cache (sets CUTLASS_W8A8_CACHE_DIR)")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="JSON list of kernel specifications to force")
    parser.add_argument("--no-dispatch", action="store_true", help="with --plan: only the forced configurations")
    parser.add_argument("--no-compile", action="store_true", help="a kernel missing from the cache is a failure")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"comma-separated, of {', '.join(SECTIONS)}")
    parser.add_argument("--shapes", type=int, metavar="N", help="only every n-th shape, so that about N remain")
    parser.add_argument("--model", choices=("check", "report", "off"), default="check", help="fp8 hardware model")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="for the encoder section; else it downloads")
    parser.add_argument("--quick-sanitizer", action="store_true", help="odd shapes only, to run under a sanitizer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything found")
    parser.add_argument("--commit", help="recorded in the JSON")
    parser.add_argument(
        "--print-portable", action="store_true", help="print the kernels of the portable section as a plan, and end"
    )
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.sections = options.sections.split(",")
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"--sections: {', '.join(sorted(unknown))} not among {', '.join(SECTIONS)}")
    return options


OPTIONS = parse() if __name__ == "__main__" else argparse.Namespace(cache=None, no_compile=False)
sys.path.insert(0, str(ROOT))

from scripts.installed import require_package, set_cache

set_cache(OPTIONS.cache, OPTIONS.no_compile)
require_package()

import torch

from cutlass_w8a8.bench import machine
from tests import cases, family_checks, gpu_checks, grid, overlap_checks, quant_checks
from tests.harness import Check, Plan, call, dispatch_plan, load_plan


def correctness(plan: Plan, options: argparse.Namespace) -> list[Check]:
    shapes = cases.shapes()
    if options.shapes:
        shapes = shapes[:: max(1, len(shapes) // options.shapes)]
    judged = family_checks.judged(options.device)
    if options.model == "off":
        judged["with_model"] = False
    checks = grid.Grid(plan, options.device, **judged).run(shapes)
    for check in checks:
        if check.name == grid.MODEL_CHECK and options.model == "report":
            check.details |= {"calls that differ": check.failed, "calls that agree": check.passed}
            check.passed += check.failed
            check.failed = 0
    return checks + grid.row_invariance(plan, options.device)


def portable(_: Plan, options: argparse.Namespace) -> list[Check]:
    return family_checks.run(options.device)


def graph(plan: Plan, _: argparse.Namespace) -> list[Check]:
    return gpu_checks.graph(plan) + gpu_checks.streams(plan) + gpu_checks.threads(plan)


def compiled(plan: Plan, options: argparse.Namespace) -> list[Check]:
    return gpu_checks.compiled(plan, options.device) + gpu_checks.opcheck(plan, options.device)


def arguments(plan: Plan, options: argparse.Namespace) -> list[Check]:
    return gpu_checks.arguments(plan, options.device)


def quantize(_: Plan, options: argparse.Namespace) -> list[Check]:
    return quant_checks.run(options.device)


def overlap(_: Plan, options: argparse.Namespace) -> list[Check]:
    return overlap_checks.chains(options.device)


def encoder(_: Plan, options: argparse.Namespace) -> list[Check]:
    """The example encoder on this device: its quantised embeddings stay close to fp32."""
    check = Check("encoder", "sentence embeddings against fp32")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "encoder.json"
        command = [sys.executable, "-m", "examples.encoder", "--device", options.device, "--json", str(report)]
        if options.checkpoint:
            command += ["--checkpoint", str(options.checkpoint.resolve())]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        check.details["report"] = report.read_text() if report.exists() else ""
    check.details["output"] = run.stdout[-4000:]
    check.record(run.returncode == 0, f"exit status {run.returncode}: {run.stderr[-1500:]}")
    return [check]


def sanitizer(_: Plan, options: argparse.Namespace) -> list[Check]:
    """This script's quick mode under compute-sanitizer's memcheck."""
    check = Check("sanitizer", "compute-sanitizer memcheck")
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        check.record(False, "compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin")
        return [check]
    # cuda-python asks the driver for functions of newer versions; that those calls fail is no memory error.
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    command += [sys.executable, __file__, "--quick-sanitizer"]
    if options.plan:
        command += ["--plan", str(options.plan)] + (["--no-dispatch"] if options.no_dispatch else [])
    # Freed blocks kept by torch's allocator hide accesses beyond an allocation.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    check.details["output"] = (run.stdout + run.stderr)[-4000:]
    clean = "ERROR SUMMARY: 0 errors" in run.stdout + run.stderr
    check.record(run.returncode == 0 and clean, f"exit status {run.returncode}: {run.stdout[-1500:]}")
    return [check]


def devices(plan: Plan, _: argparse.Namespace) -> list[Check]:
    return gpu_checks.devices(plan)


def host(plan: Plan, options: argparse.Namespace) -> list[Check]:
    """Host time of an eager call, in microseconds: reported, not judged."""
    check = Check("host", "host time per call, M=16 N=K=4096")
    for combination, config in gpu_checks.representatives(plan):
        inputs = cases.make_inputs((16, 4096, 4096), combination.operand_dtype, device=options.device)
        epilogue = cases.make_epilogue(combination, inputs, form=0)
        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            # Few enough that the launch queue never fills and makes the host wait for the device.
            for _ in range(400):
                call(combination, inputs, epilogue, config=config)
            times.append((time.perf_counter() - start) / 400 * 1e6)
        check.details[combination.name] = round(sorted(times)[3], 2)
        check.record(True)
    return [check]


RUNNERS: dict[str, Callable[[Plan, argparse.Namespace], list[Check]]] = {
    "correctness": correctness,
    "portable": portable,
    "graph": graph,
    "compile": compiled,
    "arguments": arguments,
    "quantize": quantize,
    "overlap": overlap,
    "encoder": encoder,
    "sanitizer": sanitizer,
    "devices": devices,
    "host": host,
}


def quick(plan: Plan, options: argparse.Namespace) -> list[Check]:
    """Every combination of the plan on a few odd shapes; nothing that a sanitizer would make take minutes."""
    judged = family_checks.judged(options.device) | {"with_model": False}
    found = grid.Grid(plan, options.device, **judged).run(cases.SMALL_SHAPES[::2])
    found += quant_checks.correctness(options.device, limit=1 << 16, step=7)
    return found + quant_checks.ways(options.device, limit=1 << 16, step=7)


def summarise(checks: list[Check], seconds: dict[str, float]) -> None:
    combinations = {c.name for c in cases.combinations()}
    rows = [c for c in checks if c.name not in combinations]
    for operand in ("e4m3", "int8"):
        of_operand = [c for c in checks if c.name in combinations and c.name.startswith(operand)]
        if of_operand:
            total = Check("correctness", f"{operand}: {len(of_operand)} combinations against the reference")
            total.passed, total.failed = (sum(getattr(c, x) for c in of_operand) for x in ("passed", "failed"))
            ratios = [float(c.details.get("largest error / bound", 0)) for c in of_operand]
            if operand == "e4m3":
                total.details["largest error / bound"] = max(ratios)
            rows.insert(0, total)
    for row in rows:
        notes = ", ".join(f"{k} {v:.4g}" for k, v in row.details.items() if not isinstance(v, str))
        print(f"{row.section:12} {row.name:52} {row.passed:7} passed {row.failed:5} failed  {notes}")
    for check in checks:
        for failure in check.failures[:3]:
            print(f"FAILED {check.section}: {failure}")
    print(", ".join(f"{name} {value:.0f} s" for name, value in seconds.items()))


def main(options: argparse.Namespace) -> int:
    if options.print_portable:
        print(json.dumps([spec.to_json() for arch in family_checks.portable() for spec in family_checks.specs(arch)]))
        return 0
    plan = load_plan(options.plan, not options.no_dispatch) if options.plan else dispatch_plan()
    runners = {"correctness": quick} if options.quick_sanitizer else {s: RUNNERS[s] for s in options.sections}
    checks: list[Check] = []
    seconds: dict[str, float] = {}
    for section, runner in runners.items():
        start = time.perf_counter()
        try:
            checks += runner(plan, options)
        except Exception as error:  # one broken section must not hide the others
            failed = Check(section, "the section ran")
            failed.record(False, f"{type(error).__name__}: {error}")
            checks.append(failed)
        seconds[section] = time.perf_counter() - start
    passed, failed_count = sum(c.passed for c in checks), sum(c.failed for c in checks)
    summarise(checks, seconds)
    if options.json:
        machine.write_json(
            options.json,
            {
                "machine": machine.facts(options.commit),
                "environment": {k: v for k, v in os.environ.items() if k.startswith("CUTLASS_W8A8_")},
                "shapes": len(cases.shapes()),
                "plan": {c.name: [config or "dispatch" for config in configs] for c, configs in plan.items()},
                "seconds": seconds,
                "passed": passed,
                "failed": failed_count,
                "checks": [c.as_json() for c in checks],
            },
        )
    print(f"{passed} passed, {failed_count} failed")
    return 1 if failed_count or not passed else 0


if __name__ == "__main__":
    sys.exit(main(OPTIONS))
