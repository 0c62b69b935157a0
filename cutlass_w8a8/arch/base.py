"""What there is to know about an architecture, and the families of main loops that CUTLASS has for them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import UnsupportedError

Capability = tuple[int, int]
Toolkit = tuple[int, int]


class Family(str, Enum):
    """A family of main loops: one set of configuration rules, one way to write the kernel."""

    MULTISTAGE = "multistage"
    HOPPER = "hopper"
    BLACKWELL = "blackwell"
    GEFORCE = "geforce"


# The first capability whose tensor cores multiply the type.
_FIRST = {DType.INT8: (7, 5), DType.E4M3: (8, 9)}
_REMEDY = {DType.INT8: "", DType.E4M3: "; quantise to int8 instead"}


@dataclass(frozen=True)
class Mainloop:
    """How one operand type is multiplied on an architecture.

    Attributes:
        operand: type of A and B.
        family: the family of main loops.
        cutlass_tag: the C++ architecture tag that selects the instruction.
        sass: how the machine code's tensor-core instruction begins.
        instruction: its extents (m, n, k), where they are a template argument.
        min_toolkit: the oldest CUDA toolkit (major, minor) that has the instruction.
        note: what a user should know of it.
    """

    operand: DType
    family: Family
    cutlass_tag: str
    sass: str
    instruction: tuple[int, int, int] | None = None
    min_toolkit: Toolkit = (12, 0)
    note: str = ""


@dataclass(frozen=True)
class Arch:
    """One architecture kernels are compiled for.

    Attributes:
        name: our name, as on the command line (``sm90``).
        capability: the compute capability (major, minor) whose devices run these kernels.
        devices: what it is sold as.
        target: nvcc's name of the target, without its prefix: ``80``, or ``90a`` where the kernels use
            instructions of this very chip.
        smem_bytes: shared memory one block may opt in to, in bytes (CUDA C++ Programming Guide, table of technical
            specifications: the maximum of a block).
        mainloops: one for each operand type it multiplies.
        min_toolkit: the oldest CUDA toolkit (major, minor) that knows the target.
    """

    name: str
    capability: Capability
    devices: str
    target: str
    smem_bytes: int
    mainloops: tuple[Mainloop, ...]
    min_toolkit: Toolkit = (12, 0)

    @property
    def portable(self) -> bool:
        """Whether newer devices run these kernels too: the binary then holds PTX, which their driver compiles."""
        return self.target.isdecimal()

    @property
    def gencode(self) -> str:
        """The value of nvcc's ``-gencode``."""
        machine_code = f"sm_{self.target}"
        code = f"[{machine_code},compute_{self.target}]" if self.portable else machine_code
        return f"arch=compute_{self.target},code={code}"

    @property
    def operands(self) -> tuple[DType, ...]:
        """The operand types it multiplies."""
        return tuple(mainloop.operand for mainloop in self.mainloops)

    def mainloop(self, operand: DType) -> Mainloop:
        """How ``operand`` is multiplied.

        Raises:
            UnsupportedError: not at all; the message says since when there is hardware for it.
        """
        for mainloop in self.mainloops:
            if mainloop.operand is operand:
                return mainloop
        raise UnsupportedError(
            f"{self.name} has no {operand.value} tensor cores, which begin with compute capability "
            f"{spell(_FIRST[operand])}{_REMEDY[operand]}"
        )

    def toolkit_for(self, operand: DType) -> Toolkit:
        """The oldest CUDA toolkit (major, minor) that compiles kernels for ``operand``."""
        return max(self.min_toolkit, self.mainloop(operand).min_toolkit)


def spell(version: tuple[int, ...]) -> str:
    """``(9, 0)`` as ``9.0``."""
    return ".".join(map(str, version))


KB = 1024
