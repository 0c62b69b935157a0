"""What a fitted table is worth, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, log

from cutlass_w8a8.dispatch.tables import Table
from cutlass_w8a8.tune.fit import Loss

BANDS = ((1, 64), (65, 512), (513, 2**31))


def lines(table: Table, measured: Sequence[Loss], model: Sequence[Loss], unseen: Sequence[Loss]) -> Iterator[str]:
    """Lines about each section of ``table``.

    Args:
        table: the table.
        measured: what its choices lose at the points it was made of.
        model: what its costs alone lose there.
        unseen: what tables lose on weight shapes they were not made of.
    """
    yield f"{table.device}, {table.arch.name}, {table.sm_count} multiprocessors; lost against the best measured:"
    for (operand, overlap), section in table.sections.items():
        kernels = len({row.config.compiled for row in section.rows})
        yield f"{operand.value}, overlap {overlap}: {kernels} kernels, {len(section.rows)} with launch-time choices"
        for name, losses in (
            ("at the measured points", measured),
            ("there by the costs alone", model),
            ("on weight shapes left out", unseen),
        ):
            own = [loss for loss in losses if (loss.operand, loss.overlap) == (operand, overlap)]
            if own:
                yield f"  {name + ':':27}{summary(own)}"
        worst = sorted(
            (loss for loss in unseen if (loss.operand, loss.overlap) == (operand, overlap) and loss.ratio),
            key=lambda loss: -(loss.ratio or 0),
        )
        for loss in worst[:3]:
            extents = "x".join(map(str, loss.extents))
            yield f"    left out, {extents}: {loss.ratio:.2f} times the best, with {loss.config.name}"


def point_lines(losses: Sequence[Loss]) -> Iterator[str]:
    """A line for each point: what is chosen, and what that loses."""
    for loss in sorted(losses, key=lambda loss: (loss.operand, loss.overlap, loss.extents[1:], loss.extents)):
        lost = "not measured" if loss.ratio is None else f"{loss.ratio - 1:6.1%}"
        extents = "x".join(map(str, loss.extents))
        yield f"  {loss.operand.value:5} {loss.overlap:8} {extents:18} {lost}  {loss.config.name}"


def mean_loss(losses: Sequence[Loss]) -> float | None:
    """Geometric mean of the ratios that are known, less one; None if none is."""
    known = [log(loss.ratio) for loss in losses if loss.ratio is not None]
    return exp(sum(known) / len(known)) - 1 if known else None


def summary(losses: Sequence[Loss]) -> str:
    """Mean and worst loss, and the means by bands of M."""
    mean = mean_loss(losses)
    if mean is None:
        return "nothing to compare with"
    bands = []
    for low, high in BANDS:
        part = mean_loss([loss for loss in losses if low <= loss.extents[0] <= high])
        if part is not None:
            bands.append(f"M {low}{'-' + str(high) if high < 2**31 else ' on'} {part:.1%}")
    unknown = sum(loss.ratio is None for loss in losses)
    known = [loss.ratio for loss in losses if loss.ratio is not None]
    text = f"{mean:.1%} on average, {max(known) - 1:.1%} at worst, {len(known)} points ({', '.join(bands)})"
    return text + (f"; at {unknown} the choice was not measured" if unknown else "")
