"""What a GPU was given to do, out of a profile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from cutlass_w8a8.bench.launched import launched, on_device


def event(name: str, kind: DeviceType, start: int) -> SimpleNamespace:
    # An object of its own, as each event of a profile has.
    return SimpleNamespace(name=name, device_type=DeviceType(int(kind)), time_range=SimpleNamespace(start=start))


def test_kernels_copies_and_fills_are_listed_in_order() -> None:
    events = [
        event("cudaLaunchKernel", DeviceType.CPU, 0),
        event("w8a8_kernel", DeviceType.CUDA, 3),
        event("Memcpy DtoD (Device -> Device)", DeviceType.CUDA, 1),
        event("Memset (Device)", DeviceType.CUDA, 2),
        event("aten::add", DeviceType.CPU, 4),
    ]
    assert on_device(events) == ["Memcpy DtoD (Device -> Device)", "Memset (Device)", "w8a8_kernel"]


def test_work_of_the_host_is_left_out() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.ones(3) + 1
    events = profiled.events()
    assert events and all(each.device_type == DeviceType.CPU for each in events)
    assert on_device(events) == []


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_nothing_recorded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(RuntimeError, match="recorded no work of a GPU"):
        launched(lambda: torch.ones(3) + 1)
