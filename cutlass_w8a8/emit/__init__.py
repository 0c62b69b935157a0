"""From a kernel's specification to its C++ source."""

from cutlass_w8a8.emit.render import digest, render

__all__ = ["digest", "render"]
