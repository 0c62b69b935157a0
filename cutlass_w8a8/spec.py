"""Kernel specifications: everything that determines one kernel's source, and nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from cutlass_w8a8.arch import Arch, Family, Mainloop, arch_named
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt.epilogues import EpilogueSpec


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: D[m, n] = epilogue(A[m, k] @ B[k, n]).

    Attributes:
        arch: the architecture it is compiled for.
        operand: element type of A and of B.
        out: element type of D (and of the bias).
        epilogue: which formula, and which of its operands are scalars or vectors.
        config: tiling and schedule. Launch-time choices are dropped: they do not change the binary.
    """

    arch: Arch
    operand: DType
    out: DType
    epilogue: EpilogueSpec
    config: KernelConfig

    def __post_init__(self) -> None:
        config = self.config.compiled
        if self.operand is DType.INT8:
            config = replace(config, fast_accum=True)
        object.__setattr__(self, "config", config)

    @property
    def mainloop(self) -> Mainloop:
        """How the operands are multiplied.

        Raises:
            UnsupportedError: the arch does not multiply them.
        """
        return self.arch.mainloop(self.operand)

    @property
    def family(self) -> Family:
        """The family of the main loop."""
        return self.mainloop.family

    @property
    def name(self) -> str:
        """A readable, unique name, fit for a file."""
        return f"{self.arch.name}_{self.operand.value}_{self.out.value}_{self.epilogue.name}_{self.config.name}"

    def command(self, verb: str) -> str:
        """The command line that applies ``verb`` (``show`` or ``build``) to this kernel."""
        return (
            f"cutlass-w8a8 {verb} --arch {self.arch.name} --a-dtype {self.operand.value} "
            f"--out-dtype {self.out.value} --epilogue {self.epilogue.name} --config {self.config.name}"
        )

    def to_json(self) -> str:
        """Canonical JSON: equal specs, equal text, in every process and release with the same schema."""
        return json.dumps(
            {
                "arch": self.arch.name,
                "operand": self.operand.value,
                "out": self.out.value,
                "epilogue": self.epilogue.name,
                "config": self.config.name,
            },
            sort_keys=True,
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> KernelSpec:
        """The spec that `to_json` wrote."""
        fields = json.loads(text)
        return cls(
            arch=arch_named(fields["arch"]),
            operand=DType(fields["operand"]),
            out=DType(fields["out"]),
            epilogue=EpilogueSpec.parse(fields["epilogue"]),
            config=KernelConfig.parse(fields["config"]),
        )
