"""Drawings of an epilogue tree for people: indented text, and Mermaid for documents."""

from __future__ import annotations

from cutlass_w8a8.evt.tree import Accum, Broadcast, Compute, Expr, Load, Tree

_EXTENT = {Broadcast.SCALAR: "", Broadcast.ROW: "[n]", Broadcast.COLUMN: "[m]"}
_SYMBOL = {"add": "+", "sub": "-", "mul": "*", "fma": "fma", "max": "max"}


def formula(tree: Tree) -> str:
    """The formula on one line, operands marked with the index they vary along."""
    root = _infix(tree.root)
    return f"D[m,n] = {tree.out.value}{root if root.startswith('(') else f'({root})'}"


def text(tree: Tree) -> str:
    """The tree, one node a line, children below their parent."""
    lines = [formula(tree), "", f"store D[m,n] as {tree.out.value}"]
    _grow(tree.root, "", True, lines)
    return "\n".join(lines)


def mermaid(tree: Tree) -> str:
    """The tree as a Mermaid flowchart, operands at the top."""
    nodes = list(tree.postorder())
    lines = ["flowchart TD"]
    for index, node in enumerate(nodes):
        lines.append(f'  n{index}["{_label(node)}"]')
        lines += [f"  n{nodes.index(child)} --> n{index}" for child in node.children]
    lines += [f'  out["D[m,n]: {tree.out.value}"]', f"  n{len(nodes) - 1} --> out"]
    return "\n".join(lines)


def _label(node: Expr) -> str:
    if isinstance(node, Accum):
        return f"acc[m,n]: {node.dtype.value}"
    if isinstance(node, Load):
        return f"{node.name}{_EXTENT[node.broadcast]}: {node.dtype.value}"
    if isinstance(node, Compute):
        return f"{_SYMBOL[node.op.value]}: {node.dtype.value}"
    raise TypeError(f"unknown node {node!r}")


def _infix(node: Expr) -> str:
    if isinstance(node, Accum):
        return "acc[m,n]"
    if isinstance(node, Load):
        return node.name + _EXTENT[node.broadcast]
    parts = [_infix(child) for child in node.children]
    if isinstance(node, Compute) and len(parts) == 2 and node.op.value in ("add", "sub", "mul"):
        return f"({parts[0]} {_SYMBOL[node.op.value]} {parts[1]})"
    if isinstance(node, Compute):
        return f"{node.op.value}({', '.join(parts)})"
    raise TypeError(f"unknown node {node!r}")


def _grow(node: Expr, prefix: str, last: bool, lines: list[str]) -> None:
    lines.append(f"{prefix}{'└─ ' if last else '├─ '}{_label(node)}")
    for index, child in enumerate(node.children):
        _grow(child, prefix + ("   " if last else "│  "), index == len(node.children) - 1, lines)
