"""What bounds a kernel on the device at hand: its memory, measured, and its tensor cores, by its data sheet."""

from __future__ import annotations

import statistics
from typing import Any

import torch

DATA_SHEETS = {  # dense T(FL)OP/s of 8-bit operands, fp8 and int8 (None: no such tensor cores), and TB/s
    "H200": (1979, 1979, 4.8),
    "GH200": (1979, 1979, 4.0),
    "H100 PCIe": (1513, 1513, 2.0),
    "H100": (1979, 1979, 3.35),
    "A100": (None, 624, 2.0),
    "L40S": (733, 733, 0.864),
    "L4": (242, 242, 0.3),
}
_COPY_BYTES = 2 << 30
_COPIES = 4


def data_sheet(gpu: str) -> dict[str, Any]:
    """Peak rates of ``gpu``, a name as torch gives it, by its vendor's data sheet; empty if it is not known."""
    words = gpu.replace("-", " ").split()
    for name, (fp8, int8, terabytes) in DATA_SHEETS.items():
        if all(word in words for word in name.split()):
            return {"model": name, "fp8 TFLOP/s": fp8, "int8 TOP/s": int8, "TB/s": terabytes}
    return {}


def copy_bandwidth() -> float:
    """TB/s read and written by copies of 2 GiB, less on a small device, on the current one: median of 9 rounds of 4."""
    size = min(_COPY_BYTES, torch.cuda.mem_get_info()[0] // 4)
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    rates: list[float] = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_COPIES):
            target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        rates.append(2 * size * _COPIES / start.elapsed_time(end) / 1e9)
    return statistics.median(rates)


def find() -> dict[str, Any]:
    """``copy TB/s``, measured, and ``data sheet``, what `data_sheet` knows."""
    return {"copy TB/s": copy_bandwidth(), "data sheet": data_sheet(torch.cuda.get_device_name())}
