"""What a measurement must say about the machine it was taken on."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch


def facts(commit: str | None = None) -> dict[str, Any]:
    """Date, software versions and the GPU with its driver, clocks and power, as far as they can be learnt."""
    known: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        known |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
        }
        known |= gpu_state()
    return known


def gpu_state() -> dict[str, str]:
    """Driver, clocks, temperature and power from nvidia-smi; empty where it is missing."""
    queries = (
        "driver_version",
        "clocks.sm",
        "clocks.mem",
        "clocks.max.sm",
        "temperature.gpu",
        "power.draw",
        "power.limit",
    )
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(queries)}", "--format=csv,noheader"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(queries, (value.strip() for value in line.splitlines()[0].split(",")), strict=True))


def write_json(path: Path, content: object) -> None:
    """Write ``content`` to ``path`` in one step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as handle:
        json.dump(content, handle, indent=1)
    Path(handle.name).replace(path)
