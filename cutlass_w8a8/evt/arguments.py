"""The C++ arguments of an epilogue: the same tree, written as the nested aggregate CUTLASS expects."""

from __future__ import annotations

from cutlass_w8a8.evt.tree import Accum, Broadcast, Compute, Expr, Load, Tree

INDENT = "  "


def arguments(tree: Tree, indent: int = 0, end: str = "") -> str:
    """The brace-enclosed initialiser of the visitor tree's ``Arguments``.

    Each node lists its children first and its own arguments last, in formula order; operand pointers are
    the local variables named like the operands. The text serves the 2.x and the 3.x visitors alike.
    ``end`` closes it: ``;`` or ``,``.
    """
    lines = _lines(tree.root)
    lines[-1] = _before_comment(lines[-1], end)
    return "\n".join(INDENT * indent + line for line in lines)


def _lines(node: Expr) -> list[str]:
    if isinstance(node, Accum):
        return ["{}  // accumulator"]
    if isinstance(node, Load):
        if node.broadcast is Broadcast.SCALAR:
            return ["{{" + f"{node.element.cpp}(0)" + "}, {" + node.name + "}, {}}" + f"  // {node.name}: one value"]
        per = "n" if node.broadcast is Broadcast.ROW else "m"
        return [f"{{{node.name}, {node.element.cpp}(0), {{}}}}  // {node.name}[{per}]"]
    lines = ["{"]
    for child in node.children:
        child_lines = _lines(child)
        lines += [INDENT + line for line in child_lines[:-1]]
        lines.append(INDENT + _before_comment(child_lines[-1], ","))
    lines.append(INDENT + "{}")
    lines.append("}  // " + node.label if isinstance(node, Compute) else "}")
    return lines


def _before_comment(line: str, mark: str) -> str:
    code, separator, comment = line.partition("  // ")
    return code + mark + separator + comment
