"""Tensor parallelism: layers divided among the processes of a group, with the bits of the undivided ones.

A rank always holds whole rows of a weight [N, K]. Dividing K instead, as row parallel layers do elsewhere, would add
rounded parts up after the epilogue. Here the ranks exchange what they quantised, each multiplies it by its rows in the
ordinary kernel, and they exchange the results. Whatever the number of ranks, every result is one accumulator and one
epilogue, the zero point's adjustment a sum over all of K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from cutlass_w8a8.errors import ArgumentError
from cutlass_w8a8.nn import activations
from cutlass_w8a8.nn.activations import Activations
from cutlass_w8a8.nn.linear import W8A8Linear
from cutlass_w8a8.nn.operands import rows_of

Tensor = torch.Tensor


def shard(layer: W8A8Linear, rank: int, world: int, logical_widths: Sequence[int] = ()) -> W8A8Linear:
    """The output channels of a layer that are one rank's: its rows, scales, bias and zero point adjustments.

    Args:
        layer: the whole layer, with values.
        rank: 0 to ``world`` - 1.
        world: number of ranks.
        logical_widths: output channels of each shard of a fused layer, such as those of Q, K and V, in order; each of
            them is divided. None is one of all.

    Raises:
        ArgumentError: the ranks do not divide a width evenly, or the numbers do not fit.
    """
    widths = _widths(layer.out_features, world, logical_widths)
    if not 0 <= rank < world:
        raise ArgumentError(f"rank is {rank}; it must be 0 to {world - 1}")
    starts = [sum(widths[:i]) + rank * width // world for i, width in enumerate(widths)]
    return _rows(layer, torch.cat([torch.arange(s, s + w // world) for s, w in zip(starts, widths, strict=True)]))


class ColumnParallelW8A8(torch.nn.Module):
    """A layer whose output channels are divided among ranks; every rank has the whole input.

    Attributes:
        local: this rank's part; what it computes is the result, unless it is gathered.
        gather_output: whether the results of all ranks are brought together on each.
    """

    def __init__(
        self,
        layer: W8A8Linear,
        group: dist.ProcessGroup | None = None,
        *,
        logical_widths: Sequence[int] = (),
        gather_output: bool = False,
    ) -> None:
        """Take this rank's part of a layer.

        Args:
            layer: the whole layer, with values.
            group: of the ranks; None is all of them.
            logical_widths: as `shard` takes them.
            gather_output: whether the results are to be gathered, in the order of the whole layer's.

        Raises:
            ArgumentError: as `shard` says.
        """
        super().__init__()
        self.group, self.gather_output = group, gather_output
        self._world = dist.get_world_size(group)
        self._parts = [width // self._world for width in _widths(layer.out_features, self._world, logical_widths)]
        self.local = shard(layer, dist.get_rank(group), self._world, logical_widths)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K], the same on every rank, to [..., N / ranks], or [..., N] if gathered."""
        y: Tensor = self.local(x)
        if not self.gather_output or not y.numel():
            return y if not self.gather_output else y.new_empty((*y.shape[:-1], self._world * y.shape[-1]))
        every = _gather(y.reshape(-1, y.shape[-1]), self._world, self.group)
        whole = [part.permute(1, 0, 2).reshape(every.shape[1], -1) for part in torch.split(every, self._parts, dim=2)]
        return torch.cat(whole, dim=1).view(*y.shape[:-1], -1)


class RowParallelW8A8(torch.nn.Module):
    """A layer whose input is divided among ranks along K, as a column parallel layer leaves it; the result is whole.

    It has the bits of the undivided layer: scales and zero points are those of the whole input (the ranks take the
    maximum of their limits), and each rank's share is output channels, over all of K, of the quantised input gathered
    from all. For each row that moves K bytes in and the result's bytes out; an all-reduce moves the result's bytes
    twice, and of int32 sums, which alone would be exact, four bytes each, twice.

    Attributes:
        local: this rank's output channels.
        in_features, out_features: K, of which each rank is given its share, and N.
    """

    def __init__(self, layer: W8A8Linear, group: dist.ProcessGroup | None = None) -> None:
        """Take this rank's part of a layer.

        Args:
            layer: the whole layer, with values.
            group: of the ranks; None is all of them.

        Raises:
            ArgumentError: the ranks do not divide K evenly.
        """
        super().__init__()
        self.group = group
        self._world, rank = dist.get_world_size(group), dist.get_rank(group)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        if self.in_features % self._world:
            raise ArgumentError(
                f"in_features is {self.in_features}, which {self._world} ranks do not divide evenly; use another number"
            )
        # Equal shares, as gathering wants them; what is beyond N repeats the last channel and is cut off.
        share = -(-self.out_features // self._world)
        self.local = _rows(layer, torch.arange(rank * share, (rank + 1) * share).clamp(max=self.out_features - 1))

    def forward(self, x: Tensor) -> Tensor:
        """This rank's share of the input, [..., K / ranks], to the whole result, [..., N].

        Raises:
            ArgumentError: x does not fit, or asks for a gradient.
            W8A8Error: otherwise as `scaled_mm` says.
        """
        rows = rows_of(x, self.in_features // self._world)
        if not rows.shape[0]:
            return x.new_empty((*x.shape[:-1], self.out_features), dtype=self.local.dtype)
        a = self._quantize(rows)
        every = _gather(a.values.view(torch.int8), self._world, self.group)
        values = every.permute(1, 0, 2).reshape(rows.shape[0], self.in_features)
        values = activations.widened(values.view(a.values.dtype), self.local.weight.shape[1])
        y = self.local._multiply(Activations(values, a.scale, a.azp))[:, : self.local.out_features]
        whole = _gather(y.contiguous(), self._world, self.group).permute(1, 0, 2).reshape(rows.shape[0], -1)
        return whole[:, : self.out_features].view(*x.shape[:-1], self.out_features)

    def _quantize(self, rows: Tensor) -> Activations:
        """This rank's columns, by the scale and the zero point of all of them."""
        c = self.local.config
        if not c.dynamic:
            scale, azp = self.local.input_scale, self.local.input_azp
            return activations.quantize(
                rows, c.dtype, granularity="tensor", scale=scale, azp=azp, symmetric=c.symmetric
            )
        # A maximum need not keep NaN; an infinity it does, and that makes NaN of the result as well.
        reach = activations.limits(rows, str(c.granularity), c.symmetric).nan_to_num(nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(reach, dist.ReduceOp.MAX, group=self.group)
        return activations.by_limits(rows, c.dtype, reach, str(c.granularity), c.symmetric)


def _widths(n: int, world: int, logical_widths: Sequence[int]) -> tuple[int, ...]:
    widths = tuple(logical_widths) or (n,)
    if sum(widths) != n:
        raise ArgumentError(f"logical_widths {widths} add up to {sum(widths)}, but the layer has {n} output channels")
    for width in widths:
        if width % world or width < world:
            raise ArgumentError(f"{width} output channels are not divided evenly by {world} ranks; use another number")
    return widths


def _rows(layer: W8A8Linear, index: Tensor) -> W8A8Linear:
    """A layer of these output channels of another."""
    index = index.to(layer.weight.device)
    values = layer.weight.view(torch.int8)[:, : layer.in_features][index].view(layer.weight.dtype)
    scale = layer.weight_scale if layer.weight_scale.numel() == 1 else layer.weight_scale[index]
    return W8A8Linear.from_quantized(
        values,
        scale,
        None if layer.bias is None else layer.bias[index],
        config=layer.config,
        input_scale=layer.input_scale,
        input_azp=layer.input_azp,
        dtype=layer.dtype,
    ).train(layer.training)


def _gather(part: Tensor, world: int, group: dist.ProcessGroup | None) -> Tensor:
    """The contiguous [M, C] of each rank: [world, M, C]. As bytes, which every backend moves."""
    part = part.contiguous()
    every = torch.empty((world * part.shape[0], *part.shape[1:]), dtype=part.dtype, device=part.device)
    dist.all_gather_into_tensor(every.view(torch.uint8), part.view(torch.uint8), group=group)
    return every.view(world, *part.shape)
