"""Kernel specifications: everything that determines one kernel's source, and nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum
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
# Vectors that a thread has on their way at once while a tensor's scale is looked for.
QUANT_SCAN_VECTORS = 4
# The largest magnitude of a quantised row, and the least scale, as a float32: for int8 the least normal one, whose
# reciprocal is finite; for e4m3 that of other implementations.
QUANT_LARGEST = {DType.E4M3: 448.0, DType.INT8: 127.0}
QUANT_FLOOR = {DType.E4M3: float.fromhex("0x1.24924ap-18"), DType.INT8: 2.0**-126}
# Steps between the least code and the greatest where there is a zero point.
QUANT_RANGE = 255.0


class Scheme(str, Enum):
    """What shares a scale, where that comes from, and whether a zero point goes with it (``azp``, int8 only).

    ``token``: a row's own; ``tensor``: the whole tensor's own; ``static``: one that the caller gives for the tensor.
    """

    TOKEN = "token"
    TOKEN_AZP = "token-azp"
    TENSOR = "tensor"
    TENSOR_AZP = "tensor-azp"
    STATIC = "static"
    STATIC_AZP = "static-azp"

    @property
    def azp(self) -> bool:
        """Whether there is a zero point."""
        return self in (Scheme.TOKEN_AZP, Scheme.TENSOR_AZP, Scheme.STATIC_AZP)

    @property
    def static(self) -> bool:
        """Whether scale and zero point are given."""
        return self in (Scheme.STATIC, Scheme.STATIC_AZP)

    @property
    def whole(self) -> bool:
        """Whether all elements share a scale."""
        return self not in (Scheme.TOKEN, Scheme.TOKEN_AZP)

    @property
    def scans(self) -> bool:
        """Whether the scale depends on elements of all rows."""
        return self in (Scheme.TENSOR, Scheme.TENSOR_AZP)

    @property
    def targets(self) -> tuple[DType, ...]:
        """Types that it quantises to."""
        return (DType.INT8,) if self.azp else OPERAND_DTYPES


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
    """The kernel that quantises a matrix in one way. One serves every shape.

    Attributes:
        arch: the architecture it is compiled for. It need not multiply ``target``.
        source: element type of the input: bf16, fp16 or fp32.
        target: element type of the result: e4m3 or int8.
        scheme: what shares a scale, and where that comes from.

    Raises:
        UnsupportedError: ``source`` or ``target`` is another type, or ``scheme`` has zero points and ``target`` none.
    """

    arch: Arch
    source: DType
    target: DType
    scheme: Scheme = Scheme.TOKEN

    def __post_init__(self) -> None:
        for what, dtype, accepted in (
            ("quantise from", self.source, OUTPUT_DTYPES),
            ("quantise to", self.target, OPERAND_DTYPES),
        ):
            if dtype not in accepted:
                names = ", ".join(x.value for x in accepted)
                raise UnsupportedError(f"no kernels {what} {dtype.value}; accepted: {names}; convert with .to()")
        if self.target not in self.scheme.targets:
            raise UnsupportedError(
                f"{self.scheme.value} quantises to int8 only, not to {self.target.value}, which has no zero points; "
                f"leave out the zero point: {self.scheme.value.removesuffix('-azp')}"
            )

    @property
    def name(self) -> str:
        """A readable, unique name, fit for a file."""
        own = "" if self.scheme is Scheme.TOKEN else f"_{self.scheme.value}"
        return f"{self.arch.name}_{QUANTIZE}_{self.source.value}_{self.target.value}{own}"

    @property
    def formula(self) -> str:
        """What a matrix becomes."""
        e4m3 = self.target is DType.E4M3
        scope, one = ("", "") if self.scheme.whole else ("m,:", "[m]")
        scaled = f"x[m,k] * (1 / scale{one})"
        if self.scheme.azp:
            code = f"q[m,k] = int8(rint({scaled}) + azp{one})"
        else:
            code = f"q[m,k] = e4m3({scaled})" if e4m3 else f"q[m,k] = int8(rint({scaled}))"
        if self.scheme.static:
            return code
        of = f"x[{scope}]" if scope else "x"
        if not self.scheme.azp:
            largest, floor = ("448", "1 / (448 * 512)") if e4m3 else ("127", "2^-126")
            return f"scale{one} = max(max|{of}| / {largest}, {floor}); {code}"
        return (
            f"low, high = min(0, {of}), max(0, {of}); scale{one} = max((high - low) / 255, 2^-126); "
            f"azp{one} = rint(-128 - low / scale{one}); {code}"
        )

    @property
    def multiplies(self) -> None:
        """It uses no tensor cores."""
        return

    def command(self, verb: str) -> str:
        """The command line that applies ``verb`` (``show`` or ``build``) to this kernel."""
        own = "" if self.scheme is Scheme.TOKEN else f" --scheme {self.scheme.value}"
        return (
            f"cutlass-w8a8 {verb} --arch {self.arch.name} --a-dtype {self.target.value} "
            f"--quantize {self.source.value}{own}"
        )

    def to_json(self) -> str:
        """Canonical JSON: equal specs, equal text, in every process and release with the same schema."""
        fields = {
            "kernel": QUANTIZE,
            "arch": self.arch.name,
            "source": self.source.value,
            "target": self.target.value,
        }
        if self.scheme is not Scheme.TOKEN:
            fields["scheme"] = self.scheme.value
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))


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
    scheme = Scheme(fields.get("scheme", Scheme.TOKEN))
    return QuantSpec(arch_named(fields["arch"]), DType(fields["source"]), DType(fields["target"]), scheme)
