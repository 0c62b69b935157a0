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
from cutlass_w8a8.arch import ARCHS, Family, arch_named, spell
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch import validate
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt import draw
from cutlass_w8a8.evt.arguments import arguments
from cutlass_w8a8.evt.epilogues import FORMULAS, EpilogueSpec, ScaleA, ScaleB
from cutlass_w8a8.spec import KernelSpec, QuantSpec, Scheme

GENERATED = ROOT / "generated"
FAMILIES = {
    Family.MULTISTAGE: "multistage mma.sync",
    Family.HOPPER: "TMA, wgmma",
    Family.BLACKWELL: "TMA, tcgen05",
    Family.GEFORCE: "TMA, mma.sync",
}
# One line for each thing a template does differently.
KERNELS = (
    "sm90 e4m3 bf16 scaled_token_channel 128x128x128_2x1_pingpong",
    "sm90 e4m3 bf16 scaled_token_channel 64x16x256_ws_swap",
    "sm90 e4m3 fp16 scaled-bias_token_channel 128x256x128_2x1_cooperative",
    "sm90 e4m3 bf16 scaled_token_channel 64x128x128_2x1_pingpong_accurate",
    "sm90 e4m3 bf16 scaled_tensor_tensor 128x128x128_cooperative_streamk",
    "sm90 e4m3 fp32 scaled_tensor_channel 128x128x128_2x1_pingpong",
    "sm90 e4m3 bf16 scaled_token_channel 64x16x256_ws_swap_slices4",
    "sm90 int8 bf16 azp-token-bias_token_channel 128x128x128_2x1_pingpong",
    "sm90 int8 bf16 azp_token_channel 64x64x256_pingpong_swap",
    "sm75 int8 fp16 scaled_token_channel 128x128x64_w64x64x64_multistage_s2",
    "sm80 int8 bf16 scaled_token_channel 128x128x64_w64x64x64_multistage_s5",
    "sm80 int8 bf16 azp-token-bias_token_channel 128x128x64_w64x64x64_multistage_s5_streamk",
    "sm80 int8 fp32 azp-bias_tensor_channel 16x64x128_w16x64x64_multistage_s5",
    "sm89 e4m3 bf16 scaled-bias_token_channel 64x128x128_w32x64x128_multistage_s3",
    "sm89 e4m3 bf16 scaled_token_channel 64x64x64_w32x32x64_multistage_s5_accurate",
    "sm100 e4m3 bf16 scaled_token_channel 128x32x128_4x1_2sm_swap",
    "sm100 int8 bf16 azp-token-bias_token_channel 256x128x128_2x1_2sm",
    "sm100 e4m3 fp16 scaled-bias_token_channel 64x64x128_1sm",
    "sm103 int8 bf16 azp-token_token_channel 128x128x64_w64x64x64_multistage_s5",
    "sm120 e4m3 bf16 scaled_token_channel 16x64x128_pingpong",
    "sm120 e4m3 bf16 scaled-bias_token_channel 128x128x128_cooperative",
)
QUANTIZATIONS = (
    "sm90 bf16 e4m3 token",
    "sm90 fp32 int8 token",
    "sm80 fp16 e4m3 token",
    "sm90 bf16 int8 token-azp",
    "sm90 bf16 e4m3 tensor",
    "sm80 fp32 int8 tensor-azp",
    "sm90 fp16 e4m3 static",
    "sm90 bf16 int8 static-azp",
)


def kernel(line: str) -> KernelSpec:
    """The kernel that a line of `KERNELS` stands for, checked."""
    arch, operand, out, epilogue, config = line.split()
    spec = KernelSpec(
        arch_named(arch), DType(operand), DType(out), EpilogueSpec.parse(epilogue), KernelConfig.parse(config)
    )
    validate(spec)
    return spec


def quantization(line: str) -> QuantSpec:
    """The kernel that a line of `QUANTIZATIONS` stands for."""
    arch, source, target, scheme = line.split()
    return QuantSpec(arch_named(arch), DType(source), DType(target), Scheme(scheme))


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


def support() -> str:
    """The support matrix as a Markdown table; the README holds the same lines."""
    lines = [
        "| compute capability | name | GPUs | fp8 (e4m3) | int8 | shared memory | CUDA to compile |",
        "|---|---|---|---|---|---|---|",
    ]
    for arch in ARCHS.values():
        cells = {DType.E4M3: "no: no fp8 tensor cores", DType.INT8: ""}
        cells |= {loop.operand: f"{FAMILIES[loop.family]} ({loop.sass})" for loop in arch.mainloops}
        oldest = {operand: spell(arch.toolkit_for(operand)) for operand in arch.operands}
        alike = len(set(oldest.values())) == 1
        each = [version if alike else f"{operand.value} {version}" for operand, version in oldest.items()]
        lines.append(
            f"| {spell(arch.capability)} | {arch.name} | {arch.devices} | {cells[DType.E4M3]} | {cells[DType.INT8]} | "
            f"{arch.smem_bytes // 1024} KB | {', '.join(dict.fromkeys(each))} |"
        )
    return "\n".join(lines) + "\n"


def expected() -> dict[str, str]:
    """Every file under generated/ and its text."""
    files = {"epilogues.md": epilogues(), "support.md": support()}
    for spec in (*map(kernel, KERNELS), *map(quantization, QUANTIZATIONS)):
        rendered = emit.render(spec)
        files[f"{spec.arch.name}/{spec.name}.cu"] = rendered["kernel.cu"]
        files |= {name: text for name, text in rendered.items() if name.endswith(".h") and "/" not in name}
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
