#!/usr/bin/env python3
"""Look into compiled kernels: the tensor-core instructions of their machine code, registers, spills, shared memory.

    python scripts/machine_code.py --print-plan > shipped.json
    python scripts/pregenerate.py --plan shipped.json --out DIR
    python scripts/machine_code.py --cache DIR --json machine-code.json

The plan is every configuration of every table, with the least epilogue and with the most.

Needs cuobjdump and nvdisasm (of a CUDA toolkit, or the wheels nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm), no GPU.
Exits 1 if a kernel lacks the instruction that its architecture promises for its operands, or uses more shared memory
than a block may have.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.installed import require_package

require_package()

from elftools.elf.elffile import ELFFile
from rich.console import Console
from rich.table import Table

from cutlass_w8a8 import pipeline
from cutlass_w8a8.arch import ARCHS
from cutlass_w8a8.bench import machine
from cutlass_w8a8.cache.shelf import Entry
from cutlass_w8a8.cache.store import Store
from cutlass_w8a8.dispatch import rows_of
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ToolchainError, W8A8Error
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.runtime.abi import Info
from cutlass_w8a8.spec import KernelSpec, spec_from_json
from cutlass_w8a8.toolchain.discover import wheel_homes

_MMA = re.compile(r"(?:UTC[A-Z]*|[A-Z]G?)MMA(?:\.[A-Za-z0-9_]+)*")
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)([^;]*);", re.MULTILINE)
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")


@dataclass(frozen=True)
class Report:
    """What one kernel's binary holds.

    Attributes:
        name: the kernel's.
        spec: its specification, as JSON text.
        instructions: tensor-core instructions of the machine code, and how many of each there are.
        expected: how they should begin.
        registers, stack, spill_stores, spill_loads: of a thread, as ptxas reports them; the last three in bytes.
        in_mainloop: accesses to local memory in the innermost loops that hold a tensor-core instruction.
        in_tile_loop: those in any loop that holds one, once for each output tile rather than for each step along k.
        smem_bytes: shared memory of a block.
        ptx: whether PTX is embedded.
        problems: what is wrong; empty if nothing is.
    """

    name: str
    spec: str
    instructions: dict[str, int]
    expected: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    in_mainloop: int
    in_tile_loop: int
    smem_bytes: int
    ptx: bool
    problems: list[str]


def shipped() -> list[KernelSpec]:
    """Every configuration of the tables, with the smallest epilogue and the largest."""
    found = []
    for arch in ARCHS.values():
        for operand in arch.operands:
            most = "azp-token-bias_token_channel" if operand is DType.INT8 else "scaled-bias_token_channel"
            for row in rows_of(arch, operand):
                for epilogue, out in (("scaled_tensor_tensor", DType.BF16), (most, DType.FP32)):
                    found.append(KernelSpec(arch, operand, out, EpilogueSpec.parse(epilogue), row.config))
    return list(dict.fromkeys(found))


def find_cuobjdump() -> str | None:
    """cuobjdump on PATH, of the default toolkit, or of the wheel; None if there is none."""
    for path in (None, "/usr/local/cuda/bin", *(str(home / "bin") for home in wheel_homes())):
        if found := shutil.which("cuobjdump", path=path):
            return found
    return None


def disassemble(cuobjdump: str, image: bytes) -> tuple[str, bool]:
    """The machine code of a fat binary as text, and whether PTX is embedded.

    Raises:
        ToolchainError: cuobjdump fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.fatbin"
        path.write_bytes(image)

        def run(option: str) -> str:
            done = subprocess.run([cuobjdump, option, str(path)], capture_output=True, text=True, check=False)
            if done.returncode:
                said = (done.stderr or done.stdout).strip()
                raise ToolchainError(
                    f"{cuobjdump} {option} failed with status {done.returncode}: {said}; "
                    "it needs nvdisasm beside it; run: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
                )
            return done.stdout

        return run("-sass"), "PTX file" in run("-lptx")


@dataclass(frozen=True)
class Code:
    """A kernel's machine code, as far as it matters here.

    Attributes:
        multiply: tensor-core instructions by address.
        local: addresses of accesses to local memory.
        loops: first and last address of every loop: what a backward branch spans. Blocks that wait stand behind the
            kernel's end and branch back into its middle, over an exit that is not conditional; these are no loops.
    """

    multiply: dict[int, str]
    local: tuple[int, ...]
    loops: tuple[tuple[int, int], ...]

    def local_in_loops(self) -> tuple[int, int]:
        """Accesses to local memory in the innermost loops that multiply, and in all loops that do."""
        holding = [loop for loop in self.loops if any(loop[0] <= at <= loop[1] for at in self.multiply)]
        innermost = [
            outer
            for outer in holding
            if not any(inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1] for inner in holding)
        ]
        return tuple(  # type: ignore[return-value]
            sum(any(first <= at <= last for first, last in loops) for at in self.local)
            for loops in (innermost, holding)
        )


def parse(text: str) -> Code:
    """What `disassemble` printed."""
    multiply: dict[int, str] = {}
    local: list[int] = []
    loops: list[tuple[int, int]] = []
    exits: list[int] = []
    for match in _LINE.finditer(text):
        address, name = int(match[1], 16), match[3]
        if _MMA.fullmatch(name):
            multiply[address] = name
        elif name.split(".")[0] in ("STL", "LDL"):
            local.append(address)
        elif name == "EXIT" and not match[2]:
            exits.append(address)
        elif name.split(".")[0] == "BRA" and (target := _TARGET.search(match[4])):
            start = int(target[1], 16)
            if start < address and not any(start < end < address for end in exits):
                loops.append((start, address))
    return Code(multiply, tuple(local), tuple(loops))


def contents(path: Path) -> tuple[Info, bytes]:
    """The static facts and the fat binary of a kernel's library, which is not loaded.

    So it may come from a machine whose C library this one's would not serve.
    """
    with path.open("rb") as file:
        elf = ELFFile(file)
        symbols = {symbol.name: symbol["st_value"] for symbol in elf.get_section_by_name(".dynsym").iter_symbols()}

        def read(begin: int, size: int) -> bytes:
            file.seek(next(elf.address_offsets(begin, size)))
            return file.read(size)

        info = Info.from_buffer_copy(read(symbols["w8a8_info"], ctypes.sizeof(Info)))
        begin = symbols["w8a8_image"]
        return info, read(begin, symbols["w8a8_image_end"] - begin)


def look(cuobjdump: str, entry: Entry, spec: KernelSpec) -> Report:
    """The report of one cached kernel."""
    info, image = contents(entry.library)
    text, ptx = disassemble(cuobjdump, image)
    code = parse(text)
    counts = Counter(code.multiply.values())
    resources = entry.manifest["resources"]
    expected = spec.mainloop.sass
    problems = []
    if not counts or not all(name.startswith(expected) for name in counts):
        problems.append(f"{', '.join(counts) or 'no tensor-core instruction'} in the machine code, not {expected}")
    if info.smem_bytes > spec.arch.smem_bytes:
        problems.append(f"{info.smem_bytes} bytes of shared memory, {spec.arch.name} has {spec.arch.smem_bytes}")
    if ptx != spec.arch.portable:
        problems.append("PTX is embedded" if ptx else "no PTX is embedded")
    in_mainloop, in_tile_loop = code.local_in_loops()
    return Report(
        name=spec.name,
        spec=spec.to_json(),
        instructions=dict(counts),
        expected=expected,
        registers=resources["registers"],
        stack=resources["stack"],
        spill_stores=resources["spill_stores"],
        spill_loads=resources["spill_loads"],
        in_mainloop=in_mainloop,
        in_tile_loop=in_tile_loop,
        smem_bytes=info.smem_bytes,
        ptx=ptx,
        problems=problems,
    )


def entries(cache: Path) -> Iterator[tuple[Entry, KernelSpec]]:
    """The kernels of a cache directory, by name; of several builds of one, that which this version would use."""
    found: dict[str, tuple[Entry, KernelSpec]] = {}
    for entry in Store(cache).entries():
        spec = spec_from_json(entry.fields["spec"])
        if not isinstance(spec, KernelSpec):
            continue
        if spec.name not in found or entry.key == pipeline.kernel_key(spec):
            found[spec.name] = entry, spec
    for name in sorted(found):
        yield found[name]


def summarise(reports: list[Report], console: Console) -> None:
    """One line for each architecture, operand type and instruction; then what spills and what is wrong."""
    lines = Table(box=None, pad_edge=False)
    for heading in ("arch", "operands", "instructions"):
        lines.add_column(heading)
    for heading in ("kernels", "registers", "spilling"):
        lines.add_column(heading, justify="right")
    groups: dict[tuple[str, str, str], list[Report]] = {}
    for report in reports:
        spec = KernelSpec.from_json(report.spec)
        names = ", ".join(sorted(report.instructions)) or "none"
        groups.setdefault((spec.arch.name, spec.operand.value, names), []).append(report)
    for key, members in sorted(groups.items()):
        registers = [member.registers for member in members]
        spilling = sum(bool(member.spill_stores or member.spill_loads) for member in members)
        lines.add_row(*key, str(len(members)), f"{min(registers)}-{max(registers)}", str(spilling))
    console.print(lines)
    for report in reports:
        if report.spill_stores or report.spill_loads:
            console.print(
                f"spills: {report.name}: {report.spill_stores} bytes stored, {report.spill_loads} loaded; "
                f"{report.in_mainloop} accesses in the main loop, {report.in_tile_loop} for each tile",
                soft_wrap=True,
            )
    for report in reports:
        for problem in report.problems:
            console.print(f"WRONG: {report.name}: {problem}", soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, metavar="DIR", help="kernel cache")
    parser.add_argument("--print-plan", action="store_true", help="print the shipped kernels as a plan, and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all reports")
    parser.add_argument("--commit", help="recorded in the JSON")
    options = parser.parse_args()
    if options.print_plan:
        print(json.dumps([spec.to_json() for spec in shipped()], indent=1))
        return 0
    if options.cache is None:
        parser.error("--cache DIR is needed, unless --print-plan is given")
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        print(
            "machine_code: no cuobjdump; run: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm", file=sys.stderr
        )
        return 2
    try:
        with ThreadPoolExecutor() as pool:
            reports = list(pool.map(lambda pair: look(cuobjdump, *pair), entries(options.cache)))
    except (OSError, ValueError, W8A8Error) as error:
        print(f"machine_code: a kernel of {options.cache} cannot be read here: {error}", file=sys.stderr)
        return 2
    summarise(reports, Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 250))
    wrong = sum(bool(report.problems) for report in reports)
    print(f"{len(reports)} kernels, {wrong} wrong")
    if options.json:
        facts = {"machine": machine.facts(options.commit), "kernels": [asdict(report) for report in reports]}
        machine.write_json(options.json, facts)
    return 1 if wrong or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
