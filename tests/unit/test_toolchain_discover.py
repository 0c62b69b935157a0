"""Where compilers and headers are looked for, in which order, and what is said when they are missing."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cutlass_w8a8.arch import ARCHS, SM75, SM90, Arch
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ArgumentError, ToolchainError
from cutlass_w8a8.toolchain import discover, headers
from cutlass_w8a8.toolchain.discover import find_toolkit, require


@pytest.fixture
def bare(fake_tools: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Fake tools that no variable names, on a machine with nothing else."""
    monkeypatch.delenv("CUTLASS_W8A8_NVCC")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(discover, "_DEFAULT", tmp_path / "no-cuda")
    monkeypatch.setattr(discover.importlib.util, "find_spec", lambda name: None)
    return fake_tools


def copy_of(tools: Any, home: Path) -> Path:
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    shutil.copy2(tools.nvcc, nvcc)
    return nvcc


def test_what_is_found_is_described(fake_tools: Any) -> None:
    toolkit = find_toolkit()
    assert toolkit.nvcc == fake_tools.nvcc
    assert toolkit.version == (13, 0, 7)
    assert "release 13.0" in toolkit.identity
    assert toolkit.includes == (fake_tools.root / "cuda" / "include",)
    assert toolkit.system_includes == (fake_tools.root / "cuda" / "include" / "cccl",)
    assert (toolkit.cxx, toolkit.cxx_identity) == (fake_tools.cxx, "g++ 12.2.0\n")


def test_order_of_the_search(bare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # From the last resort to the first choice: each addition must win over all the earlier ones.
    monkeypatch.setattr(discover, "_DEFAULT", tmp_path / "default")
    expected = copy_of(bare, tmp_path / "default")
    assert find_toolkit().nvcc == expected

    discover._find.cache_clear()
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "site" / "nvidia")]
    monkeypatch.setattr(discover.importlib.util, "find_spec", lambda name: spec)
    copy_of(bare, tmp_path / "site" / "nvidia" / "cu13")
    expected = copy_of(bare, tmp_path / "site" / "nvidia" / "cu14")
    assert find_toolkit().nvcc == expected

    expected = copy_of(bare, tmp_path / "on-path")
    monkeypatch.setenv("PATH", str(expected.parent))
    assert (find_toolkit().nvcc, find_toolkit().origin) == (expected, "PATH")
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        expected = copy_of(bare, tmp_path / variable)
        monkeypatch.setenv(variable, str(tmp_path / variable))
        assert (find_toolkit().nvcc, find_toolkit().origin) == (expected, variable)
    expected = copy_of(bare, tmp_path / "named")
    monkeypatch.setenv("CUTLASS_W8A8_NVCC", str(expected))
    assert (find_toolkit().nvcc, find_toolkit().origin) == (expected, "CUTLASS_W8A8_NVCC")


def test_nothing_found_lists_the_places_and_the_remedy(bare: Any, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError) as caught:
        find_toolkit()
    text = str(caught.value)
    for expected in (
        "CUTLASS_W8A8_NVCC",
        "CUDA_HOME",
        str(tmp_path / "empty"),
        str(tmp_path / "no-cuda" / "bin" / "nvcc"),
        "pip install nvidia-cuda-nvcc==",
    ):
        assert expected in text


@pytest.mark.parametrize("variable", ["CUTLASS_W8A8_NVCC", "CUDA_HOME", "CUDA_PATH", "CXX"])
def test_a_variable_that_points_nowhere_is_an_error(
    fake_tools: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    monkeypatch.setenv("PATH", f"{fake_tools.nvcc.parent}:{fake_tools.cxx.parent}")
    monkeypatch.delenv("CUTLASS_W8A8_NVCC")
    monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    with pytest.raises(ToolchainError, match=f"{variable}=.*nowhere"):
        find_toolkit()


def test_host_compiler_on_path_and_missing(fake_tools: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX")
    directory = tmp_path / "compilers"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    with pytest.raises(ToolchainError, match=r"g\+\+ nor c\+\+ is on PATH"):
        find_toolkit()
    for name in ("c++", "g++"):
        shutil.copy2(fake_tools.cxx, directory / name)
        discover._find.cache_clear()
        assert find_toolkit().cxx == directory / name


def test_result_is_remembered_until_the_environment_changes(
    fake_tools: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = find_toolkit()
    assert find_toolkit() is first
    monkeypatch.setenv("CUTLASS_W8A8_NVCC", str(copy_of(fake_tools, tmp_path / "other")))
    assert find_toolkit().nvcc != first.nvcc


def test_not_a_compiler(fake_tools: Any) -> None:
    fake_tools.nvcc.write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(ToolchainError, match=r"is not nvcc.*hello"):
        find_toolkit()
    fake_tools.nvcc.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    with pytest.raises(ToolchainError, match="status 3: broken"):
        find_toolkit()


def test_toolkit_without_runtime_headers(fake_tools: Any) -> None:
    (fake_tools.root / "cuda" / "include" / "cuda_runtime.h").unlink()
    with pytest.raises(ToolchainError, match=r"incomplete: cuda_runtime.h"):
        find_toolkit()


def test_include_directories_may_look_like_options(fake_tools: Any, tmp_path: Path) -> None:
    odd = tmp_path / "a dir-Intel"
    odd.mkdir()
    text = f'#$ INCLUDES="-I{odd}" "-I{tmp_path}"  \n#$ SYSTEM_INCLUDES="-isystem" "{odd}"  \n'
    assert discover._listed(text, "INCLUDES", "-I") == (odd, tmp_path)
    assert discover._listed(text, "SYSTEM_INCLUDES", "-isystem") == (odd,)


# The oldest toolkit for each arch and type: nvcc's release notes and CUTLASS's own conditions.
OLDEST = {
    ("sm75", "int8"): (12, 0),
    ("sm80", "int8"): (12, 0),
    ("sm86", "int8"): (12, 0),
    ("sm87", "int8"): (12, 0),
    ("sm89", "e4m3"): (12, 4),
    ("sm89", "int8"): (12, 0),
    ("sm90", "e4m3"): (12, 0),
    ("sm90", "int8"): (12, 0),
    ("sm100", "e4m3"): (12, 8),
    ("sm100", "int8"): (12, 8),
    ("sm103", "e4m3"): (12, 9),
    ("sm103", "int8"): (12, 9),
    ("sm110", "e4m3"): (13, 0),
    ("sm110", "int8"): (13, 0),
    ("sm120", "e4m3"): (12, 8),
    ("sm120", "int8"): (12, 8),
    ("sm121", "e4m3"): (12, 9),
    ("sm121", "int8"): (12, 9),
}
PAIRS = [(arch, operand) for arch in ARCHS.values() for operand in arch.operands]


@pytest.mark.parametrize(("arch", "operand"), PAIRS, ids=[f"{arch.name}-{operand.value}" for arch, operand in PAIRS])
def test_too_old_toolkit_is_refused(fake_tools: Any, arch: Arch, operand: DType) -> None:
    toolkit = find_toolkit()
    major, minor = OLDEST[arch.name, operand.value]
    require(replace(toolkit, version=(major, minor, 0)), arch, operand)
    require(replace(toolkit, version=(major, minor + 1, 0)), arch, operand)
    older = replace(toolkit, version=(major, minor - 1, 89) if minor else (major - 1, 9, 89))
    wanted = rf"{operand.value} kernels for {arch.name} \(target sm_{arch.target}\) need CUDA {major}\.{minor} or newer"
    with pytest.raises(ToolchainError, match=wanted):
        require(older, arch, operand)


@pytest.mark.parametrize("name", ["CUTLASS_W8A8_NVCC", "CUDA_HOME", "CUTLASS_W8A8_CUTLASS_DIR"])
def test_home_of_nobody_is_named(fake_tools: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "CUDA_HOME":
        monkeypatch.delenv("CUTLASS_W8A8_NVCC")
    monkeypatch.setenv(name, "~no-such-user/x")
    find = headers.find_headers if name == "CUTLASS_W8A8_CUTLASS_DIR" else find_toolkit
    with pytest.raises(ArgumentError, match=rf"{name}=~no-such-user/x: .*write the path out"):
        find()


def test_toolkits_own_list_decides(fake_tools: Any) -> None:
    toolkit = find_toolkit()
    assert "sm_90" in toolkit.targets and "sm_90a" not in toolkit.targets
    require(replace(toolkit, targets=frozenset({"sm_90a"})), SM90, DType.INT8)
    dropped = replace(toolkit, targets=toolkit.targets - {"sm_75"})
    with pytest.raises(ToolchainError, match=r"by its own list it does not compile for sm75 \(target sm_75\)"):
        require(dropped, SM75, DType.INT8)


def test_headers_digest_follows_names_and_contents(fake_tools: Any, tmp_path: Path) -> None:
    include = fake_tools.cutlass / "include"
    found = headers.find_headers()
    assert found is not None
    assert (found.include, found.version, found.digest) == (include, "4.2.0", headers.tree_digest(include))

    shutil.copytree(include, tmp_path / "elsewhere")
    assert headers.tree_digest(tmp_path / "elsewhere") == found.digest
    fake_tools.write_headers("changed")
    changed = headers.tree_digest(include)
    (include / "cute" / "tensor.hpp").rename(include / "cute" / "other.hpp")
    renamed = headers.tree_digest(include)
    (include / "cutlass" / "new.h").touch()
    assert len({found.digest, changed, renamed, headers.tree_digest(include)}) == 4


def test_headers_variable_takes_checkout_or_include_and_nothing_else(
    fake_tools: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_CUTLASS_DIR", str(fake_tools.cutlass / "include"))
    found = headers.find_headers()
    assert found is not None and found.include == fake_tools.cutlass / "include"
    monkeypatch.setenv("CUTLASS_W8A8_CUTLASS_DIR", str(tmp_path))
    with pytest.raises(ToolchainError, match="holds no CUTLASS headers"):
        headers.find_headers()


def test_without_headers_the_pin_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTLASS_W8A8_CUTLASS_DIR", raising=False)
    monkeypatch.setattr(headers.importlib.util, "find_spec", lambda name: None)
    assert headers.find_headers() is None
    assert headers.headers_digest() == headers.PINNED_HEADERS_DIGEST
    with pytest.raises(ToolchainError, match=r"pip install nvidia-cutlass==4\.2\.0\.0"):
        headers.require_headers()


@pytest.mark.skipif(find_spec("cutlass_library") is None, reason="nvidia-cutlass is not installed")
def test_pin_is_the_installed_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTLASS_W8A8_CUTLASS_DIR", raising=False)
    imported = "cutlass_library" in sys.modules
    found = headers.find_headers()
    assert found is not None
    assert (found.version, found.digest) == ("4.2.0", headers.PINNED_HEADERS_DIGEST)
    assert ("cutlass_library" in sys.modules) == imported
