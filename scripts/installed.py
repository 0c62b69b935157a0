"""Asked by the other scripts before they import anything that may not be there."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path


def set_cache(cache: Path | None, no_compile: bool) -> None:
    """Have the package use this cache, and treat a kernel missing from it as an error if ``no_compile``.

    The package reads its environment when it is imported or first used, so this comes before `require_package`.
    """
    if cache:
        os.environ["CUTLASS_W8A8_CACHE_DIR"] = str(cache.resolve())
    if no_compile:
        os.environ["CUTLASS_W8A8_JIT"] = "off"


def require_package() -> None:
    """Exit, saying how to go on, if this Python cannot import ``cutlass_w8a8`` for want of what it needs."""
    try:
        for name in ("cutlass_w8a8", "rich"):
            import_module(name)
    except ModuleNotFoundError as error:
        sys.exit(
            f"{Path(sys.argv[0]).stem}: the package is not installed in this Python ({error.name} is missing); use "
            ".venv/bin/python, which scripts/demo and scripts/test make, or pip install ."
        )
