"""Pictures of a run: where ours is faster, how near the device's ceilings it comes, how time grows with M."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutlass_w8a8.bench import report
from cutlass_w8a8.bench.ceilings import data_sheet
from cutlass_w8a8.bench.results import Measurement, Run
from cutlass_w8a8.errors import ArgumentError, ToolchainError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which remain apart to colour-blind eyes. Ours is black.
_COLOURS = {
    "ours": "#000000",
    "vllm": "#d55e00",
    "torch_row": "#0072b2",
    "torch_tensor": "#56b4e9",
    "int_mm": "#56b4e9",
    "int_mm_dequant": "#cc79a7",
    "triton": "#009e73",
    "bf16": "#999999",
}
_MARKERS = {"vllm": "s", "torch_row": "^", "torch_tensor": "v", "int_mm": "v", "int_mm_dequant": "D", "triton": "P"}
_FURTHEST = math.log2(1.6)
"""Where the heat map's colours end, either way."""
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "figure.titlesize": 12,
    "legend.frameon": False,
    # The same picture has the same bytes.
    "svg.hashsalt": "cutlass-w8a8",
}

Kind = tuple[str, str]
"""Type and order."""


def require_matplotlib() -> None:
    """Refuse to go on without matplotlib.

    Raises:
        ToolchainError: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ToolchainError(
            "--plots needs matplotlib, which is not installed; pip install 'cutlass-w8a8[bench]', or draw elsewhere "
            "with --from-json FILE --plots DIR"
        )


def render(run: Run, folder: Path, form: str = "svg") -> list[Path]:
    """Draw all pictures for which ``run`` has data.

    Args:
        run: what to draw.
        folder: where to; it is created.
        form: ``svg`` or ``png``.

    Returns:
        The files: ``speedup``, ``roofline`` and ``time``, each for a type and an order.

    Raises:
        ToolchainError: matplotlib is not installed.
        ArgumentError: the folder cannot be written to.
    """
    require_matplotlib()
    from matplotlib import rc_context

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with rc_context(_STYLE):
            for name, figure in figures(run):
                path = folder / f"{name}.{form}"
                metadata = {"Date": None} if form == "svg" else None
                figure.savefig(path, dpi=150, metadata=metadata)
                written.append(path)
    except OSError as error:
        raise ArgumentError(f"--plots {folder} cannot be written ({error}); give a directory of your own") from error
    return written


def figures(run: Run) -> Iterator[tuple[str, Figure]]:
    """Each picture with its name."""
    kinds: dict[Kind, list[Measurement]] = {}
    for r in run.points:
        kinds.setdefault((r.point.dtype, r.point.order), []).append(r)
    for kind, results in kinds.items():
        name = "-".join(kind)
        peers = {peer: [peer] for peer in report.peer_names(run.columns)}
        groups = ({"the fastest peer": list(peers)} if len(peers) > 1 else {}) | peers
        served = {label: group for label, group in groups.items() if any(report.against(r, group) for r in results)}
        if len(served) == 2:  # the only peer is the fastest
            served.pop("the fastest peer", None)
        if served:
            yield f"speedup-{name}", _speedup(run, kind, results, served)
        # A chain's time is that of two kernels, of which the GEMM's operations and bytes tell too little.
        if any("ours" in r.microseconds for r in results):
            if kind[1] != "chain":
                yield f"roofline-{name}", _roofline(run, kind, results)
            yield f"time-{name}", _time(run, kind, results)


def _figure(run: Run, kind: Kind, title: str, width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    machine = run.conditions.get("machine", {})
    parts = [machine.get("gpu"), f"torch {machine['torch']}" if "torch" in machine else ""]
    parts.append(machine.get("date", "")[:10])
    figure.suptitle(f"{title}, {kind[0]}, order: {kind[1]}", fontweight="bold")
    figure.supxlabel(", ".join(part for part in parts if part), fontsize=7, color="#666666")
    return figure


def _shapes(results: Sequence[Measurement]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((r.point.n, r.point.k) for r in results))


def _speedup(run: Run, kind: Kind, results: list[Measurement], groups: dict[str, list[str]]) -> Figure:
    import numpy as np

    shapes, batches = _shapes(results), sorted({r.point.m for r in results})
    width, height = 2.4 + 0.6 * len(batches), 0.9 + (0.9 + 0.3 * len(shapes)) * len(groups)
    figure = _figure(run, kind, "Speed-up of ours", width, height)
    axes = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for ax, (label, group) in zip(axes, groups.items(), strict=True):
        ratios = np.full((len(shapes), len(batches)), np.nan)
        for r in results:
            ratio = report.against(r, group)
            if ratio is not None:
                ratios[shapes.index((r.point.n, r.point.k)), batches.index(r.point.m)] = ratio
        # Logarithmic, so that half as fast is as far from white as twice as fast.
        image = ax.imshow(np.log2(ratios), cmap="RdBu", vmin=-_FURTHEST, vmax=_FURTHEST, aspect="auto")
        for (row, column), ratio in np.ndenumerate(ratios):
            if not np.isnan(ratio):
                colour = "white" if abs(math.log2(ratio)) > 0.6 * _FURTHEST else "black"
                ax.text(column, row, f"{ratio:.2f}", ha="center", va="center", fontsize=7.5, color=colour)
        mean = float(np.exp(np.nanmean(np.log(ratios))))
        ax.set_title(f"time of {label} / ours, geometric mean {mean:.3f}", loc="left")
        ax.set_xticks(range(len(batches)), [str(m) for m in batches])
        ax.set_yticks(range(len(shapes)), [f"{n} x {k}" for n, k in shapes])
        ax.set_ylabel("weight, N x K")
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    axes[-1].set_xlabel("M")
    bar = figure.colorbar(image, ax=list(axes), shrink=min(1.0, 1.6 / len(groups)), extend="both", pad=0.02)
    ticks = [0.67, 0.8, 1.0, 1.25, 1.5]
    bar.set_ticks([math.log2(tick) for tick in ticks], labels=[f"{tick:g}" for tick in ticks])
    bar.set_label("red: ours is slower     blue: ours is faster", fontsize=8)
    bar.outline.set_visible(False)
    return figure


def _roofline(run: Run, kind: Kind, results: list[Measurement]) -> Figure:
    from matplotlib.colors import LogNorm

    figure = _figure(run, kind, "Roofline of ours", 7.4, 5.2)
    ax = figure.subplots()
    timed = [r for r in results if "ours" in r.microseconds]
    intensity = [_operations(r) / report.moved(r.point) for r in timed]
    rates = [_operations(r) / r.microseconds["ours"] / 1e6 for r in timed]
    batches = [r.point.m for r in timed]
    low, high = min(intensity) / 1.6, max(intensity) * 1.6
    # Points lie on the roofs: they are drawn over the lines, whose names stand aside of them in the legend.
    peaks = _peaks(run, kind[0], max(rates))
    top = max(rate for _, rate, _ in peaks)
    streamed = max(report.moved(r.point) / r.microseconds["ours"] / 1e6 for r in timed)
    for label, terabytes, style in _bandwidths(run, streamed):
        ridge = top / terabytes
        ax.plot([low, ridge], [low * terabytes, top], color="black", linestyle=style, linewidth=1, label=label)
    for label, rate, style in peaks:
        ax.axhline(rate, color="#d55e00", linestyle=style, linewidth=1.2, label=label)
    norm = LogNorm(min(batches), max(*batches, min(batches) + 1))
    size = 28 if len(timed) <= 100 else 14
    points = ax.scatter(
        intensity, rates, s=size, c=batches, cmap="viridis_r", norm=norm, edgecolors="black", linewidths=0.4, zorder=3
    )
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(rates) / 2, 1.6 * top))
    ax.set_xlabel("operations for each byte that must be moved")
    ax.set_ylabel("TFLOP/s" if kind[0] == "fp8" else "TOP/s")
    ax.grid(which="major", color="#e4e4e4", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.legend(loc="lower right", fontsize=8)
    bar = figure.colorbar(points, ax=ax, pad=0.02)
    bar.set_label("M")
    ticks = sorted({batches[0], *(m for m in batches if m.bit_count() == 1)} - {2, 8})
    bar.set_ticks(ticks, labels=[str(m) for m in ticks])
    bar.ax.minorticks_off()
    return figure


def _operations(r: Measurement) -> int:
    return 2 * r.point.m * r.point.n * r.point.k


def _sheet(run: Run) -> dict[str, Any]:
    # A run of schema 1 named its GPU only.
    known: dict[str, Any] = run.ceilings.get("data sheet", {})
    return known or data_sheet(run.conditions.get("machine", {}).get("gpu", ""))


def _bandwidths(run: Run, reached: float) -> list[tuple[str, float, str]]:
    """TB/s, each with what it is and the style of its line."""
    copied, sheet = run.ceilings.get("copy TB/s"), _sheet(run).get("TB/s")
    found = [(f"memory: the most reached here, {reached:.2f} TB/s", reached, ":")]
    found += [(f"memory: a large copy, measured, {copied:.2f} TB/s", copied, "-")] if copied else []
    return found + ([(f"memory: data sheet, {sheet:g} TB/s", sheet, "--")] if sheet else [])


def _peaks(run: Run, dtype: str, reached: float) -> list[tuple[str, float, str]]:
    """T(FL)OP/s, each with what it is and the style of its line."""
    unit = {"fp8": "TFLOP/s", "int8": "TOP/s"}[dtype]
    sheet = _sheet(run).get(f"{dtype} {unit}")
    found = [(f"tensor cores: the most reached here, {reached:.0f} {unit}", reached, ":")]
    return found + ([(f"tensor cores: data sheet, {sheet} {unit}", sheet, "--")] if sheet else [])


def _time(run: Run, kind: Kind, results: list[Measurement]) -> Figure:
    shapes = _shapes(results)
    across = min(4, len(shapes))
    down = -(-len(shapes) // across)
    figure = _figure(run, kind, "Time of a call", max(5.0, 2.9 * across), 1.2 + 2.5 * down)
    axes = figure.subplots(down, across, squeeze=False, sharex=True).ravel()
    names = [c.name for c in run.columns if not c.forced and any(c.name in r.microseconds for r in results)]
    # Ours last, over the others.
    names.sort(key=lambda name: name == "ours")
    for ax, (n, k) in zip(axes, shapes, strict=False):
        of_shape = sorted((r for r in results if (r.point.n, r.point.k) == (n, k)), key=lambda r: r.point.m)
        _draw_times(ax, of_shape, names)
        ax.set_title(f"{n} x {k}", loc="left")
    for ax in axes[len(shapes) :]:
        ax.set_visible(False)
    for ax in axes[::across]:
        ax.set_ylabel("µs")
    for ax in axes[max(0, len(shapes) - across) : len(shapes)]:
        ax.set_xlabel("M")
        ax.tick_params(labelbottom=True)
    lines: dict[str, Any] = {}
    for ax in axes:
        lines |= {str(line.get_label()): line for line in ax.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside right upper")
    return figure


def _draw_times(ax: Axes, results: list[Measurement], names: list[str]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    dense = len(results) > 20
    for name in names:
        timed = [(r.point.m, r.microseconds[name]) for r in results if name in r.microseconds]
        if timed:
            ax.plot(
                *zip(*timed, strict=True),
                color=_COLOURS[name],
                linewidth=1.8 if name == "ours" else 1,
                marker=_MARKERS.get(name, "o"),
                markersize=2 if dense else 3.5,
                label=name,
            )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.grid(which="major", color="#e4e4e4", linewidth=0.6)
    ax.set_axisbelow(True)
