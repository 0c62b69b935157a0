"""Which kernels serve the encoder's linear layers, and compiling them ahead of the first call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch

import cutlass_w8a8
from cutlass_w8a8 import pipeline
from cutlass_w8a8.spec import KernelSpec
from cutlass_w8a8.toolchain.progress import QUIET_VARIABLE

from .model import LINEAR_KINDS
from .w8a8 import OUT_DTYPE, QuantizedLinear, Variant, quantize_activations

# What one compiler process needs at its peak; more of them at once than memory allows would swap.
_COMPILER_GIB = 4


@dataclass(frozen=True)
class Served:
    """One linear layer's problem and the kernel dispatch chose for it.

    Attributes:
        variant: name of the variant.
        layer: kind of layer; all layers of a kind have the same shape.
        m, n, k: the problem.
        spec: the kernel.
        config: its configuration with the launch-time choices.
    """

    variant: str
    layer: str
    m: int
    n: int
    k: int
    spec: KernelSpec
    config: str

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.spec.name


def served(
    layers: dict[str, QuantizedLinear],
    variants: Sequence[Variant],
    token_counts: Iterable[int],
    capability: tuple[int, int],
) -> list[Served]:
    """Ask dispatch which kernel serves each kind of layer at each number of tokens.

    Args:
        layers: the quantised layers.
        variants: the ways to run them.
        token_counts: values of M.
        capability: the device's; need not be a device of this machine.
    """
    rows = []
    for variant in variants:
        for kind in LINEAR_KINDS:
            layer = layers[f"layers.0.{kind}"]
            b, scale_b = layer.weight(variant)
            k, n = b.shape
            for m in sorted(set(token_counts)):
                a = quantize_activations(torch.zeros(m, k, device=b.device), variant)
                choice = cutlass_w8a8.explain(
                    a.values,
                    b,
                    a.scale,
                    scale_b,
                    OUT_DTYPE,
                    bias=layer.bias,
                    azp_adj=None if a.azp is None else layer.azp_adj,
                    azp=a.azp,
                    capability=capability,
                )
                rows.append(Served(variant.name, kind, m, n, k, choice.spec, choice.config.name))
    return rows


@dataclass(frozen=True)
class Built:
    """One kernel, compiled or found in the cache.

    Attributes:
        name: the kernel's name.
        compiled: False if it came from the cache.
        seconds: how long that took.
        registers: per thread.
        spill_bytes: registers spilled to memory, loads and stores together; 0 is what one wants.
        source: path of its CUDA source.
    """

    name: str
    compiled: bool
    seconds: float
    registers: int
    spill_bytes: int
    source: str


def build(spec: KernelSpec) -> Built:
    """Compile ``spec``, or find it in the cache."""
    start = time.perf_counter()
    entry = pipeline.build(spec)
    used = entry.manifest["resources"]
    return Built(
        name=spec.name,
        compiled=entry.compiled,
        seconds=time.perf_counter() - start,
        registers=used["registers"],
        spill_bytes=used["spill_stores"] + used["spill_loads"],
        source=str(entry.source),
    )


def build_all(specs: Sequence[KernelSpec], done: Callable[[int, Built], None]) -> list[Built]:
    """Build several kernels at once, as many as cores and memory allow.

    Args:
        specs: distinct specs.
        done: called with the number built so far and the latest, as each is finished.
    """
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    # A compilation keeps two cores busy at first: the device half and the host half.
    jobs = max(1, min(cores // 2, int(memory / _COMPILER_GIB)))
    # The library's own progress displays, one for each compilation, would overwrite one another on a terminal.
    os.environ.setdefault(QUIET_VARIABLE, "1")
    built = []
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(build, spec) for spec in specs]):
            built.append(future.result())
            done(len(built), built[-1])
    return built
