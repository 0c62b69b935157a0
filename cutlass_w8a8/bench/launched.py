"""What a GPU was given to do: kernels, copies and fills, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile


def launched(run: Callable[[], object]) -> list[str]:
    """The names of the kernels, memory copies and memory fills that ``run`` enqueues on GPUs, in order.

    Raises:
        RuntimeError: the profiler recorded none.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    names = on_device(profiled.events() or ())
    if not names:
        raise RuntimeError(
            "torch.profiler recorded no work of a GPU: none was enqueued, or CUPTI is not available to this process"
        )
    return names


def on_device(events: Iterable[Any]) -> list[str]:
    """The names of those of a profile's events that are work of a GPU, by when they began."""
    # Equal, not the same: each event has an object of its own for its type.
    found = [event for event in events if event.device_type == DeviceType.CUDA]
    return [event.name for event in sorted(found, key=lambda event: event.time_range.start)]
