"""Tables and summaries of a benchmark run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cutlass_w8a8.bench.providers import Provider
from cutlass_w8a8.bench.timing import Measurement

BANDS = {"M 1-64": (1, 64), "M 128-512": (128, 512), "M 1024-8192": (1024, 8192)}


def table(results: Sequence[Measurement], providers: Sequence[Provider]) -> str:
    """One line a point, microseconds by provider, and ours against the fastest comparable peer."""
    names = [p.name for p in providers if not p.forced]
    forced = {p.name for p in providers if p.forced}
    head = [
        "dtype",
        "N x K",
        "M",
        *names,
        "peer/ours",
        "TB/s",
        *(["fastest configuration", "its us"] if forced else []),
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    peers = peer_names(providers)
    for r in results:
        times = r.microseconds
        ratio = against(r, peers)
        ours = times.get("ours")
        size = r.point.n * r.point.k + r.point.m * r.point.k + 2 * r.point.m * r.point.n
        row = [r.point.dtype, f"{r.point.n} x {r.point.k}", str(r.point.m)]
        row += [f"{times[name]:.1f}" if name in times else ("error" if name in r.errors else "-") for name in names]
        row += ["-" if ratio is None else f"{ratio:.3f}", "-" if ours is None else f"{size / ours / 1e6:.2f}"]
        if forced:
            best = min((name for name in times if name in forced), key=times.__getitem__, default=None)
            row += ["-", "-"] if best is None else [best, f"{times[best]:.1f}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def peer_names(providers: Sequence[Provider]) -> list[str]:
    """Providers that compute the same thing and are not ours."""
    return [p.name for p in providers if p.comparable and p.name != "ours" and not p.forced]


def against(result: Measurement, peers: Sequence[str]) -> float | None:
    """Time of the fastest of ``peers`` over ours, above 1 where ours is faster; None if either is missing."""
    times = [result.microseconds[name] for name in peers if name in result.microseconds]
    ours = result.microseconds.get("ours")
    return min(times) / ours if times and ours else None


def summary(results: Sequence[Measurement], providers: Sequence[Provider]) -> list[dict[str, Any]]:
    """Geometric mean and worst point of peer / ours, by type, band of M and peer; ``best`` is the fastest peer."""
    rows = []
    peers = peer_names(providers)
    others = [p.name for p in providers if not p.comparable]
    choices = {name: [name] for name in peers} | ({"best": peers} if len(peers) > 1 else {})
    choices |= {name: [name] for name in others}
    for dtype in dict.fromkeys(r.point.dtype for r in results):
        for band, (low, high) in {**BANDS, "all": (1, 1 << 30)}.items():
            chosen = [r for r in results if r.point.dtype == dtype and low <= r.point.m <= high]
            for name, group in choices.items():
                ratios = {r.point.name: x for r in chosen if (x := against(r, group)) is not None}
                if not ratios:
                    continue
                worst = min(ratios, key=ratios.__getitem__)
                mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
                rows.append(
                    {
                        "dtype": dtype,
                        "band": band,
                        "peer": name,
                        "points": len(ratios),
                        "geometric mean": mean,
                        "worst": ratios[worst],
                        "worst point": worst,
                    }
                )
    return rows


def summary_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| dtype | M | peer | points | peer/ours, geometric mean | worst | worst point |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['dtype']} | {row['band']} | {row['peer']} | {row['points']} | {row['geometric mean']:.3f} | "
            f"{row['worst']:.3f} | {row['worst point']} |"
        )
    return "\n".join(lines)


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
