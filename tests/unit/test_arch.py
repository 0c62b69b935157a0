"""The support matrix: what each compute capability gets, or why it gets nothing."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8 import calls
from cutlass_w8a8.arch import ARCHS, SM80, SM90, Capability, Family, arch_named, match, runs_on
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ArgumentError, UnsupportedError
from cutlass_w8a8.runtime import device as devices
from cutlass_w8a8.runtime.device import Device, arch_of

OLD = r"is served by no kernels: the int8 tensor-core instructions they use begin with 7\.5"
NO_FP8 = r"has no e4m3 tensor cores, which begin with compute capability 8\.9; quantise to int8 instead"

# Capability: its arch (with "*" if made for another) and its families for int8 and e4m3, or the reason.
MATRIX: dict[Capability, tuple[str, str | Family, str | Family]] = {
    (7, 0): ("", OLD, OLD),
    (7, 2): ("", OLD, OLD),
    (7, 5): ("sm75", Family.MULTISTAGE, "sm75 " + NO_FP8),
    (8, 0): ("sm80", Family.MULTISTAGE, "sm80 " + NO_FP8),
    (8, 6): ("sm86", Family.MULTISTAGE, "sm86 " + NO_FP8),
    (8, 7): ("sm87", Family.MULTISTAGE, "sm87 " + NO_FP8),
    (8, 8): ("sm86*", Family.MULTISTAGE, "sm86 " + NO_FP8),
    (8, 9): ("sm89", Family.MULTISTAGE, Family.MULTISTAGE),
    (9, 0): ("sm90", Family.HOPPER, Family.HOPPER),
    (9, 1): ("sm89*", Family.MULTISTAGE, Family.MULTISTAGE),
    (10, 0): ("sm100", Family.BLACKWELL, Family.BLACKWELL),
    (10, 1): ("", r"is the name that drivers before CUDA 13", r"whose kernels are those of 11\.0; update the driver"),
    (10, 3): ("sm103", Family.MULTISTAGE, Family.BLACKWELL),
    (10, 7): ("sm89*", Family.MULTISTAGE, Family.MULTISTAGE),
    (11, 0): ("sm110", Family.BLACKWELL, Family.BLACKWELL),
    (12, 0): ("sm120", Family.MULTISTAGE, Family.GEFORCE),
    (12, 1): ("sm121", Family.MULTISTAGE, Family.GEFORCE),
    (13, 0): ("sm89*", Family.MULTISTAGE, Family.MULTISTAGE),
}


@pytest.mark.parametrize("capability", MATRIX, ids=lambda c: f"{c[0]}.{c[1]}")
def test_capability_gets_its_kernels_or_the_reason(capability: Capability) -> None:
    name, *served = MATRIX[capability]
    for dtype, operand, expected in zip(
        (torch.int8, torch.float8_e4m3fn), (DType.INT8, DType.E4M3), served, strict=True
    ):
        support = cutlass_w8a8.is_supported(capability, dtype)
        if isinstance(expected, Family):
            assert support and support.reason == "" and support.arch == name.rstrip("*")
            assert match(capability).arch.mainloop(operand).family is expected
            assert ("is not known" in support.note) == name.endswith("*")
            stand_in = operand is DType.INT8 and capability in ((10, 3), (12, 0), (12, 1))
            assert ("prefer" in support.note) == stand_in and bool(support.note) == (stand_in or "*" in name)
        else:
            assert not support and support.arch == "" and re.search(expected, support.reason)
            assert "compute capability {}.{}".format(*capability) in support.reason


def test_matrix_covers_every_arch_and_number_up_to_the_newest() -> None:
    known = {arch.capability for arch in ARCHS.values()}
    assert known < MATRIX.keys()
    assert {name for name, *_ in MATRIX.values() if name and "*" not in name} == ARCHS.keys()


def test_stand_in_kernels_run_by_the_rules_of_compatibility() -> None:
    for capability, (name, *_) in MATRIX.items():
        if name:
            arch = ARCHS[name.rstrip("*")]
            assert runs_on(arch, capability) and match(capability).arch is arch
    assert not runs_on(SM90, (10, 0)), "kernels for one chip run on that chip"
    assert not runs_on(SM90, (9, 1)) and not runs_on(SM80, (7, 5))
    assert runs_on(SM80, (8, 6)) and runs_on(SM80, (12, 0))


def test_archs_are_found_by_name_and_capability() -> None:
    for arch in ARCHS.values():
        assert arch_named(arch.name) is arch and match(arch.capability).arch is arch
    with pytest.raises(UnsupportedError, match="sm75, sm80, sm86, sm87, sm89, sm90, sm100, sm103, sm110, sm120, sm121"):
        arch_named("sm70")


def test_only_portable_kernels_carry_ptx() -> None:
    ptx = {arch.name for arch in ARCHS.values() if f"compute_{arch.target}]" in arch.gencode}
    assert ptx == {"sm75", "sm80", "sm86", "sm87", "sm89"}
    for arch in ARCHS.values():
        assert arch.gencode.startswith(f"arch=compute_{arch.target},code=")
        assert arch.target.rstrip("a") == "".join(map(str, arch.capability))


@pytest.mark.parametrize(
    ("capability", "dtype", "toolkit", "supported"),
    [
        ((8, 9), torch.float8_e4m3fn, (12, 3), False),
        ((8, 9), torch.float8_e4m3fn, (12, 4), True),
        ((8, 9), torch.int8, (12, 3), True),
        ((10, 3), torch.int8, (12, 8), False),
        ((11, 0), torch.int8, (12, 9), False),
        ((11, 0), torch.int8, (13, 0), True),
        ((13, 0), torch.float8_e4m3fn, (12, 4), True),
    ],
)
def test_toolkit_is_part_of_the_answer_where_it_is_asked(
    capability: Capability, dtype: torch.dtype, toolkit: tuple[int, int], supported: bool
) -> None:
    assert cutlass_w8a8.is_supported(capability, dtype)
    support = cutlass_w8a8.is_supported(capability, dtype, toolkit=toolkit)
    assert bool(support) is supported
    if not supported:
        assert re.search(r"kernels for sm\d+ need CUDA 1\d\.\d or newer to be compiled, not 12\.", support.reason)


def test_toolkit_must_be_two_numbers() -> None:
    with pytest.raises(ArgumentError, match=r"toolkit is '13.0'; pass \(major, minor\)"):
        cutlass_w8a8.is_supported((9, 0), torch.int8, toolkit="13.0")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "toolkit", "fp8", "block_fp8"),
    [
        (75, None, False, False),
        (80, (13, 0), False, False),
        (86, (13, 0), False, False),
        (89, (12, 3), False, False),
        (89, (12, 4), True, False),
        (89, None, True, False),
        (90, (11, 8), False, False),
        (90, (12, 0), True, True),
        (100, (12, 7), True, False),
        (100, (12, 8), True, True),
        (120, (12, 8), True, True),
        (121, None, True, True),
    ],
)
def test_gates_of_the_reference(capability: int, toolkit: tuple[int, int] | None, fp8: bool, block_fp8: bool) -> None:
    assert cutlass_w8a8.cutlass_scaled_mm_supports_fp8(capability, toolkit) is fp8
    assert cutlass_w8a8.cutlass_scaled_mm_supports_block_fp8(capability, toolkit) is block_fp8


# Devices --------------------------------------------------------------------------------------------------------------


def gpu(index: int, capability: Capability) -> Device:
    return Device(index, capability, sm_count=100, name=f"GPU of {capability}")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(devices.ARCH_VARIABLE, raising=False)
    arch_of.cache_clear()
    yield
    arch_of.cache_clear()


def test_each_device_gets_the_kernels_of_its_own_capability() -> None:
    assert [arch_of(gpu(i, c)).name for i, c in enumerate([(9, 0), (8, 9), (12, 0)])] == ["sm90", "sm89", "sm120"]


def test_unknown_device_is_spoken_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = gpu(0, (13, 0))
    monkeypatch.setattr(devices, "_warned", set())
    with pytest.warns(UserWarning, match=r"GPU of .*13\.0 is not known to this version; the portable kernels of sm89"):
        assert arch_of(unknown).name == "sm89"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert arch_of(unknown).name == "sm89"
        with cutlass_w8a8.use_arch("sm80"):
            pass
        assert arch_of(unknown).name == "sm89"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> tuple[Device, Device]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return gpu(0, (9, 0)), gpu(1, (9, 0))


def test_arch_is_forced_for_all_devices_or_one(
    two_gpus: tuple[Device, Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_gpus
    calls._kept[("stale",)] = None  # type: ignore[assignment]
    with cutlass_w8a8.use_arch("sm80"):
        assert ("stale",) not in calls._kept
        assert arch_of(first).name == arch_of(second).name == "sm80"
        for device in (1, "cuda:1", torch.device("cuda", 1)):
            with cutlass_w8a8.use_arch("sm89", device):
                assert [arch_of(first).name, arch_of(second).name] == ["sm80", "sm89"]
                with cutlass_w8a8.use_arch("sm75"):
                    assert arch_of(first).name == arch_of(second).name == "sm75", "the innermost holds"
        assert arch_of(second).name == "sm80"
    assert arch_of(first).name == "sm90" and not devices._forced
    monkeypatch.setenv(devices.ARCH_VARIABLE, "sm86")
    assert arch_of(first).name == "sm90", "the variable is read when a device is first used"
    arch_of.cache_clear()
    assert arch_of(first).name == "sm86"
    with cutlass_w8a8.use_arch("sm75"):
        assert arch_of(first).name == "sm75"


@pytest.mark.parametrize("device", [2, -1, True, 1.0, "cuda", "cpu", "cuda:7", "gpu", torch.device("cpu"), [0]])
def test_arch_is_forced_for_devices_there_are(two_gpus: object, device: Any) -> None:
    with pytest.raises(ArgumentError, match=r"this machine has 2"), cutlass_w8a8.use_arch("sm80", device):
        pass
    assert not devices._forced


def test_forced_arch_must_run_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        cutlass_w8a8.use_arch("sm100"),
        pytest.raises(
            UnsupportedError, match=r"use_arch: kernels of sm100 do not run on device 0 .*do: sm75, .*, sm90$"
        ),
    ):
        arch_of(gpu(0, (9, 0)))
    monkeypatch.setenv(devices.ARCH_VARIABLE, "sm90")
    with pytest.raises(UnsupportedError, match=r"CUTLASS_W8A8_ARCH=sm90: kernels of sm90 do not run on device 3"):
        arch_of(gpu(3, (8, 0)))
    monkeypatch.setenv(devices.ARCH_VARIABLE, "SM80")
    with pytest.raises(UnsupportedError, match=r"CUTLASS_W8A8_ARCH=SM80: arch 'SM80' is not one .*or unset it"):
        arch_of(gpu(3, (8, 0)))
    name: Any
    for name in ("hopper", ["sm80"]):
        with pytest.raises(UnsupportedError, match="is not one"), cutlass_w8a8.use_arch(name):
            pass


BAD_CAPABILITIES = [(9, 0, 0), (9,), (9, 0.5), (9, -1), (True, 0), [9, 0], "9.0", 90]


@pytest.mark.parametrize("capability", BAD_CAPABILITIES, ids=repr)
def test_capability_must_be_two_numbers(capability: Any) -> None:
    a, b, scale = torch.ones(16, 64, dtype=torch.int8), torch.ones(64, 64, dtype=torch.int8).t(), torch.ones(1)
    with pytest.raises(ArgumentError, match=r"capability is .*; pass \(major, minor\)"):
        cutlass_w8a8.is_supported(capability, torch.int8)
    with pytest.raises(ArgumentError, match=r"capability is .*; pass \(major, minor\)"):
        cutlass_w8a8.explain(a, b, scale, scale, capability=capability)


def test_integers_of_other_libraries_are_numbers_too() -> None:
    capability: Any = (np.int64(9), np.int64(0))
    a, b, scale = torch.ones(16, 64, dtype=torch.int8), torch.ones(64, 64, dtype=torch.int8).t(), torch.ones(1)
    assert cutlass_w8a8.is_supported(capability, torch.int8).arch == "sm90"
    assert cutlass_w8a8.explain(a, b, scale, scale, capability=capability).spec.arch is SM90
    stand_in = cutlass_w8a8.explain(a, b, scale, scale, capability=(13, 0))
    assert stand_in.spec.arch.name == "sm89" and "13.0 is not known" in stand_in.note


def test_multiprocessors_to_choose_for_can_be_named() -> None:
    a, b, scale = torch.ones(128, 4096, dtype=torch.int8), torch.ones(6144, 4096, dtype=torch.int8).t(), torch.ones(1)
    few, many = (cutlass_w8a8.explain(a, b, scale, scale, capability=(8, 9), sm_count=n).config for n in (48, 142))
    assert few != many
    for wrong in (0, -1, 1.5):
        with pytest.raises(ArgumentError, match="pass the number of multiprocessors"):
            cutlass_w8a8.explain(a, b, scale, scale, capability=(8, 9), sm_count=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a_dtype": "int8"}, "a_dtype is 'int8'; pass a torch.dtype"),
        ({"a_dtype": [torch.int8]}, "a_dtype is .*; pass a torch.dtype"),
        ({"out_dtype": None}, "out_dtype is None; pass a torch.dtype"),
        ({"azp": "tokens"}, "azp is 'tokens'; accepted: none, tensor, token"),
    ],
)
def test_support_is_asked_in_words_it_knows(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        cutlass_w8a8.is_supported((9, 0), **({"a_dtype": torch.int8} | arguments))


def test_gates_are_asked_in_words_they_know() -> None:
    capability: Any
    for gate in (cutlass_w8a8.cutlass_scaled_mm_supports_fp8, cutlass_w8a8.cutlass_scaled_mm_supports_block_fp8):
        for capability in ((9, 0), 9, "90"):
            with pytest.raises(ArgumentError, match="pass it as one number, such as 90"):
                gate(capability)
        with pytest.raises(ArgumentError, match="toolkit is 12080"):
            gate(90, 12080)  # type: ignore[arg-type]
