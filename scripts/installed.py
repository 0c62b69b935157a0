"""Asked by the other scripts before they import anything that may not be there."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


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
