"""The text of quantisation kernels, run on the CPU: every bit against the closed form, on all layouts and any row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutlass_w8a8.arch import SM90
from cutlass_w8a8.dispatch import quant_symbols
from cutlass_w8a8.request import FROM_TORCH
from cutlass_w8a8.spec import QuantSpec, Scheme
from tests import quant_cases, quant_reference
from tests.emulation import Emulated

pytestmark = pytest.mark.compile

Make = Callable[[torch.dtype, torch.dtype, str], Emulated]
# Elements of one thread, of a warp, of a block, of several; vectors that a thread holds once to eight times.
SHAPES = (
    (1, 1), (1, 5), (3, 8), (2, 17), (5, 33), (7, 64), (1, 257), (40, 24), (3, 1000), (130, 40), (2, 4104), (33, 1040),
    (1, 8200), (1, 16392), (1, 36000), (1, 65543), (1, 70001), (5, 8192),
)  # fmt: skip
# As many vectors as take each entry point: without gaps, and with gaps between rows too long for four a thread.
ALIGNED = [((1, k), quant_cases.Layout(out=(0, 0))) for k in (10000, 20000, 40000)]
ALIGNED += [((2, k), quant_cases.Layout(x_pad=16, out=(16, 16))) for k in (20480, 40960)]
LAYOUTS = tuple(quant_cases.Layout(x.x_pad, x.x_offset, x.out or (0, 0)) for x in quant_cases.LAYOUTS)
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Make:
    kernels: dict[tuple[torch.dtype, torch.dtype, str], Emulated] = {}

    def make(source: torch.dtype, target: torch.dtype, scheme: str) -> Emulated:
        key = (source, target, scheme)
        if key not in kernels:
            spec = QuantSpec(SM90, FROM_TORCH[source], FROM_TORCH[target], Scheme(scheme))
            kernels[key] = Emulated(spec, tmp_path_factory.mktemp("emulated"), sm_count=1)
        return kernels[key]

    return make


def check(kernel: Emulated, x: torch.Tensor, out: torch.Tensor, seed: int) -> None:
    """One call into poisoned buffers equals the closed form."""
    scheme, (m, k) = kernel.spec.scheme.value, x.shape
    options = quant_cases.given(scheme, seed)
    wanted = quant_reference.quantize(x, out.dtype, scheme, **options)
    shape = (1,) if kernel.spec.scheme.whole else (m, 1)
    scale = options.get("scale", torch.full(shape, -7.0))
    azp = options.get("azp", torch.full(shape, -7, dtype=torch.int32)) if kernel.spec.scheme.azp else None
    kernel(x, out, scale, azp)
    for got, want in zip((out.view(torch.uint8), scale.view(torch.int32), azp), wanted, strict=True):
        if got is None or want is None:
            assert got is want
        else:
            wrong = (got != want).nonzero()
            assert not len(wrong), f"{scheme} {m}x{k} {seed}: {len(wrong)} differ, first at {wrong[0].tolist()}"


@pytest.mark.parametrize(("scheme", "target"), quant_cases.WAYS)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_text_computes_the_closed_form_on_every_layout(
    source: torch.dtype, scheme: str, target: torch.dtype, emulated: Make
) -> None:
    kernel = emulated(source, target, scheme)
    cases = [
        (shape, LAYOUTS[(number + 4 * turn) % len(LAYOUTS)]) for number, shape in enumerate(SHAPES) for turn in (0, 1)
    ]
    for seed, ((m, k), layout) in enumerate(cases + ALIGNED):
        x = quant_cases.laid_out(quant_cases.values(scheme, m, k, source, seed), layout.x_pad, layout.x_offset)
        pad, offset = layout.out or (0, 0)
        buffer = torch.full((offset + m * (k + pad) + 64,), quant_cases.POISON, dtype=torch.uint8)
        check(kernel, x, buffer.view(target).as_strided((m, k), (k + pad, 1), offset), seed)
        outside = torch.ones_like(buffer, dtype=torch.bool)
        outside.as_strided((m, k), (k + pad, 1), offset).fill_(False)
        assert (buffer[outside] == quant_cases.POISON).all()
    assert kernel.launched == set(quant_symbols(Scheme(scheme)))


@pytest.mark.parametrize(("scheme", "target"), quant_cases.WAYS)
@pytest.mark.parametrize("source", quant_cases.SOURCES)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bits_become_what_the_closed_form_says(
    source: torch.dtype, scheme: str, target: torch.dtype, emulated: Make, data: st.DataObject
) -> None:
    """Rows of arbitrary bits: NaNs of every kind, infinities, denormals, values next to each other or far apart."""
    width = 8 * source.itemsize
    special = [0, 1, (1 << width - 1), (1 << width) - 1, (1 << width - 1) - 1]
    special += [int(torch.tensor(x).to(source).view(BITS[source]).item()) for x in (1.0, -1.0, 0.5, 127.5, 3e4, 1e-7)]
    special += [int(torch.tensor(x).to(source).view(BITS[source]).item()) for x in (float("inf"), float("-inf"))]
    element = st.one_of(st.integers(0, (1 << width) - 1), st.sampled_from(special).map(lambda x: x % (1 << width)))
    near = st.integers(0, (1 << width) - 1).flatmap(
        lambda base: st.lists(st.integers(-3, 3).map(lambda by: (base + by) % (1 << width)), min_size=1, max_size=40)
    )
    bits = data.draw(st.one_of(st.lists(element, min_size=1, max_size=40), near))
    m = data.draw(st.sampled_from([m for m in range(1, 6) if len(bits) % m == 0]))
    signed = [bit - (1 << width) if bit >> (width - 1) else bit for bit in bits]
    x = torch.tensor(signed, dtype=BITS[source]).view(source).view(m, -1)
    out = torch.empty(x.shape, dtype=target)
    check(emulated(source, target, scheme), x, out, data.draw(st.integers(0, 65)))
