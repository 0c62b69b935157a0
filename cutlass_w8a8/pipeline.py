"""From a kernel's specification to its library on disk: looked up, or emitted, compiled and stored.

An entry is used whichever compiler built it, so that a machine without one can use a cache that was built elsewhere;
the manifest records the compiler. ``build(spec, force=True)`` compiles again with the compiler at hand. What a new
release, an edited emitter, other flags or other CUTLASS headers change is the key, and so a new compilation, unless
source, flags and headers are those of an object that is already there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum

from cutlass_w8a8 import emit
from cutlass_w8a8.cache.key import digest
from cutlass_w8a8.cache.location import cache_root
from cutlass_w8a8.cache.store import LIBRARY, Entry, Store
from cutlass_w8a8.errors import ArgumentError, CacheError, ToolchainError
from cutlass_w8a8.spec import Spec
from cutlass_w8a8.toolchain.discover import Toolkit, find_toolkit, require
from cutlass_w8a8.toolchain.flags import Flags, flags_for
from cutlass_w8a8.toolchain.headers import Headers, headers_digest, require_headers
from cutlass_w8a8.toolchain.nvcc import compile_kernel
from cutlass_w8a8.toolchain.progress import compiling
from cutlass_w8a8.version import VERSION

__all__ = [
    "JIT_VARIABLE",
    "Entry",
    "Jit",
    "Stats",
    "build",
    "find",
    "jit_enabled",
    "jit_policy",
    "kernel_key",
    "key_fields",
    "stats",
]

# Raise it when the meaning of a stored file changes: what the library exports, or what the manifest holds.
SCHEMA = "1"
JIT_VARIABLE = "CUTLASS_W8A8_JIT"


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


@dataclass
class Stats:
    """What this process did, counted.

    Attributes:
        lookups: kernels looked for in the cache.
        hits: those found.
        compiles: compilations that succeeded.
        reused: misses served by an object that another key had brought in.
    """

    lookups: int = 0
    hits: int = 0
    compiles: int = 0
    reused: int = 0


stats = Stats()


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


def find(spec: Spec) -> Entry | None:
    """The cached kernel of ``spec``, or None. Never compiles, never writes."""
    fields = key_fields(spec)
    return _lookup(Store(cache_root()), digest(fields))


def build(spec: Spec, *, force: bool = False, explicit: bool = False) -> Entry:
    """The kernel of ``spec``: from the cache, or compiled (half a minute) and stored.

    Args:
        spec: the kernel.
        force: compile even if it is cached.
        explicit: compile even if ``CUTLASS_W8A8_JIT=off``: the user asked for this very compilation.

    Raises:
        CacheError: the kernel is not cached and ``CUTLASS_W8A8_JIT=off``, or the cache cannot be written.
        CompileError: a compiler failed; source and log are kept under ``failed/`` in the cache.
        ToolchainError: compiler or headers are missing or too old.
    """
    fields = key_fields(spec)
    key = digest(fields)
    store = Store(cache_root())
    if not force and (entry := _lookup(store, key)) is not None:
        return entry
    if not explicit and not jit_enabled():
        raise CacheError(
            f"kernel {spec.name} is not in the cache {store.root}, and {JIT_VARIABLE}=off forbids compiling it now; "
            f"compile it beforehand with: {spec.command('build')}"
        )
    files, flags = _emit(spec), flags_for(spec)
    object_digest = digest(
        {"schema": SCHEMA, "flags": flags.to_json(), "headers": fields["headers"], **_labelled(files)}
    )
    with store.lock(object_digest):
        if not force:
            # Another thread or process may have built it while this one waited for the lock.
            if (entry := store.lookup(key)) is not None:
                return entry
            if store.find_object(object_digest) is not None:
                stats.reused += 1
                return store.publish_entry(key, fields, object_digest)
        _compile(store, spec, object_digest, files, flags, force)
        stats.compiles += 1
        return replace(store.publish_entry(key, fields, object_digest), compiled=True)


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


def _lookup(store: Store, key: str) -> Entry | None:
    entry = store.lookup(key)
    stats.lookups += 1
    stats.hits += entry is not None
    return entry


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
    store: Store,
    spec: Spec,
    object_digest: str,
    files: Mapping[str, str],
    flags: Flags,
    force: bool,
) -> None:
    toolkit, headers = _tools(spec)
    with store.workdir() as workdir, compiling(spec.name):
        result = compile_kernel(files, flags, toolkit, headers, workdir, keep=store.failed(spec.name))
        library = result.library.read_bytes()
    contents = {name: text.encode() for name, text in files.items()}
    store.publish_object(
        object_digest,
        {**contents, LIBRARY: library, "build.log": result.log.encode()},
        {
            "schema": SCHEMA,
            "name": spec.name,
            "source": digest(files),
            "flags": asdict(flags),
            "headers": {"digest": headers.digest, "version": headers.version},
            "nvcc": {"version": ".".join(map(str, toolkit.version)), "identity": toolkit.identity},
            "cxx": {"identity": toolkit.cxx_identity},
            "commands": result.commands,
            "seconds": round(result.seconds, 3),
            "resources": asdict(result.resources),
        },
        force=force,
    )
