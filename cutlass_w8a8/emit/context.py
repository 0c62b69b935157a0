"""The values a template fills in: everything is decided here, so that templates only lay text out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from cutlass_w8a8.arch import Family
from cutlass_w8a8.config import Scheduler
from cutlass_w8a8.emit import blackwell, geforce, hopper, multistage
from cutlass_w8a8.evt import draw
from cutlass_w8a8.evt.arguments import arguments
from cutlass_w8a8.evt.cppgen import Visitor, emit_visitor
from cutlass_w8a8.evt.tree import Broadcast
from cutlass_w8a8.spec import KernelSpec

_FAMILIES = {
    Family.MULTISTAGE: multistage.values,
    Family.HOPPER: hopper.values,
    Family.BLACKWELL: blackwell.values,
    Family.GEFORCE: geforce.values,
}


def context(spec: KernelSpec) -> dict[str, Any]:
    """All names the family's template uses, from ``spec`` alone."""
    tree = spec.epilogue.tree(spec.operand.accumulator, spec.out)
    config = spec.config
    # cppgen knows two dialects of visitors and names them by capability; that of 9.0 serves all newer main loops.
    two_x = spec.family is Family.MULTISTAGE
    values: dict[str, Any] = {
        "spec": spec,
        "formula": draw.formula(tree),
        "tree": draw.text(tree).splitlines()[2:],
        "rows": _rows(spec),
        "command": spec.command("show"),
        "operand": spec.operand.cpp,
        "accumulator": spec.operand.accumulator.cpp,
        "out": spec.out.cpp,
        "arch_tag": spec.mainloop.cutlass_tag,
        "loads": tree.loads,
        "scalars": [load.name for load in tree.loads if load.broadcast is Broadcast.SCALAR],
        "tile": config.tile,
        "cluster": config.cluster,
        "slices": config.slices,
        # Whether the kernel can start ahead of the one before it.
        "overlaps": False,
        "stages": config.stages,
        "swap_ab": config.swap_ab,
        "stream_k": config.scheduler is Scheduler.STREAM_K,
        "visitor": _tidy(emit_visitor(tree, 80 if two_x else 90, config.swap_ab), two_x),
        "epilogue_arguments": arguments(tree, indent=3, end="," if two_x else ";"),
    }
    return values | _FAMILIES[spec.family](spec)


def _rows(spec: KernelSpec) -> list[tuple[str, str]]:
    config = spec.config
    return [
        ("arch", f"{spec.arch.name} ({spec.arch.gencode})"),
        ("operands", f"A and B {spec.operand.value}, accumulated in {spec.operand.accumulator.value}"),
        ("output", spec.out.value),
        ("epilogue", spec.epilogue.name),
        ("tile", "x".join(map(str, config.tile)) + (" of the transposed problem" if config.swap_ab else "")),
        ("config", config.name),
    ]


def _tidy(visitor: Visitor, two_x: bool) -> Visitor:
    """cppgen's text, less the aliases the templates define themselves and less its blank first line."""
    text = visitor.declarations
    if not two_x:
        text = re.sub(r"using (StrideD|ElementC|StrideC) = [^;]*;\n", "", text)
    return replace(visitor, declarations=text.strip())
