"""From a kernel's specification to its library on disk: looked up, or emitted, compiled and stored.

An entry is used whichever compiler built it, so that a machine without one can use a cache that was built elsewhere;
the manifest records the compiler. ``build(spec, force=True)`` compiles again with the compiler at hand. What a new
release, an edited emitter, other flags or other CUTLASS headers change is the key, and so a new compilation, unless
source, flags and headers are those of an object that is already there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Any

from cutlass_w8a8 import counters, emit
from cutlass_w8a8.cache.chain import Chain
from cutlass_w8a8.cache.key import digest
from cutlass_w8a8.cache.location import size_limit
from cutlass_w8a8.cache.shelf import LIBRARY, SOURCE, Entry
from cutlass_w8a8.cache.upkeep import evict
from cutlass_w8a8.errors import ArgumentError, CacheError, CompileError, ToolchainError
from cutlass_w8a8.spec import Spec
from cutlass_w8a8.toolchain import headers
from cutlass_w8a8.toolchain.discover import Toolkit, find_toolkit, require
from cutlass_w8a8.toolchain.flags import Flags, flags_for
from cutlass_w8a8.toolchain.headers import Headers, headers_digest, require_headers
from cutlass_w8a8.toolchain.nvcc import BUILD_LOG, LOG_TAIL_LINES, compile_kernel
from cutlass_w8a8.toolchain.process import compile_timeout
from cutlass_w8a8.toolchain.progress import compiling
from cutlass_w8a8.version import VERSION

__all__ = [
    "JIT_VARIABLE",
    "Entry",
    "Jit",
    "build",
    "find",
    "jit_enabled",
    "jit_policy",
    "kernel_key",
    "key_fields",
]

# Raise it when the meaning of a stored file changes: what the library exports, or what the manifest holds.
SCHEMA = "1"
JIT_VARIABLE = "CUTLASS_W8A8_JIT"
# Who edits headers while kernels compile stops some time.
_MOST_ATTEMPTS = 3
# A compilation that takes as long as it may still has to be published.
_PATIENCE_SECONDS = 60
# Whoever removes kernels right now does it for others, too.
_EVICTION_SECONDS = 1.0
_log = logging.getLogger("cutlass_w8a8")


class Jit(str, Enum):
    """What becomes of a call whose kernel is not in the cache.

    Attributes:
        BLOCK: it waits while the kernel is compiled.
        BACKGROUND: another kernel that can compute it serves meanwhile, if one is at hand; else it waits.
        OFF: it is refused.
    """

    BLOCK = "block"
    BACKGROUND = "background"
    OFF = "off"


_JIT_VALUES = {
    **dict.fromkeys(("", "block", "on", "1", "true", "yes"), Jit.BLOCK),
    "background": Jit.BACKGROUND,
    **dict.fromkeys(("off", "0", "false", "no"), Jit.OFF),
}


class _HeadersChangedError(Exception):
    """The CUTLASS headers are not those that the key was made from."""


def key_fields(spec: Spec) -> dict[str, str]:
    """The labelled fields that determine the cache key of ``spec``. Needs no compiler and no CUTLASS headers.

    Raises:
        ToolchainError: ``CUTLASS_W8A8_CUTLASS_DIR`` is set and names no CUTLASS tree.
    """
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "spec": spec.to_json(),
        # A formula may be registered from outside of this package, where the emitter's digest does not see it.
        "formula": spec.formula,
        "emitter": emit.digest(),
        "flags": flags_for(spec).to_json(),
        "headers": headers_digest(),
    }


def kernel_key(spec: Spec) -> str:
    """The cache key of ``spec``: 64 hexadecimal digits."""
    return digest(key_fields(spec))


def find(spec: Spec, *, use: bool = False) -> Entry | None:
    """The kernel of ``spec`` from a pack or the cache, or None. Never compiles.

    Args:
        spec: the kernel.
        use: whether this process is about to use it, and it must stay in the cache; else nothing is written.
    """
    return _lookup(Chain(), kernel_key(spec), use=use)


def build(spec: Spec, *, force: bool = False, explicit: bool = False) -> Entry:
    """The kernel of ``spec``: from a pack or the cache, or compiled (half a minute) and stored.

    If the cache cannot be written, the kernel is kept in a temporary folder until the process ends. Of several threads
    and processes that want it at once, one compiles; if that fails, it fails for all of them.

    Args:
        spec: the kernel.
        force: compile even if it is cached.
        explicit: compile even if ``CUTLASS_W8A8_JIT=off``, and insist on the cache: the user asked for this very
            compilation.

    Raises:
        ArgumentError: an environment variable of the cache holds what makes no sense.
        CacheError: the kernel is not cached and ``CUTLASS_W8A8_JIT=off``, the cache belongs to another user, or neither
            it nor the temporary folder can be written.
        CompileError: a compiler failed; source and log are kept under ``failed/`` in the cache.
        ToolchainError: compiler or headers are missing or too old.
    """
    for _ in range(_MOST_ATTEMPTS):
        try:
            return _build(spec, force, explicit)
        except _HeadersChangedError as error:
            changed = str(error)
            headers.forget()
            _log.info("compiling %s again: %s", spec.name, changed)
    raise ToolchainError(
        f"kernel {spec.name} cannot be compiled: {changed}, again and again; try when they are complete"
    )


def _build(spec: Spec, force: bool, explicit: bool) -> Entry:
    fields = key_fields(spec)
    key = digest(fields)
    chain = Chain(fall_back=not explicit)
    if not force and (entry := _lookup(chain, key, use=True)) is not None:
        _log.debug("kernel %s: found in %s", spec.name, entry.directory)
        return entry
    if not explicit and not jit_enabled():
        raise CacheError(
            f"kernel {spec.name} is not in the cache {' or '.join(map(str, chain.places()))}, and {JIT_VARIABLE}=off "
            f"forbids compiling it now; compile it beforehand with: {spec.command('build')}"
        )
    _log.info("kernel %s: not found, key %s", spec.name, key)
    seconds, limit = compile_timeout(), size_limit()
    files, flags = _emit(spec), flags_for(spec)
    object_digest = digest(
        {"schema": SCHEMA, "flags": flags.to_json(), "headers": fields["headers"], **_labelled(files)}
    )
    failed = chain.failed(spec.name)
    earlier = _identity(failed)
    try:
        with chain.lock(object_digest, seconds + _PATIENCE_SECONDS):
            if not force:
                # Another thread or process may have built it while this one waited for the lock, or failed to.
                if (found := chain.lookup(key, use=True)) is not None:
                    return found.entry
                if (entry := chain.adopt(key, fields, object_digest)) is not None:
                    counters.stats.add(reused=1)
                    return entry
                if failed is not None and _identity(failed) not in (None, earlier):
                    _raise_failure(spec, failed, files)
            contents, manifest = _compile(chain, spec, object_digest, files, flags, fields["headers"], seconds)
            counters.stats.add(compiles=1, compile_seconds=manifest["seconds"])
            entry = chain.publish(key, fields, object_digest, contents, manifest, force=force)
    finally:
        counters.stats.add(temporary=chain.temporary)
    if chain.own is not None:
        counters.stats.add(evictions=len(evict(chain.own, limit, _EVICTION_SECONDS)))
    return replace(entry, compiled=True)


def jit_policy() -> Jit:
    """What ``CUTLASS_W8A8_JIT`` asks for: ``block`` if it is not set.

    Raises:
        ArgumentError: the variable has a value without a meaning.
    """
    value = os.environ.get(JIT_VARIABLE, "")
    policy = _JIT_VALUES.get(value.lower())
    if policy is None:
        accepted = ", ".join(text for text in _JIT_VALUES if text)
        raise ArgumentError(f"{JIT_VARIABLE}={value} is no policy; accepted: {accepted}; unset, it is block")
    return policy


def jit_enabled() -> bool:
    """Whether a kernel that is not cached may be compiled on first use: not if ``CUTLASS_W8A8_JIT=off``.

    Raises:
        ArgumentError: as `jit_policy`.
    """
    return jit_policy() is not Jit.OFF


def _identity(directory: Path | None) -> tuple[int, int] | None:
    """What distinguishes a directory from one that takes its place."""
    try:
        status = None if directory is None else directory.stat()
    except OSError:
        return None
    return None if status is None else (status.st_ino, status.st_mtime_ns)


def _raise_failure(spec: Spec, failed: Path, files: Mapping[str, str]) -> None:
    """Raise what another thread or process met when it compiled the same files; its record is in ``failed``."""
    try:
        if any((failed / name).read_text(encoding="utf-8") != text for name, text in files.items()):
            return
        log = (failed / BUILD_LOG).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return
    command = log.partition("\n")[0].removeprefix("$ ")
    tail = "\n".join(log.rstrip().splitlines()[-LOG_TAIL_LINES:])
    raise CompileError(
        f"kernel {spec.name} failed to compile in another thread or process, while this one waited for it.\n"
        f"Source and full log: {failed}\nEnd of the log:\n{tail}",
        command=command,
        log=log,
        source=failed / SOURCE,
    )


def _lookup(chain: Chain, key: str, *, use: bool) -> Entry | None:
    found = chain.lookup(key, use=use)
    counters.stats.add(lookups=1, hits=found is not None, pack_hits=found is not None and found.pack)
    return found.entry if found is not None else None


def _emit(spec: Spec) -> Mapping[str, str]:
    try:
        return emit.render(spec)
    except ToolchainError as error:
        raise _cannot_build(spec, error) from error


def _cannot_build(spec: Spec, error: ToolchainError) -> ToolchainError:
    return ToolchainError(
        f"kernel {spec.name} is not in the cache and cannot be compiled here: {error}\n"
        f"Or copy a cache directory from a machine that can, after: {spec.command('build')}"
    )


def _tools(spec: Spec) -> tuple[Toolkit, Headers]:
    try:
        toolkit = find_toolkit()
        require(toolkit, spec.arch, spec.multiplies)
        return toolkit, require_headers()
    except ToolchainError as error:
        raise _cannot_build(spec, error) from error


def _labelled(files: Mapping[str, str]) -> dict[str, str | bytes]:
    return {f"file {name}": text for name, text in files.items()}


def _compile(
    chain: Chain,
    spec: Spec,
    object_digest: str,
    files: Mapping[str, str],
    flags: Flags,
    expected: str,
    seconds: float,
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The object's files and its manifest, compiled against the headers whose digest is ``expected``."""
    toolkit, tree = _tools(spec)

    def build_in(workdir: Path, failed: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
        before = _stamp(tree, expected)
        begin = time.monotonic()
        _log.info("kernel %s: compiling in %s", spec.name, workdir)
        try:
            with compiling(spec.name):
                result = compile_kernel(files, flags, toolkit, tree, workdir, keep=failed, seconds=seconds)
        except CompileError:
            # An error that came of two versions is not worth telling.
            _require_stamp(tree, before)
            raise
        _require_stamp(tree, before)
        _log.info("kernel %s: compiled in %.1f s", spec.name, time.monotonic() - begin)
        sources = {name: text.encode() for name, text in files.items()}
        return {**sources, LIBRARY: result.library.read_bytes(), BUILD_LOG: result.log.encode()}, {
            "schema": SCHEMA,
            "name": spec.name,
            "source": digest(files),
            "flags": asdict(flags),
            "headers": {"digest": expected, "version": tree.version},
            "nvcc": {"version": ".".join(map(str, toolkit.version)), "identity": toolkit.identity},
            "cxx": {"identity": toolkit.cxx_identity},
            "commands": result.commands,
            "seconds": round(result.seconds, 3),
            "resources": asdict(result.resources),
        }

    return chain.with_workdir(object_digest, build_in, spec.name)


def _stamp(tree: Headers, expected: str | None = None) -> str:
    """What changes when the headers do; with ``expected``, of headers that have this digest."""
    try:
        found = headers.stamp(tree.include)
        if expected is not None and headers.tree_digest(tree.include) != expected:
            raise _HeadersChangedError(f"the CUTLASS headers in {tree.include} have changed since they were last read")
    except OSError as error:
        raise _HeadersChangedError(f"the CUTLASS headers in {tree.include} are being changed ({error})") from error
    return found


def _require_stamp(tree: Headers, before: str) -> None:
    if _stamp(tree) != before:
        raise _HeadersChangedError(f"the CUTLASS headers in {tree.include} changed while it was compiled")
