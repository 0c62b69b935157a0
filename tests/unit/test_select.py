"""Selection: every problem is served, every row serves some problem, bounds are inclusive."""

from __future__ import annotations

import itertools

import pytest

from cutlass_w8a8.arch import ARCHS, Arch
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch import select, validate
from cutlass_w8a8.dispatch.select import TABLES
from cutlass_w8a8.dispatch.table import UNBOUNDED, Row, row
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import UnsupportedError
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.problem import Problem
from cutlass_w8a8.spec import KernelSpec

SERVED = [(arch, operand) for arch in ARCHS.values() for operand in TABLES[arch.name]]
IDS = [f"{arch.name}-{operand.value}" for arch, operand in SERVED]


def problem(arch: Arch, operand: DType, m: int, n: int, k: int) -> Problem:
    return Problem(arch, m, n, k, operand, DType.BF16, EpilogueSpec.of())


def corners(rows: tuple[Row, ...]) -> set[tuple[int, int, int]]:
    """Problems on both sides of every bound in ``rows``, and typical ones."""
    ms = {1, 16, 4096} | {bound + step for row in rows for bound in (row.max_m,) for step in (0, 1)}
    ns = {8, 4096, 28672} | {bound + step for row in rows for bound in (row.max_n, row.min_n) for step in (-1, 0, 1)}
    ks = {16, 4096} | {bound + step for row in rows for bound in (row.min_k,) for step in (-1, 0)}
    return {
        (m, n, k)
        for m, n, k in itertools.product(ms, ns, ks)
        if 0 < m < UNBOUNDED and 0 < n < UNBOUNDED and 0 < k < UNBOUNDED
    }


@pytest.mark.parametrize(("arch", "operand"), SERVED, ids=IDS)
def test_every_problem_gets_a_possible_configuration(arch: Arch, operand: DType) -> None:
    for shape in corners(TABLES[arch.name][operand]):
        config = select(problem(arch, operand, *shape))
        validate(KernelSpec(arch, operand, DType.BF16, EpilogueSpec.of(), config), config)


@pytest.mark.parametrize(("arch", "operand"), SERVED, ids=IDS)
def test_every_row_serves_some_problem(arch: Arch, operand: DType) -> None:
    rows = TABLES[arch.name][operand]
    serving = set()
    for shape in corners(rows):
        first = next(index for index, row in enumerate(rows) if row.fits(*shape))
        assert select(problem(arch, operand, *shape)) == rows[first].config
        serving.add(first)
    assert serving == set(range(len(rows)))


def test_bounds_are_inclusive() -> None:
    bounded = row("128x128x128_pingpong", max_m=64, min_n=512, max_n=1024, min_k=256)
    assert bounded.config == KernelConfig.parse("128x128x128_pingpong")
    inside = [(64, 512, 256), (1, 1024, 4096)]
    outside = [(65, 512, 256), (64, 511, 256), (64, 1025, 256), (64, 512, 255)]
    assert all(bounded.fits(*shape) for shape in inside)
    assert not any(bounded.fits(*shape) for shape in outside)


@pytest.mark.parametrize("m", [1, 2, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 8192])
def test_sm90_transposes_small_m_and_not_large_m(m: int) -> None:
    for operand in TABLES["sm90"]:
        config = select(problem(ARCHS["sm90"], operand, m, 4096, 4096))
        if m <= 64:
            # The MMA is 64 wide in the kernel's m: without the transposition most of it would be padding.
            assert config.swap_ab
        if m >= 512:
            assert not config.swap_ab and config.tile[0] * config.tile[1] >= 128 * 128


@pytest.mark.parametrize("m", [1, 8, 16, 17, 32, 64, 65, 128, 129, 256, 257, 8192])
def test_sm80_tiles_grow_with_m(m: int) -> None:
    config = select(problem(ARCHS["sm80"], DType.INT8, m, 4096, 4096))
    assert config.tile[0] <= max(16, 2 * m)
    assert not config.swap_ab
    if m >= 256:
        assert config.tile[:2] == (128, 128)


def test_unserved_types_are_refused_with_those_served() -> None:
    with pytest.raises(UnsupportedError, match=r"sm80 has no e4m3 kernels; it serves int8"):
        select(problem(ARCHS["sm80"], DType.E4M3, 16, 128, 128))


def test_arch_lists_the_operands_its_tables_serve() -> None:
    assert {name: set(arch.operands) for name, arch in ARCHS.items()} == {
        name: set(tables) for name, tables in TABLES.items()
    }
