"""The five numbers of a `Cost`, fitted to measured times by damped least squares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, fields

import torch

from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch.table import Cost, blocks, traffic

Extents = tuple[int, int, int]
Tensor = torch.Tensor

LOWER, UPPER = (0.01, 0.4, 0.0, 0.0, 1.0), (30.0, 1.4, 10.0, 6.0, 8.0)
STARTS = [(per_k, 0.9, per_wave, 2.0, 4.0) for per_k in (0.3, 1.0, 3.0) for per_wave in (0.5, 2.0)]
MIN_POINTS = len(fields(Cost))
# Relative error beyond which a point counts by its error rather than by its square: outliers do not steer the fit.
_ROBUST = 0.05
_ITERATIONS = 30
_STEP = 1e-4


def fit_cost(
    config: KernelConfig, times: Mapping[Extents, float], best: Mapping[Extents, float], sm_count: int
) -> tuple[Cost, float] | None:
    """The cost of ``config`` that explains its times best, and the root mean square of the relative error.

    Where a configuration is slower than another it does not matter how much slower it is thought to be, only that it is
    not thought to be fast: a modelled time above the measured one weighs by the square of the best time over the
    measured one, one below it in full.

    Args:
        config: the configuration.
        times: its microseconds by (m, n, k).
        best: microseconds of the fastest configuration, at each of these points.
        sm_count: multiprocessors of the device measured on.

    Returns:
        None if there are fewer points than numbers.
    """
    if len(times) < MIN_POINTS:
        return None
    features = _features(config, list(times), sm_count)
    measured = torch.tensor(list(times.values()), dtype=torch.float64)
    weights = (torch.tensor([best[point] for point in times], dtype=torch.float64) / measured) ** 2
    low, high = (torch.tensor(bound, dtype=torch.float64) for bound in (LOWER, UPPER))
    x = torch.tensor(STARTS, dtype=torch.float64)
    damping = torch.full((len(STARTS),), 1e-2, dtype=torch.float64)
    loss = _loss(_weighted(_errors(x, features, measured), weights))
    for _ in range(_ITERATIONS):
        step = _step(x, damping, features, measured, weights)
        tried = (x + step).clamp(low, high)
        new = _loss(_weighted(_errors(tried, features, measured), weights))
        better = new < loss
        x = torch.where(better[:, None], tried, x)
        loss = torch.where(better, new, loss)
        damping = torch.where(better, damping / 3, damping * 4).clamp(1e-9, 1e9)
    chosen = x[int(loss.argmin())]
    error = float(_errors(chosen[None], features, measured).square().mean().sqrt())
    return Cost(*(round(float(value), 3) for value in chosen)), error


def _features(config: KernelConfig, points: list[Extents], sm_count: int) -> Tensor:
    """What `Cost.time` makes of each point before the five numbers come in: waves, thousands of k, megabytes."""
    rows = [
        (-(-blocks(config, m, n) // sm_count), k / config.slices / 1000, traffic(m, n, k) / 1e6) for m, n, k in points
    ]
    return torch.tensor(rows, dtype=torch.float64).T


def predict(x: Tensor, features: Tensor) -> Tensor:
    """`Cost.time` for many costs [..., 5] and points, the same formula."""
    per_k, rest, per_wave, fixed, bandwidth = (column[..., None] for column in x.unbind(-1))
    waves, thousands, megabytes = features
    compute = (1 + rest * (waves - 1)) * per_k * thousands + per_wave * waves
    return torch.maximum(compute, megabytes / bandwidth) + fixed


def _errors(x: Tensor, features: Tensor, measured: Tensor) -> Tensor:
    return (predict(x, features) / measured).log()


def _weighted(errors: Tensor, weights: Tensor) -> Tensor:
    return errors * torch.where(errors < 0, 1.0, weights)


def _loss(residuals: Tensor) -> Tensor:
    return (((residuals / _ROBUST) ** 2 + 1).sqrt() - 1).sum(-1)


def _step(x: Tensor, damping: Tensor, features: Tensor, measured: Tensor, weights: Tensor) -> Tensor:
    """A Levenberg-Marquardt step of each start, the Jacobian by differences relative to each number's size."""
    sizes = _STEP * x.abs().clamp(min=0.01)
    moved = x[:, None, :] + torch.diag_embed(sizes)
    errors = _errors(x, features, measured)
    residuals = _weighted(errors, weights)
    slopes = (_errors(moved, features, measured) - errors[:, None, :]) / sizes[:, :, None]
    jacobian = slopes * torch.where(errors < 0, 1.0, weights)[:, None, :]
    # Numbers at a bound that would leave it are held, so that the others move as if it were fixed.
    robust = 1 / ((residuals / _ROBUST) ** 2 + 1).sqrt()
    gradient = (jacobian * (robust * residuals)[:, None, :]).sum(-1)
    low, high = torch.tensor(LOWER, dtype=x.dtype), torch.tensor(UPPER, dtype=x.dtype)
    held = ((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0))
    jacobian = torch.where(held[:, :, None], 0.0, jacobian)
    gradient = torch.where(held, 0.0, gradient)
    normal = (jacobian * robust[:, None, :]) @ jacobian.transpose(-1, -2)
    scale = normal.diagonal(dim1=-2, dim2=-1).clamp(min=1e-9)
    normal = normal + torch.diag_embed(damping[:, None] * scale + held.to(x.dtype))
    solved: Tensor = torch.linalg.solve(normal, gradient[..., None])
    return -solved[..., 0]


def numbers(cost: Cost) -> tuple[float, ...]:
    """The five numbers, in the order of `Cost`'s fields."""
    return tuple(float(value) for value in astuple(cost))
