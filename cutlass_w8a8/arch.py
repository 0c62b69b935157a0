"""GPU architectures: the only list of them, with every fact that the other modules derive from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import UnsupportedError

Capability = tuple[int, int]


class Family(str, Enum):
    """A collective family: one template, one visitor dialect, one set of configuration rules."""

    MULTISTAGE_2X = "2x"
    TMA_WARP_SPECIALIZED_3X = "3x"


@dataclass(frozen=True)
class Arch:
    """One architecture kernels are compiled for.

    Attributes:
        name: our name, as on the command line (``sm90``).
        capability: the compute capability (major, minor) whose devices run these kernels.
        family: the collective family that serves it.
        cutlass_tag: the C++ architecture tag.
        gencode: the value of nvcc's ``-gencode``; embeds PTX only where a newer device may run it.
        smem_bytes: shared memory one block may opt in to, in bytes.
        operands: the operand types (A and B) it multiplies.
        min_toolkit: the oldest CUDA toolkit (major, minor) that compiles these kernels.
    """

    name: str
    capability: Capability
    family: Family
    cutlass_tag: str
    gencode: str
    smem_bytes: int
    operands: tuple[DType, ...]
    min_toolkit: tuple[int, int]

    @property
    def cppgen_cc(self) -> int:
        """The compute capability to name to cutlass_cppgen, which picks the visitor dialect by it."""
        return 80 if self.family is Family.MULTISTAGE_2X else 90


SM80 = Arch(
    name="sm80",
    capability=(8, 0),
    family=Family.MULTISTAGE_2X,
    cutlass_tag="cutlass::arch::Sm80",
    gencode="arch=compute_80,code=[sm_80,compute_80]",
    smem_bytes=163 * 1024,
    operands=(DType.INT8,),
    min_toolkit=(12, 0),
)
SM90 = Arch(
    name="sm90",
    capability=(9, 0),
    family=Family.TMA_WARP_SPECIALIZED_3X,
    cutlass_tag="cutlass::arch::Sm90",
    gencode="arch=compute_90a,code=sm_90a",
    smem_bytes=227 * 1024,
    operands=(DType.E4M3, DType.INT8),
    min_toolkit=(12, 0),
)

ARCHS: dict[str, Arch] = {arch.name: arch for arch in (SM80, SM90)}


def arch_named(name: str) -> Arch:
    """The arch called ``name`` (``"sm90"``).

    Raises:
        UnsupportedError: no such arch; the message lists the known ones.
    """
    try:
        return ARCHS[name]
    except KeyError:
        raise UnsupportedError(
            f"arch {name!r} is not one cutlass_w8a8 emits kernels for; known: {', '.join(ARCHS)}"
        ) from None


def arch_for(capability: Capability) -> Arch:
    """The arch whose kernels a device of ``capability`` runs.

    Raises:
        UnsupportedError: no family serves this capability; the message lists those served.
    """
    for arch in ARCHS.values():
        if arch.capability == tuple(capability):
            return arch
    served = ", ".join(f"{a.capability[0]}.{a.capability[1]}" for a in ARCHS.values())
    raise UnsupportedError(
        f"compute capability {capability[0]}.{capability[1]} has no kernel family here; served: {served}"
    )
