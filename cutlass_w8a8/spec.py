"""Kernel specifications: everything that determines one kernel's source, and nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Protocol

from cutlass_w8a8.arch import Arch, Family, Mainloop, arch_named
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dtypes import OPERAND_DTYPES, OUTPUT_DTYPES, DType
from cutlass_w8a8.errors import UnsupportedError
from cutlass_w8a8.evt import draw
from cutlass_w8a8.evt.epilogues import EpilogueSpec

QUANTIZE = "quantize"
# Entry points of a quantisation kernel that hold a row in registers: as many 16-byte vectors a thread.
QUANT_HELD = (1, 2, 4, 8)
QUANT_MAX_THREADS = 1024
# The largest magnitude of a quantised row, and the least scale, as a float32: for int8 the least normal one, whose
# reciprocal is finite; for e4m3 that of other implementations.
QUANT_LARGEST = {DType.E4M3: 448.0, DType.INT8: 127.0}
QUANT_FLOOR = {DType.E4M3: float.fromhex("0x1.24924ap-18"), DType.INT8: 2.0**-126}


class Spec(Protocol):
    """What emitting, compiling and caching need to know of any kernel's specification."""

    @property
    def arch(self) -> Arch:
        """The architecture it is compiled for."""

    @property
    def name(self) -> str:
        """A readable, unique name, fit for a file."""

    @property
    def formula(self) -> str:
        """What it computes, as text."""

    @property
    def multiplies(self) -> DType | None:
        """The operand type of its tensor-core instructions; None if it has none."""

    def command(self, verb: str) -> str:
        """The command line that applies ``verb`` (``show`` or ``build``) to this kernel."""

    def to_json(self) -> str:
        """Canonical JSON: equal specs, equal text, in every process and release with the same schema."""


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

    @property
    def formula(self) -> str:
        """The epilogue's formula."""
        return draw.formula(self.epilogue.tree(self.operand.accumulator, self.out))

    @property
    def multiplies(self) -> DType:
        """The operand type of its tensor-core instructions."""
        return self.operand

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


@dataclass(frozen=True)
class QuantSpec:
    """The kernel that quantises the rows of a matrix, each by a scale of its own. One serves every shape.

    Attributes:
        arch: the architecture it is compiled for. It need not multiply ``target``.
        source: element type of the input: bf16, fp16 or fp32.
        target: element type of the result: e4m3 or int8.

    Raises:
        UnsupportedError: ``source`` or ``target`` is another type.
    """

    arch: Arch
    source: DType
    target: DType

    def __post_init__(self) -> None:
        for what, dtype, accepted in (
            ("quantise from", self.source, OUTPUT_DTYPES),
            ("quantise to", self.target, OPERAND_DTYPES),
        ):
            if dtype not in accepted:
                names = ", ".join(x.value for x in accepted)
                raise UnsupportedError(f"no kernels {what} {dtype.value}; accepted: {names}; convert with .to()")

    @property
    def name(self) -> str:
        """A readable, unique name, fit for a file."""
        return f"{self.arch.name}_{QUANTIZE}_{self.source.value}_{self.target.value}"

    @property
    def formula(self) -> str:
        """What a row becomes."""
        if self.target is DType.E4M3:
            return "scale[m] = max(max|x[m,:]| / 448, 1 / (448 * 512)); q[m,k] = e4m3(x[m,k] * (1 / scale[m]))"
        return "scale[m] = max(max|x[m,:]| / 127, 2^-126); q[m,k] = int8(rint(x[m,k] * (1 / scale[m])))"

    @property
    def multiplies(self) -> None:
        """It uses no tensor cores."""
        return

    def command(self, verb: str) -> str:
        """The command line that applies ``verb`` (``show`` or ``build``) to this kernel."""
        return (
            f"cutlass-w8a8 {verb} --arch {self.arch.name} --a-dtype {self.target.value} --quantize {self.source.value}"
        )

    def to_json(self) -> str:
        """Canonical JSON: equal specs, equal text, in every process and release with the same schema."""
        return json.dumps(
            {
                "kernel": QUANTIZE,
                "arch": self.arch.name,
                "source": self.source.value,
                "target": self.target.value,
            },
            sort_keys=True,
            separators=(",", ":"),
        )


def spec_from_json(text: str) -> KernelSpec | QuantSpec:
    """The spec that ``to_json`` wrote; its field ``kernel`` says of which kind, and a GEMM has none.

    Raises:
        KeyError, TypeError, ValueError: the text is not such JSON.
    """
    fields = json.loads(text)
    kind = fields.get("kernel") if isinstance(fields, dict) else None
    if kind is None:
        return KernelSpec.from_json(text)
    if kind != QUANTIZE:
        raise ValueError(f"kernel is {kind!r}; accepted: {QUANTIZE!r}, or no such field for a GEMM")
    return QuantSpec(arch_named(fields["arch"]), DType(fields["source"]), DType(fields["target"]))
