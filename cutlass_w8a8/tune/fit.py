"""From measured times to a tuned table, and what the table loses against the best that was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import log

from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch.table import UNBOUNDED, Corrected, Row
from cutlass_w8a8.dispatch.tables import Interval, Section, Table
from cutlass_w8a8.dispatch.tuned import pick, prior_of
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.tune.costs import fit_cost
from cutlass_w8a8.tune.cover import cover
from cutlass_w8a8.tune.records import Extents, Machine, Measurements, Times
from cutlass_w8a8.version import VERSION

WITHIN = 0.02
# A launch-time choice must gain this much over the kernel's defaults to become a row of its own: less is noise.
VARIANT_GAIN = 0.01
# From this M on a card's power decides, and times of one run tell no more than this; of kernels so close the one serves
# that is close at most points. One that had been 1 % ahead alone lost 15 % behind another kernel.
LARGE_M, NOISE = 4096, 0.015
# Where a kernel takes longer than this many times the best, it is not offered, nor is the cost's fit asked to hold.
NEAR = 1.25


@dataclass(frozen=True)
class Loss:
    """What a choice loses at a point.

    Attributes:
        operand, overlap: the section.
        extents: m, n, k.
        config: what was chosen.
        ratio: its time over that of the best configuration measured there; None if it was not measured there.
    """

    operand: DType
    overlap: str
    extents: Extents
    config: KernelConfig
    ratio: float | None


def fit_table(measured: Measurements, within: float = WITHIN) -> Table:
    """The tuned table of ``measured``: few kernels that lose at most ``within`` at each point, costs for all else.

    An operand's kernels are chosen for all overlaps together, since they are the same binaries.
    """
    sections = {}
    for operand in dict.fromkeys(operand for operand, _ in measured.times):
        kernels = choose_kernels(measured, operand, within)
        for (served, overlap), times in measured.times.items():
            if served is operand:
                sections[operand, overlap] = _section(times, kernels, measured.machine.sm_count)
    machine = measured.machine
    return Table(
        machine.device, machine.arch, machine.sm_count, _conditions(machine), {key: sections[key] for key in sections}
    )


def choose_kernels(measured: Measurements, operand: DType, within: float) -> list[KernelConfig]:
    """The kernels that cover the points of ``operand``.

    For fp8 they cover them without those that divide K as well: batch-invariant calls do without these.
    """
    points = {
        (overlap, extents): configs
        for (served, overlap), times in measured.times.items()
        if served is operand
        for extents, configs in times.items()
    }
    kernels = cover(points, within)
    if operand is DType.E4M3 and any(config.divides_k for config in _variants(points.values(), kernels)):
        whole = {
            point: {config: us for config, us in configs.items() if not config.divides_k}
            for point, configs in points.items()
        }
        whole_kernels = [kernel for kernel in kernels if any(kernel in map(_compiled, c) for c in whole.values())]
        kernels += [kernel for kernel in cover(whole, within, whole_kernels) if kernel not in kernels]
    return kernels


def losses(table: Table, measured: Measurements, by_model: bool = False) -> list[Loss]:
    """What ``table`` loses at each point of ``measured``; ``by_model``: if it chose by its costs alone."""
    found = []
    for (operand, overlap), times in measured.times.items():
        section = table.sections.get((operand, overlap))
        if section is None:
            continue
        usable = {row.config: row for row in section.rows}
        asked = Section(section.rows, {}) if by_model else section
        prior = prior_of(table.arch, operand, table.sm_count)
        for extents, configs in times.items():
            row = pick(asked, usable, *extents, table.sm_count, prior)
            if row is not None:
                us = configs.get(row.config, configs.get(row.config.compiled))
                ratio = None if us is None else us / min(configs.values())
                found.append(Loss(operand, overlap, extents, row.config, ratio))
    return found


def unseen_losses(measured: Measurements, within: float = WITHIN) -> Iterator[Loss]:
    """What a table loses on weight shapes it has not seen: each shape in turn is left out, then served by the rest.

    Kernels are chosen without the shape, too. Times are measured ones, so a choice that was not measured at a point
    (`Loss.ratio` None) cannot be judged.
    """
    shapes = sorted({extents[1:] for times in measured.times.values() for extents in times})
    for shape in shapes if len(shapes) > 1 else []:
        yield from losses(fit_table(measured.without(shape), within), measured.only(shape), by_model=True)


def _conditions(machine: Machine) -> dict[str, str]:
    wanted = {"driver": "driver_version", "date": "date", "torch": "torch", "cuda": "cuda", "commit": "commit"}
    known = {name: str(machine.facts[fact]) for name, fact in wanted.items() if machine.facts.get(fact)}
    return known | {"package": VERSION}


def _section(times: Times, kernels: Collection[KernelConfig], sm_count: int) -> Section:
    configs = _variants(times.values(), kernels)
    rows = {row.config: row for config in configs if (row := _row(config, times, sm_count)) is not None}
    known = {extents: {config: us for config, us in at.items() if config in rows} for extents, at in times.items()}
    close = {extents: _close(at, extents[0]) for extents, at in known.items() if at}
    often = Counter(config for (m, *_), near in close.items() if m >= LARGE_M for config in near)
    measured: dict[tuple[int, int], tuple[Interval, ...]] = {}
    for shape in dict.fromkeys(extents[1:] for extents in close):
        winners: list[Interval] = []
        for extents in sorted(extents for extents in close if extents[1:] == shape):
            times_here = known[extents]
            winner = rows[min(close[extents], key=lambda config: (-often[config], times_here[config], config.name))]
            if winners and winners[-1].row is winner:
                winners[-1] = Interval(winners[-1].first, extents[0], winner)
            else:
                winners.append(Interval(extents[0], extents[0], winner))
        measured[shape] = tuple(winners)
    return Section(tuple(rows.values()), measured)


def _close(known: Mapping[KernelConfig, float], m: int) -> list[KernelConfig]:
    """The fastest of one point; at large M all that measuring cannot tell from it."""
    limit = min(known.values()) * ((1 + NOISE) if m >= LARGE_M else 1)
    return [config for config, us in known.items() if us <= limit]


def _compiled(config: KernelConfig) -> KernelConfig:
    return config.compiled


def _variants(points: Iterable[Mapping[KernelConfig, float]], kernels: Collection[KernelConfig]) -> list[KernelConfig]:
    """The launch-time choices of ``kernels`` that are worth a row, in the order of kernels, defaults first.

    Each kernel has its defaults: what was not measured, and calls that do without the faster kernels, go by them.
    """
    found: dict[KernelConfig, set[KernelConfig]] = {kernel: {kernel} for kernel in kernels}
    for configs in points:
        known = {config: us for config, us in configs.items() if config.compiled in found}
        if not known:
            continue
        winner = min(known, key=lambda config: (known[config], config.name))
        default = known.get(winner.compiled)
        gained = default is None or known[winner] < default * (1 - VARIANT_GAIN)
        found[winner.compiled].add(winner if gained else winner.compiled)
    return [config for configs in found.values() for config in sorted(configs, key=lambda c: (c != c.compiled, c.name))]


def _row(config: KernelConfig, times: Times, sm_count: int) -> Row | None:
    """The row of ``config``: bounds of M from where it is near the best to the next M where it is not, and its cost."""
    own = {extents: configs[config] for extents, configs in times.items() if config in configs}
    best = {extents: min(times[extents].values()) for extents in own}
    near = [extents[0] for extents, us in own.items() if us <= NEAR * best[extents]]
    if not near:
        return None
    all_m = sorted({extents[0] for extents in times})
    below = [m for m in all_m if m < min(near)]
    above = [m for m in all_m if m > max(near)]
    min_m, max_m = below[-1] + 1 if below else 0, above[0] - 1 if above else UNBOUNDED
    # Where most of a cluster has no rows of M, a shape may favour it, but that does not hold for others.
    extent, cluster = (config.tile[1], config.cluster[1]) if config.swap_ab else (config.tile[0], config.cluster[0])
    min_m = max(min_m, extent * (cluster // 2) + 1) if cluster > 1 else min_m
    inside = {extents: us for extents, us in own.items() if min_m <= extents[0] <= max_m}
    fitted = fit_cost(config, inside, best, sm_count) or fit_cost(config, own, best, sm_count)
    if fitted is None:
        return None
    cost, _ = fitted
    residuals = tuple(
        sorted((*extents, round(log(us / cost.time(config, *extents, sm_count)), 3)) for extents, us in own.items())
    )
    min_k = config.tile[2] * config.slices if config.slices > 1 else 0
    return Row(config, Corrected(cost, residuals), min_m=min_m, max_m=max_m, min_k=min_k)
