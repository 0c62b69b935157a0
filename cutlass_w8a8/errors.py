"""The error hierarchy: every exception this package raises on purpose derives from `W8A8Error`."""

from __future__ import annotations

from pathlib import Path


class W8A8Error(Exception):
    """Base of all errors raised by cutlass_w8a8."""


class ArgumentError(W8A8Error, ValueError):
    """An operand or option of a public call is not acceptable; raised before any launch."""


class ConfigError(W8A8Error, ValueError):
    """A kernel configuration is impossible for its arch, types or epilogue; raised before nvcc runs."""


class TableError(W8A8Error, ValueError):
    """A tuned table, or a file of measurements for one, cannot be read or holds what is impossible."""


class UnsupportedError(W8A8Error, NotImplementedError):
    """No kernel family serves this combination of device and types."""


class ToolchainError(W8A8Error, RuntimeError):
    """A compiler, toolkit or header tree is missing or too old."""


class CompileError(ToolchainError):
    """A compiler ran and failed.

    Attributes:
        command: the failing command line.
        log: everything the compiler printed.
        source: the source file, kept for inspection.
    """

    def __init__(self, message: str, *, command: str, log: str, source: Path) -> None:
        super().__init__(message)
        self.command = command
        self.log = log
        self.source = source


class CacheError(W8A8Error, RuntimeError):
    """The kernel cache cannot be read or written."""


class UnwritableError(CacheError):
    """A directory that is to hold kernels cannot be written; builds fall back to a temporary one."""


class CheckpointError(W8A8Error, ValueError):
    """A checkpoint cannot be read or written, or does not fit the model."""


class LaunchError(W8A8Error, RuntimeError):
    """The CUDA driver refused to load or launch a kernel."""
