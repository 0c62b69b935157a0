"""vLLM's compiled kernels without vLLM: two libraries out of its wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs

from cutlass_w8a8.errors import ArgumentError, ToolchainError

VERSION = "0.20.2"
TORCH = "2.11"
GEMM, OPS = "_C_stable_libtorch.abi3.so", "_C.abi3.so"
"""The library with ``cutlass_scaled_mm``, and that with quantisation per token."""


def default_folder() -> Path:
    """Where the libraries are kept: under this user's cache directory."""
    return platformdirs.user_cache_path("cutlass_w8a8") / "bench" / f"vllm-{VERSION}"


def present(name: str) -> Path | None:
    """The library ``name`` if it was fetched to the default folder."""
    path = default_folder() / name
    return path if path.is_file() else None


def download(folder: Path) -> Path:
    """Download vLLM's wheel into ``folder``, 250 MB, without what it depends on.

    Raises:
        ToolchainError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--python-version", "3.12"]
    command += ["--only-binary=:all:", "--platform", "manylinux_2_35_x86_64", "--dest", str(folder), f"vllm=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ToolchainError(
            f"pip cannot download vllm {VERSION}: {done.stderr.strip()[-1000:]}\nMake a package index reachable, or "
            f"copy {GEMM} and {OPS} out of the wheel yourself and give them as --vllm and --vllm-ops"
        )
    return wheels[0]


def fetch(folder: Path | None = None) -> list[Path]:
    """Put vLLM's two libraries into ``folder``, or into the default one; nothing else of the wheel is kept.

    Raises:
        ToolchainError: pip failed, or the wheel does not hold them.
        ArgumentError: the folder cannot be written to.
    """
    target = folder or default_folder()
    try:
        target.mkdir(parents=True, exist_ok=True)
        # In the folder itself, so that a library appears there whole, by being renamed.
        with tempfile.TemporaryDirectory(dir=target) as work:
            with zipfile.ZipFile(download(Path(work))) as wheel:
                for name in (GEMM, OPS):
                    with wheel.open(f"vllm/{name}") as packed, (Path(work) / name).open("wb") as unpacked:
                        shutil.copyfileobj(packed, unpacked)
            for name in (GEMM, OPS):
                (Path(work) / name).replace(target / name)
    except OSError as error:
        raise ArgumentError(f"{target} cannot be written ({error}); give --fetch-vllm another folder") from error
    except (KeyError, zipfile.BadZipFile) as error:
        raise ToolchainError(
            f"the wheel of vllm {VERSION} does not hold {GEMM} and {OPS} ({error}); is the index a faithful mirror?"
        ) from error
    return [target / name for name in (GEMM, OPS)]
