"""What calls resolve to, remembered: bounded, shared by threads, given up where something better is there."""

from __future__ import annotations

from typing import TypeVar

from cutlass_w8a8.forks import guard

Key = TypeVar("Key")
Value = TypeVar("Value")

# Serving sees a bounded set of shapes; should it not, the oldest are forgotten.
MOST = 16384


class Memo(dict[Key, Value]):
    """A dictionary of the latest ``most`` values kept; looked up as any dictionary is, changed by its methods alone.

    Attributes:
        superseded: values that something better was found for. They still serve where that cannot be had, while a CUDA
            graph is being captured.
    """

    __slots__ = ("_most", "superseded")

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self._most = most
        self.superseded: dict[Key, Value] = {}

    def keep(self, key: Key, value: Value) -> None:
        """Remember ``value`` for ``key``."""
        with guard:
            self.superseded.pop(key, None)
            _append(self, key, value, self._most)

    def supersede(self, key: Key) -> None:
        """Have ``key`` looked up in vain from now on."""
        with guard:
            if key in self:
                _append(self.superseded, key, self.pop(key), self._most)

    def forget(self) -> None:
        """Remember nothing."""
        with guard:
            self.clear()
            self.superseded.clear()


def _append(values: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    while len(values) >= most:
        values.pop(next(iter(values)))
    values[key] = value
