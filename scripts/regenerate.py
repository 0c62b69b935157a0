#!/usr/bin/env python3
"""Write generated/: what a representative set of kernels looks like, committed so that changes can be reviewed.

    python scripts/regenerate.py            # write
    python scripts/regenerate.py --check    # compare; exit status 1 and a summary if anything differs

Nothing reads these files but people and one test. Kernels are compiled from fresh text, never from here.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.installed import require_package

require_package()

from cutlass_w8a8 import emit
from cutlass_w8a8.arch import arch_named
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch import validate
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt import draw
from cutlass_w8a8.evt.arguments import arguments
from cutlass_w8a8.evt.epilogues import FORMULAS, EpilogueSpec, ScaleA, ScaleB
from cutlass_w8a8.spec import KernelSpec

GENERATED = ROOT / "generated"
# One line for each thing a template does differently.
KERNELS = (
    "sm90 e4m3 bf16 scaled_token_channel 128x128x128_2x1_pingpong",
    "sm90 e4m3 bf16 scaled_token_channel 64x16x256_ws_swap",
    "sm90 e4m3 fp16 scaled-bias_token_channel 128x256x128_2x1_cooperative",
    "sm90 e4m3 bf16 scaled_token_channel 64x128x128_2x1_pingpong_accurate",
    "sm90 e4m3 bf16 scaled_tensor_tensor 128x128x128_cooperative_streamk",
    "sm90 e4m3 fp32 scaled_tensor_channel 128x128x128_2x1_pingpong_pdl",
    "sm90 int8 bf16 azp-token-bias_token_channel 128x128x128_2x1_pingpong",
    "sm90 int8 bf16 azp_token_channel 64x64x256_pingpong_swap",
    "sm80 int8 bf16 scaled_token_channel 128x128x64_w64x64x64_multistage_s5",
    "sm80 int8 bf16 azp-token-bias_token_channel 128x128x64_w64x64x64_multistage_s5_streamk",
    "sm80 int8 fp32 azp-bias_tensor_channel 16x64x128_w16x64x64_multistage_s5",
)


def kernel(line: str) -> KernelSpec:
    """The kernel that a line of `KERNELS` stands for, checked."""
    arch, operand, out, epilogue, config = line.split()
    spec = KernelSpec(
        arch_named(arch), DType(operand), DType(out), EpilogueSpec.parse(epilogue), KernelConfig.parse(config)
    )
    validate(spec)
    return spec


def epilogues() -> str:
    """Every epilogue as people read it and as the kernels receive it."""
    parts = ["# Epilogues\n\nWritten by scripts/regenerate.py: each formula, its visitor tree and its C++ arguments.\n"]
    for name in FORMULAS:
        tree = EpilogueSpec(name, ScaleA.TOKEN, ScaleB.CHANNEL).tree(DType.INT8.accumulator, DType.BF16)
        scalars = EpilogueSpec(name, ScaleA.TENSOR, ScaleB.TENSOR).tree(DType.INT8.accumulator, DType.BF16)
        parts.append(
            f"\n## {name}\n\n```text\n{draw.text(tree)}\n```\n\n```mermaid\n{draw.mermaid(tree)}\n```\n\n"
            f"Arguments, per-token and per-channel scales:\n\n```cpp\n{arguments(tree, end=';')}\n```\n\n"
            f"Arguments, one value each:\n\n```cpp\n{arguments(scalars, end=';')}\n```\n"
        )
    return "".join(parts)


def expected() -> dict[str, str]:
    """Every file under generated/ and its text."""
    files = {"epilogues.md": epilogues()}
    for spec in map(kernel, KERNELS):
        rendered = emit.render(spec)
        files[f"{spec.arch.name}/{spec.name}.cu"] = rendered["kernel.cu"]
        files["host_prelude.h"] = rendered["host_prelude.h"]
    return files


def differences(files: dict[str, str], folder: Path = GENERATED) -> list[str]:
    """What is wrong with ``folder``, a line or a short diff for each file; empty if it is up to date."""
    found = []
    present = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    for name, text in files.items():
        path = present.pop(name, None)
        if path is None:
            found.append(f"{name}: missing")
        elif (old := path.read_text(encoding="utf-8")) != text:
            lines = list(difflib.unified_diff(old.splitlines(), text.splitlines(), "on disk", "emitted", "", "", 1, ""))
            shown = "\n    ".join(lines[2:20])
            found.append(f"{name}: {len(lines) - 2} lines of differences\n    {shown}")
    return found + [f"{name}: no longer generated" for name in present]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if anything differs")
    options = parser.parse_args()
    files = expected()
    found = differences(files)
    if options.check:
        print("\n".join(found) or f"generated/ is up to date ({len(files)} files)")
        if found:
            print("run: python scripts/regenerate.py", file=sys.stderr)
        return 1 if found else 0
    for path in [path for path in GENERATED.rglob("*") if path.is_file()]:
        if path.relative_to(GENERATED).as_posix() not in files:
            path.unlink()
    for name, text in files.items():
        path = GENERATED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{len(files)} files in {GENERATED}, {len(found)} of them changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
