"""GPU architectures: the only list of them, and which of them serves a device."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_w8a8.arch.ampere import SM80, SM86, SM87, SM89
from cutlass_w8a8.arch.base import Arch, Capability, Family, Mainloop, spell
from cutlass_w8a8.arch.blackwell import SM100, SM103, SM110
from cutlass_w8a8.arch.geforce import SM120, SM121
from cutlass_w8a8.arch.hopper import SM90
from cutlass_w8a8.arch.turing import SM75
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import UnsupportedError

__all__ = [
    "ARCHS",
    "SM75",
    "SM80",
    "SM86",
    "SM87",
    "SM89",
    "SM90",
    "SM100",
    "SM103",
    "SM110",
    "SM120",
    "SM121",
    "Arch",
    "Capability",
    "Family",
    "Mainloop",
    "Match",
    "arch_named",
    "match",
    "runs_on",
    "spell",
]

ARCHS: dict[str, Arch] = {
    arch.name: arch for arch in (SM75, SM80, SM86, SM87, SM89, SM90, SM100, SM103, SM110, SM120, SM121)
}

# Capabilities that no rule below judges rightly.
_DECLINED = {
    (10, 1): "the name that drivers before CUDA 13 give to Jetson Thor, whose kernels are those of 11.0; "
    "update the driver",
}


@dataclass(frozen=True)
class Match:
    """The architecture that serves a capability.

    Attributes:
        arch: the architecture.
        note: empty, or why kernels of an older architecture serve.
    """

    arch: Arch
    note: str = ""

    def notes(self, operand: DType) -> str:
        """What a user of ``operand`` should know: ``note``, and that of its main loop; empty if there is nothing.

        Raises:
            UnsupportedError: the arch does not multiply this type.
        """
        return "; ".join(filter(None, (self.note, self.arch.mainloop(operand).note)))


def arch_named(name: str) -> Arch:
    """The arch called ``name`` (``"sm90"``).

    Raises:
        UnsupportedError: no such arch; the message lists the known ones.
    """
    try:
        return ARCHS[name]
    except (KeyError, TypeError):
        raise UnsupportedError(
            f"arch {name!r} is not one cutlass_w8a8 emits kernels for; known: {', '.join(ARCHS)}"
        ) from None


def runs_on(arch: Arch, capability: Capability) -> bool:
    """Whether a device of ``capability`` can run kernels of ``arch``.

    Its own always. Others only if they are portable: machine code within a major version, PTX on anything newer. (CUDA
    C++ Programming Guide, binary and PTX compatibility.)
    """
    return arch.capability == capability or (arch.portable and arch.capability < capability)


def match(capability: Capability) -> Match:
    """The arch whose kernels a device of ``capability`` runs.

    A capability newer than any known, or between them, gets the newest portable kernels that run on it, if possible of
    its own generation, and there those that need the least shared memory, since how much it has is not known.

    Raises:
        UnsupportedError: no kernels run on it; the message says why.
    """
    for arch in ARCHS.values():
        if arch.capability == capability:
            return Match(arch)
    named = f"compute capability {spell(capability)}"
    if capability in _DECLINED:
        raise UnsupportedError(f"{named} is {_DECLINED[capability]}")
    runnable = [arch for arch in ARCHS.values() if runs_on(arch, capability)]
    if not runnable:
        raise UnsupportedError(
            f"{named} is served by no kernels: the int8 tensor-core instructions they use begin with "
            f"{spell(SM75.capability)}"
        )
    major = max(arch.capability[0] for arch in runnable)
    chosen = min(
        (arch for arch in runnable if arch.capability[0] == major),
        key=lambda arch: (arch.smem_bytes, tuple(-part for part in arch.capability)),
    )
    return Match(
        chosen,
        f"{named} is not known to this version; the portable kernels of {chosen.name} serve it, which are right but "
        "not made for it. A newer cutlass_w8a8 may have its own",
    )
