"""Tensor parallel layers on two and four processes, against the undivided layer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cutlass_w8a8 import ArgumentError
from cutlass_w8a8.nn import ColumnParallelW8A8, RowParallelW8A8, W8A8Config, W8A8Linear, shard
from tests.unit.test_nn import AZP_STATIC, E4M3, MODES, float_linear, name_of, quantised, uneven

K, N = 72, 40
TRIED = [config for config in MODES if config.weight == "channel" or config.per_token]


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.dtype is expected.dtype and torch.equal(got.isnan(), expected.isnan()) and torch.equal(
        got.nan_to_num(), expected.nan_to_num()
    )  # fmt: skip


def models(world: int) -> list[str]:
    """As models use them: gate and up fused, their product, down."""
    done = []
    for config in (W8A8Config(), W8A8Config(symmetric=False), W8A8Config(E4M3)):
        up, down = quantised(config, float_linear(K, 64)), quantised(config, float_linear(32, K))
        halves = ColumnParallelW8A8(up, logical_widths=(32, 32)), RowParallelW8A8(down)

        def mlp(x: torch.Tensor, first: torch.nn.Module, second: torch.nn.Module) -> torch.Tensor:
            gate, value = first(x).chunk(2, dim=-1)
            return second(torch.nn.functional.silu(gate) * value)

        x = uneven(6, K).bfloat16()
        assert torch.equal(mlp(x, *halves), mlp(x, up, down))
        if world == 2 and not config.symmetric:
            compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x, *halves), mlp(x, up, down))
        done.append(f"mlp {name_of(config)}")
    return done


def everything(rank: int, world: int, folder: str) -> None:
    """What each process runs; it leaves the names of the checks it made."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    done = []
    for config in TRIED:
        for n in (N, 37):
            x = uneven(6, K, seed=2)
            layer = quantised(config, float_linear(K, n, bias=n == N))
            row = RowParallelW8A8(layer)
            assert torch.equal(row(x.chunk(world, dim=1)[rank]), layer(x)), (name_of(config), n)
            assert row.local.weight.shape[0] < layer.weight.shape[0]
            deep = row(x.view(2, 3, K).chunk(world, dim=2)[rank])
            assert torch.equal(deep, layer(x).view(2, 3, n))
            assert row(x[:0].chunk(world, dim=1)[rank]).shape == (0, n)
            if config.dynamic:
                # On one rank only; the others must know.
                x[1, 3] = float("nan")
                x[2, 5] = float("inf")
                got = row(x.chunk(world, dim=1)[rank])
                assert got[1:3].isnan().all() and same(got, layer(x))
            done.append(f"row {name_of(config)} {n}")

        layer, x = quantised(config, float_linear(K, N)), uneven(6, K, seed=2)
        y = layer(x)
        plain = ColumnParallelW8A8(layer)
        assert torch.equal(plain(x), y.chunk(world, dim=1)[rank])
        assert torch.equal(ColumnParallelW8A8(layer, gather_output=True)(x), y)
        widths = (16, 8, 16)
        fused = ColumnParallelW8A8(layer, logical_widths=widths, gather_output=True)
        assert torch.equal(fused(x.view(3, 2, K)), y.view(3, 2, N))
        assert fused(x[:0]).shape == (0, N)
        own = torch.cat([part.chunk(world, dim=1)[rank] for part in y.split(widths, dim=1)], dim=1)
        assert torch.equal(fused.local(x), own)
        done.append(f"column {name_of(config)}")

    done += models(world)

    # A group that is a part of the world.
    half = dist.new_group(list(range(world // 2)))
    if rank < world // 2:
        layer, x = quantised(W8A8Config()), uneven(6, 48)
        assert torch.equal(RowParallelW8A8(layer, half)(x.chunk(world // 2, dim=1)[rank]), layer(x))
    with pytest.raises(ArgumentError, match="in_features is 49, which"):
        RowParallelW8A8(quantised(W8A8Config(), float_linear(49, 8)))
    with pytest.raises(ArgumentError, match="requires a gradient"):
        RowParallelW8A8(quantised(W8A8Config()))(torch.zeros(2, 48 // world, requires_grad=True))
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(done))


@pytest.mark.parametrize("world", [2, 4])
def test_processes_give_the_bits_of_one(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    mp.spawn(everything, args=(world, str(tmp_path)), nprocs=world)
    expected = [f"{kind} {name_of(config)}{n}" for config in TRIED for kind, n in
                (("row", f" {N}"), ("row", " 37"), ("column", ""))]  # fmt: skip
    for rank in range(world):
        done = json.loads((tmp_path / f"{rank}.json").read_text())
        assert done[: len(expected)] == expected and len(done) == len(expected) + 3


def test_a_shard_holds_its_channels() -> None:
    layer = quantised(AZP_STATIC, float_linear(48, 40))
    parts = [shard(layer, rank, 2, (16, 24)) for rank in range(2)]
    rows = [[*range(8), *range(16, 28)], [*range(8, 16), *range(28, 40)]]
    for part, index in zip(parts, rows, strict=True):
        assert isinstance(part, W8A8Linear) and part.out_features == 20
        assert torch.equal(part.weight[:20], layer.weight[index])
        for name in ("weight_scale", "azp_adj", "bias"):
            assert torch.equal(getattr(part, name)[:20], getattr(layer, name)[index]), name
        assert part.input_scale == layer.input_scale and part.input_azp == layer.input_azp
    with pytest.raises(ArgumentError, match="add up to 39"):
        shard(layer, 0, 2, (16, 23))
    with pytest.raises(ArgumentError, match="15 output channels are not divided evenly by 2 ranks"):
        shard(layer, 0, 2, (15, 25))
    with pytest.raises(ArgumentError, match="rank is 2"):
        shard(layer, 2, 2)
