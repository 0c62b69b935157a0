"""The epilogue tree as C++ visitor types, through cutlass_cppgen's DAG IR."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ToolchainError
from cutlass_w8a8.evt.tree import Accum, Broadcast, Compute, Expr, Load, Op, Tree

_lock = threading.Lock()

# Extents of the example tensors cppgen infers broadcasts from; only "equal or one" matters.
_M, _N = 128, 256


@dataclass(frozen=True)
class Visitor:
    """C++ of a visitor tree.

    Attributes:
        declarations: ``using`` declarations, children first, ending in the root.
        root: the name of the root's type.
    """

    declarations: str
    root: str


def import_cppgen() -> ModuleType:
    """Import cutlass_cppgen without letting it write into the current directory.

    At import it opens an SQLite file named ``compiled_cache.db`` wherever the process happens to stand;
    the database is never used here, so that one call is pointed at memory.

    Raises:
        ToolchainError: nvidia-cutlass is not installed.
    """
    connect = sqlite3.connect

    def connect_in_memory(database: Any, *args: Any, **kwargs: Any) -> Any:
        return connect(":memory:" if database == "compiled_cache.db" else database, *args, **kwargs)

    with _lock, mock.patch.object(sqlite3, "connect", connect_in_memory):
        try:
            import cutlass_cppgen
        except ImportError as error:
            raise ToolchainError(
                "emitting a kernel needs the nvidia-cutlass package, which cannot be imported "
                f"({error}); install it with: pip install nvidia-cutlass==4.2.0.0"
            ) from error
    module: ModuleType = cutlass_cppgen
    return module


def emit_visitor(tree: Tree, cppgen_cc: int, swap_ab: bool) -> Visitor:
    """The visitor types of ``tree`` for the dialect of ``cppgen_cc`` (80 or 90).

    With ``swap_ab`` the kernel computes D^T, so row operands become columns and the reverse; the operands
    keep their places in the formula.
    """
    import_cppgen()
    from cutlass_cppgen.backend.evt.backend.emitter_base import FusionCallbacks
    from cutlass_cppgen.backend.evt.frontend.frontend_base import EVTFrontendBase
    from cutlass_cppgen.backend.evt.ir import ComputeNode
    from cutlass_cppgen.backend.evt.ir.tensor import Tensor
    from cutlass_cppgen.backend.library import FunctionalOp
    from cutlass_library import DataType, LayoutType

    types = {
        DType.BF16: DataType.bf16,
        DType.FP16: DataType.f16,
        DType.FP32: DataType.f32,
        DType.INT32: DataType.s32,
    }
    functions = {
        Op.ADD: FunctionalOp.Plus,
        Op.SUB: FunctionalOp.Minus,
        Op.MUL: FunctionalOp.Multiplies,
        Op.FMA: FunctionalOp.MultiplyAdd,
        Op.MAX: FunctionalOp.Maximum,
    }
    shapes = {Broadcast.SCALAR: (1, 1), Broadcast.ROW: (1, _N), Broadcast.COLUMN: (_M, 1)}

    def example(dtype: DType, shape: tuple[int, int]) -> Any:
        return Tensor(element=types[dtype], shape=shape, layout_tag=LayoutType.RowMajor)

    names = _names(tree)

    class Frontend(EVTFrontendBase):  # type: ignore[misc]
        def parse(self) -> None:
            for node in tree.postorder():
                if isinstance(node, Accum):
                    self.add_load_node(names[node], example(node.dtype, (_M, _N)))
                elif isinstance(node, Load):
                    broadcast = node.broadcast.transposed if swap_ab else node.broadcast
                    self.add_load_node(names[node], example(node.dtype, shapes[broadcast]))
                elif isinstance(node, Compute):
                    element = types[node.dtype]
                    self.add_node(
                        ComputeNode(
                            name=names[node], fn=functions[node.op], element_output=element, element_compute=element
                        )
                    )
                    for index, child in enumerate(node.args):
                        self.add_edge(names[child], names[node], weight=index)
            self.add_store_node("D")
            self.add_edge(names[tree.root], "D")
            self.set_store_tensor("D", example(tree.out, (_M, _N)))
            self.mark_output("D")
            self.return_names = ("D",)

    frontend = Frontend(cppgen_cc)
    frontend.trace()
    declarations, root = FusionCallbacks(frontend.dag_ir, cppgen_cc, emit_CD=cppgen_cc < 90).emit()
    return Visitor(declarations, root)


def _names(tree: Tree) -> dict[Expr, str]:
    """Unique snake-case names; cppgen turns them into the C++ type names."""
    names: dict[Expr, str] = {}
    for node in tree.postorder():
        if isinstance(node, Accum):
            names[node] = "accum"
        elif isinstance(node, Load):
            names[node] = node.name
        elif isinstance(node, Compute):
            count = sum(name == node.label or name.startswith(node.label + "_v") for name in names.values())
            names[node] = node.label + (f"_v{count + 1}" if count else "")
    return names
