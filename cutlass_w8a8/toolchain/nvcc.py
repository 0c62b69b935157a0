"""Compiling one kernel: device half by nvcc and host half by a plain C++ compiler, side by side, then linked.

The device half takes 25 to 40 s and 3.5 GB of memory, nearly all of it in nvcc's device front end; the host half
takes 5 s. Compiling the same file twice, each time for one half only, is about 0.6 of nvcc's own two-sided way.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cutlass_w8a8.errors import CompileError
from cutlass_w8a8.toolchain.discover import Toolkit
from cutlass_w8a8.toolchain.flags import Flags
from cutlass_w8a8.toolchain.headers import Headers
from cutlass_w8a8.toolchain.process import DEFAULT_TIMEOUT, TIMEOUT_VARIABLE, Finished, run_together
from cutlass_w8a8.toolchain.resources import Resources, parse_resources

SOURCE = "kernel.cu"
PRELUDE = "host_prelude.h"
STUBS = "stubs"
ENTRY = "w8a8_kernel"
LIBRARY = "kernel.so"
BUILD_LOG = "build.log"

LOG_TAIL_LINES = 40
# The fat binary, readable by address from inside the library. "%" type prefixes assemble on every architecture.
_IMAGE = """\
    .section .rodata
    .balign 64
    .globl w8a8_image
    .type w8a8_image, %object
w8a8_image:
    .incbin "kernel.fatbin"
    .size w8a8_image, . - w8a8_image
    .globl w8a8_image_end
    .type w8a8_image_end, %object
w8a8_image_end:
    .byte 0
    .size w8a8_image_end, 1
    .section .note.GNU-stack, "", %progbits
"""


@dataclass(frozen=True)
class CompileResult:
    """A compiled kernel.

    Attributes:
        library: the shared library, in the working directory given.
        seconds: wall-clock time of all steps.
        resources: what the kernel uses.
        log: commands and everything they printed, without machine paths.
        commands: the commands, with ``$NVCC``, ``$CXX``, ``$CUTLASS`` and ``$CUDA`` for machine paths.
    """

    library: Path
    seconds: float
    resources: Resources
    log: str
    commands: tuple[str, ...]


def compile_kernel(
    files: Mapping[str, str],
    flags: Flags,
    toolkit: Toolkit,
    headers: Headers,
    workdir: Path,
    *,
    keep: Path,
    seconds: float = DEFAULT_TIMEOUT,
) -> CompileResult:
    """Compile ``files`` in ``workdir``, an empty directory of the caller's.

    Args:
        files: name to text: ``kernel.cu`` (both halves, told apart by ``__CUDACC__``; defines the kernel
            ``w8a8_kernel``), ``host_prelude.h`` (included first in the host half), and headers under ``stubs/``
            that the host half sees instead of CUTLASS's.
        flags: what shapes the binary.
        toolkit: the compilers.
        headers: the CUTLASS tree.
        workdir: where everything is written, temporary files included.
        keep: if a compiler fails, the directory where source and log are left, replacing earlier ones.
        seconds: how long all of it may take.

    Raises:
        CompileError: a compiler failed or took too long, or the result holds no ``w8a8_kernel``.
        ToolchainError: a compiler could not be started.
    """
    begin = time.monotonic()
    _write(files, workdir)
    (workdir / "image.s").write_text(_IMAGE)
    scrub = _Scrubber(toolkit, headers, workdir)
    log: list[str] = []
    commands: list[str] = []

    def run(steps: Mapping[str, Sequence[str]]) -> dict[str, Finished]:
        finished = run_together(steps, workdir, begin + seconds - time.monotonic())
        commands.extend(scrub.command(argv) for argv in steps.values())
        log.extend(
            f"$ {scrub.command(step.argv)}\n{scrub.text(step.output)}"
            for step in (finished[name] for name in steps if name in finished)
        )
        for step in finished.values():
            if step.timed_out:
                raise _failure(
                    step,
                    files,
                    keep,
                    f"{Path(step.argv[0]).name} did not end within {seconds:.0f} s and was stopped; if the machine is "
                    f"just slow, compile fewer kernels at once (--jobs), or set {TIMEOUT_VARIABLE} to more seconds",
                )
            if step.returncode != 0:
                raise _failure(step, files, keep)
        return finished

    halves = run(
        {
            "device": _device_command(flags, toolkit, headers),
            "host": _host_command(flags, toolkit, headers),
        }
    )
    resources = parse_resources(halves["device"].output, ENTRY)
    if resources is None:
        raise _failure(halves["device"], files, keep, f"{SOURCE} compiled, but defines no kernel named {ENTRY}")
    linked = run({"link": [str(toolkit.cxx), "host.o", "image.s", "-o", LIBRARY, *flags.link]})
    library = workdir / LIBRARY
    if not library.is_file() or not library.stat().st_size:
        raise _failure(linked["link"], files, keep, f"the linker reported success, but left no {LIBRARY}")
    return CompileResult(
        library=library,
        seconds=time.monotonic() - begin,
        resources=resources,
        log="".join(log),
        commands=tuple(commands),
    )


def _device_command(flags: Flags, toolkit: Toolkit, headers: Headers) -> list[str]:
    return [
        str(toolkit.nvcc),
        *flags.device,
        f"-ccbin={toolkit.cxx}",
        f"-I{headers.include}",
        SOURCE,
        "-o",
        "kernel.fatbin",
    ]


def _host_command(flags: Flags, toolkit: Toolkit, headers: Headers) -> list[str]:
    major, minor, _ = toolkit.version
    return [
        str(toolkit.cxx),
        *flags.host,
        # CUTLASS enables what a toolkit supports by these; both halves must agree, or their types would differ.
        f"-D__CUDACC_VER_MAJOR__={major}",
        f"-D__CUDACC_VER_MINOR__={minor}",
        "-include",
        PRELUDE,
        f"-I{STUBS}",
        f"-I{headers.include}",
        *(f"-I{directory}" for directory in toolkit.includes),
        *(word for directory in toolkit.system_includes for word in ("-isystem", str(directory))),
        # No machine path may reach the binary through __FILE__.
        f"-ffile-prefix-map={headers.include}=cutlass",
        "-x",
        "c++",
        "-c",
        SOURCE,
        "-o",
        "host.o",
    ]


def _write(files: Mapping[str, str], directory: Path) -> None:
    for name, text in files.items():
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"source file name {name!r} must be relative and stay inside its directory")
        path = directory / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _failure(step: Finished, files: Mapping[str, str], keep: Path, what: str | None = None) -> CompileError:
    command = shlex.join(step.argv)
    name = Path(step.argv[0]).name
    if what is None:
        what = f"{name} failed with status {step.returncode}"
        if (number := step.killing_signal) is not None:
            what = (
                f"{name} was killed by signal {number}; if the machine ran out of memory, note that one kernel "
                "takes about 3.5 GB: free some, or compile fewer kernels at once (--jobs)"
            )
    if "No space left on device" in step.output or "Disk quota exceeded" in step.output:
        what += "; its disk is full: free some space, or set CUTLASS_W8A8_CACHE_DIR and TMPDIR to directories elsewhere"
    log = f"$ {command}\n{step.output}"
    try:
        _keep(files, log, keep)
        kept = f"Source and full log: {keep}"
    except OSError as error:
        # What went wrong with the kernel must not be hidden by what went wrong with its record.
        kept = f"Source and log could not be kept in {keep}: {error}"
    tail = "\n".join(step.output.rstrip().splitlines()[-LOG_TAIL_LINES:])
    return CompileError(
        f"{what}.\n{kept}\nCommand: {command}\nEnd of the log:\n{tail}",
        command=command,
        log=step.output,
        source=keep / SOURCE,
    )


def _keep(files: Mapping[str, str], log: str, keep: Path) -> None:
    keep.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{keep.name}.", dir=keep.parent))
    try:
        _write(files, fresh)
        (fresh / BUILD_LOG).write_text(log, encoding="utf-8")
        # A directory cannot be renamed over a full one: move the old one into the fresh one's place first.
        old = fresh.with_name(fresh.name + ".old")
        if keep.exists():
            keep.rename(old)
        fresh.rename(keep)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


class _Scrubber:
    """Replaces machine paths by names, so that what is recorded reads the same on every machine."""

    def __init__(self, toolkit: Toolkit, headers: Headers, workdir: Path) -> None:
        names = {str(toolkit.nvcc): "$NVCC", str(toolkit.cxx): "$CXX", str(headers.include): "$CUTLASS"}
        if toolkit.includes:
            names[str(toolkit.includes[0].parent)] = "$CUDA"
        names[str(workdir)] = "."
        # "/" would match everywhere; a longer path must win over its own prefix.
        self._names = {path: names[path] for path in sorted(names, key=len, reverse=True) if path != "/"}

    def text(self, text: str) -> str:
        for path, name in self._names.items():
            text = re.sub(re.escape(path) + r"(?![\w.-])", name, text)
        return text

    def command(self, argv: Sequence[str]) -> str:
        words = (self.text(word) for word in argv)
        return " ".join(word if re.fullmatch(r"[\w$=./:,+-]+", word) else shlex.quote(word) for word in words)
