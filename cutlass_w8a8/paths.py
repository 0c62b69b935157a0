"""Paths that users write into environment variables."""

from __future__ import annotations

from pathlib import Path

from cutlass_w8a8.errors import ArgumentError


def user_path(variable: str, text: str) -> Path:
    """The path that ``variable`` holds, with ``~`` and ``~user`` resolved.

    Raises:
        ArgumentError: the user it names does not exist, or has no home.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ArgumentError(f"{variable}={text}: {error}; write the path out, from / on") from None
