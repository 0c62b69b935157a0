"""Rendering: templates found, filled and digested here and nowhere else."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from cutlass_w8a8.arch import Family
from cutlass_w8a8.emit import quantize
from cutlass_w8a8.spec import KernelSpec, QuantSpec, Spec

_PACKAGE = Path(__file__).resolve().parent.parent
_QUANTIZE = "quantize.cu.j2"
_TEMPLATES = {
    Family.MULTISTAGE: "kernel_2x.cu.j2",
    Family.HOPPER: "kernel_3x.cu.j2",
    Family.BLACKWELL: "kernel_3x.cu.j2",
    Family.GEFORCE: "kernel_3x.cu.j2",
}

# Python modules that decide what a spec's source says. (The compiler flags are digested by themselves.)
_SOURCES = ("arch/*.py", "config.py", "dtypes.py", "spec.py", "evt/*.py", "emit/*.py")


def template_dir() -> Path:
    """The folder of the templates: inside the installed package, or at the top of a source checkout."""
    packaged = _PACKAGE / "templates"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "templates"


def render(spec: Spec) -> dict[str, str]:
    """The source files of ``spec``'s kernel by name; ``kernel.cu`` is the kernel, the rest supports its host half.

    Deterministic: equal specs give equal bytes on every machine.

    Raises:
        UnsupportedError: the epilogue does not suit the operand type.
        ToolchainError: nvidia-cutlass is not installed.
    """
    # Here because most processes find their kernels compiled.
    import jinja2

    template, context = _filled(spec)
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(templates()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    hoppers = isinstance(spec, KernelSpec) and spec.family is Family.HOPPER
    return ({"hopper.h": templates()["hopper.h"]} if hoppers else {}) | {
        "kernel.cu": environment.get_template(template).render(context),
        "host_prelude.h": templates()["host_prelude.h"],
        # CUTLASS includes this header everywhere, and a plain C++ compiler cannot parse it.
        "stubs/cutlass/arch/wmma.h": "",
    }


def _filled(spec: Spec) -> tuple[str, dict[str, Any]]:
    """The template of ``spec``'s kind, and what fills it in."""
    if isinstance(spec, QuantSpec):
        return _QUANTIZE, quantize.context(spec)
    if isinstance(spec, KernelSpec):
        # Here because cutlass_cppgen and what it needs takes seconds to import, which only its kernels should pay.
        return _TEMPLATES[spec.family], import_module("cutlass_w8a8.emit.context").context(spec)
    raise TypeError(f"{type(spec).__name__} is no specification that a template is written for")


@lru_cache(maxsize=1)
def templates() -> dict[str, str]:
    """The templates by name, read once: what is digested is what is rendered, whatever happens on the disk."""
    paths = sorted(path for pattern in ("*.j2", "*.h") for path in template_dir().glob(pattern))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


@lru_cache(maxsize=1)
def digest() -> str:
    """SHA-256 over every file of this package that turns a spec into source text."""
    paths = [path for pattern in _SOURCES for path in sorted(_PACKAGE.glob(pattern))]
    texts = {f"{path.parent.name}/{path.name}": path.read_text(encoding="utf-8") for path in paths}
    sha = hashlib.sha256()
    for name, text in (texts | templates()).items():
        content = text.encode()
        sha.update(f"{name}:{len(content)}:".encode())
        sha.update(content)
    return sha.hexdigest()
