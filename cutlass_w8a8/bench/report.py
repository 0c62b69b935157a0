"""Tables and summaries of a benchmark run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from cutlass_w8a8.bench.results import Column, Measurement, Run
from cutlass_w8a8.bench.shapes import ORDERS, Point
from cutlass_w8a8.bench.smooth import STEP, steps

BANDS = {"M <= 64": (1, 64), "M 128-512": (128, 512), "M >= 1024": (1024, 1 << 40)}
ALL = "all M"
BEST = "best"


def table(results: Sequence[Measurement], columns: Sequence[Column]) -> str:
    """One line a point: microseconds by provider, ours against the fastest comparable peer, our error."""
    names = [c.name for c in columns if not c.forced]
    forced = {c.name for c in columns if c.forced}
    head = ["order", "dtype", "N x K", "M", *names, "peer/ours", "TB/s", "error/allowed"]
    head += ["fastest configuration", "its us"] if forced else []
    peers = peer_names(columns)
    lines = []
    for r in results:
        times, p = r.microseconds, r.point
        ratio, ours = against(r, peers), times.get("ours")
        row = [p.order, p.dtype, f"{p.n} x {p.k}", str(p.m)]
        row += [f"{times[name]:.1f}" if name in times else ("error" if name in r.errors else "-") for name in names]
        row.append("-" if ratio is None else f"{ratio:.3f}")
        # A chain moves more than the GEMM's bytes.
        row.append("-" if ours is None or p.order == "chain" else f"{moved(p) / ours / 1e6:.2f}")
        row.append(f"{worst_error(r.accuracy['ours']):.2f}" if "ours" in r.accuracy else "-")
        if forced:
            best = min((name for name in times if name in forced), key=times.__getitem__, default=None)
            row += ["-", "-"] if best is None else [best, f"{times[best]:.1f}"]
        lines.append(row)
    return markdown(head, lines)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def moved(point: Point) -> int:
    """Bytes that the GEMM must read and write: both 8-bit operands and the bf16 result."""
    return point.n * point.k + point.m * point.k + 2 * point.m * point.n


def worst_error(found: dict[str, float]) -> float:
    """The largest of an accuracy check's errors over what is allowed; more than 1 is wrong."""
    return max(value for name, value in found.items() if name.endswith("/ allowed"))


def peer_names(columns: Sequence[Column]) -> list[str]:
    """Providers that compute the same thing and are not ours."""
    return [c.name for c in columns if c.comparable and c.name != "ours" and not c.forced]


def against(result: Measurement, peers: Sequence[str]) -> float | None:
    """Time of the fastest of ``peers`` over ours, above 1 where ours is faster; None if either is missing."""
    times = [result.microseconds[name] for name in peers if name in result.microseconds]
    ours = result.microseconds.get("ours")
    return min(times) / ours if times and ours else None


def summary(results: Sequence[Measurement], columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Geometric mean and worst point of peer / ours, by order, type, band of M and peer.

    ``best`` is the fastest comparable peer at each point; peers that are not comparable are marked so.
    """
    rows = []
    peers = peer_names(columns)
    choices = {name: [name] for name in peers} | ({BEST: peers} if len(peers) > 1 else {})
    others = {c.name: [c.name] for c in columns if not c.comparable}
    for order, dtype in dict.fromkeys((r.point.order, r.point.dtype) for r in results):
        of_kind = [r for r in results if (r.point.order, r.point.dtype) == (order, dtype)]
        for band, (low, high) in {**BANDS, ALL: (1, 1 << 40)}.items():
            chosen = [r for r in of_kind if low <= r.point.m <= high]
            for name, group in {**choices, **others}.items():
                ratios = {r.point.name: x for r in chosen if (x := against(r, group)) is not None}
                if not ratios:
                    continue
                worst = min(ratios, key=ratios.__getitem__)
                rows.append(
                    {
                        "order": order,
                        "dtype": dtype,
                        "band": band,
                        "peer": name,
                        "comparable": name in choices,
                        "points": len(ratios),
                        "geometric mean": math.exp(sum(map(math.log, ratios.values())) / len(ratios)),
                        "worst": ratios[worst],
                        "worst point": worst,
                    }
                )
    return rows


def summary_table(rows: Sequence[dict[str, Any]]) -> str:
    """``rows`` of `summary`: a line for each order, type and band, a column for each peer."""
    peers = sorted(dict.fromkeys((row["peer"], row["comparable"]) for row in rows), key=lambda peer: not peer[1])
    cells: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["order"], row["dtype"], row["band"]), {})[row["peer"]] = row
    lines = []
    for key, by_peer in cells.items():
        line = [*key]
        line += [f"{by_peer[name]['geometric mean']:.3f}" if name in by_peer else "-" for name, _ in peers]
        comparable = [row for row in by_peer.values() if row["comparable"]]
        worst = by_peer.get(BEST) or min(comparable, key=lambda row: row["worst"], default=None)
        line += ["-", "-"] if worst is None else [f"{worst['worst']:.3f}", worst["worst point"]]
        lines.append(line)
    head = [name if comparable else f"({name})" for name, comparable in peers]
    return markdown(["order", "dtype", "M", *head, "worst", "worst point"], lines)


def error_lines(results: Sequence[Measurement]) -> list[str]:
    """Each distinct error once, with how often it came."""
    seen: dict[tuple[str, str], list[str]] = {}
    for r in results:
        for name, error in r.errors.items():
            seen.setdefault((name, error[:300]), []).append(r.point.name)
    return [
        f"{name}: no time at {len(points)} points (first {points[0]}): {error}"
        for (name, error), points in seen.items()
    ]


def wrong_lines(results: Sequence[Measurement], names: Iterable[str]) -> list[str]:
    """A line for each of ``names`` whose results were wrong somewhere."""
    lines = []
    for name in names:
        bad = {r.point.name: worst_error(r.accuracy[name]) for r in results if name in r.accuracy}
        bad = {point: error for point, error in bad.items() if not error <= 1}
        if bad:
            worst = max(bad, key=bad.__getitem__)
            lines.append(f"{name}: at {len(bad)} points; {bad[worst]:.3g} times the allowed error at {worst}")
    return lines


def own_failures(run: Run) -> list[str]:
    """Where ours, forced configurations included, has no time or a wrong result."""
    names = [c.name for c in run.columns if c.name == "ours" or c.forced]
    failed = [f"{name} at {r.point.name}: {r.errors[name]}" for r in run.points for name in names if name in r.errors]
    return failed + wrong_lines(run.points, names)


def text(run: Run, *, smooth: bool = False) -> str:
    """All that is printed at the end of a run."""
    parts = [table(run.points, run.columns)]
    rows = summary(run.points, run.columns)
    if rows:
        parts.append(
            "Time of a peer over ours, geometric means: above 1 ours is faster. In brackets: not like for like.\n\n"
            + summary_table(rows)
        )
    lines = [f"{order}: {ORDERS[order]}" for order in dict.fromkeys(r.point.order for r in run.points)]
    quantised = run.conditions.get("quantisation for peers")
    lines += [f"quantisation in front of peers: {quantised}"] if quantised else []
    lines += [f"{weight}: {', '.join(layers)}" for weight, layers in run.layers.items()]
    lines += [f"left out: {line}" for line in run.conditions.get("left out", ())]
    lines += [
        f"host time of an eager call, {name}: {us:.2f} us"
        for name, us in run.conditions.get("host microseconds", {}).items()
    ]
    lines += [f"missing: {name}: {reason}" for name, reason in run.missing.items()]
    lines += [f"error: {line}" for line in error_lines(run.points)]
    lines += [f"wrong: {line}" for line in wrong_lines(run.points, [c.name for c in run.columns])]
    if smooth:
        found = [str(step) for step in steps(run.points)]
        lines += [f"steps up of more than {STEP:.0%} between neighbouring M: {len(found) or 'none'}", *found]
    return "\n\n".join([*parts, "\n".join(lines)])
