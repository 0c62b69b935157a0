"""Digests over labelled fields."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from cutlass_w8a8.errors import CacheError


def digest(fields: Mapping[str, str | bytes]) -> str:
    """SHA-256, in hex, over ``fields`` in the order of their labels.

    Labels and values are each preceded by their length, so that no two different sets of fields give the same input.

    Raises:
        CacheError: a label is not text or a value is neither text nor bytes: it has no stable digest.
    """
    state = hashlib.sha256(f"{len(fields)};".encode())
    for label in sorted(fields):
        value = fields[label]
        if not isinstance(value, (str, bytes)):
            raise CacheError(f"key field {label!r} is a {type(value).__name__}; only str and bytes can be digested")
        for part in (label.encode(), value.encode() if isinstance(value, str) else value):
            state.update(f"{len(part)}:".encode())
            state.update(part)
    return state.hexdigest()
