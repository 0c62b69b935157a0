"""Trees: what each walker makes of them, and that one more formula needs one function and nothing else."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest
import torch

from cutlass_w8a8 import cli, emit
from cutlass_w8a8.arch import SM80, SM90
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import UnsupportedError
from cutlass_w8a8.evt import cppgen, draw
from cutlass_w8a8.evt.arguments import arguments
from cutlass_w8a8.evt.epilogues import FORMULAS, EpilogueSpec, Operands, ScaleA, ScaleB, formula
from cutlass_w8a8.evt.evaluate import evaluate
from cutlass_w8a8.evt.tree import Accum, Broadcast, Compute, Expr, Load, Op, Tree, fma, maximum
from cutlass_w8a8.spec import KernelSpec

EPILOGUES = [EpilogueSpec(*parts) for parts in itertools.product(FORMULAS, ScaleA, ScaleB)]
FORMULA_TEXTS = {
    "scaled": "(scale_a[m] * (scale_b[n] * acc[m,n]))",
    "scaled-bias": "(fma(scale_a[m], (scale_b[n] * acc[m,n]), bias[n]))",
    "azp": "(scale_a[m] * (scale_b[n] * (acc[m,n] - azp_adj[n])))",
    "azp-bias": "(fma(scale_a[m], (scale_b[n] * (acc[m,n] - azp_adj[n])), bias[n]))",
    "azp-token": "(scale_a[m] * (scale_b[n] * (acc[m,n] - (azp[m] * azp_adj[n]))))",
    "azp-token-bias": "(fma(scale_a[m], (scale_b[n] * (acc[m,n] - (azp[m] * azp_adj[n]))), bias[n]))",
}


def tree_of(epilogue: EpilogueSpec, out: DType = DType.BF16) -> Tree:
    return epilogue.tree(DType.INT32, out)


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: e.name)
def test_walkers_agree_on_nodes_and_operands(epilogue: EpilogueSpec) -> None:
    tree = tree_of(epilogue)
    nodes = list(tree.postorder())
    names = cppgen._names(tree)
    assert len(nodes) == len(set(nodes)) == len(set(names.values())) == len(names)
    assert nodes[-1] is tree.root and sum(isinstance(node, Accum) for node in nodes) == 1
    position = {node: index for index, node in enumerate(nodes)}
    assert all(position[child] < position[node] for node in nodes for child in node.children)
    # Operands in the order of the formula's text, and likewise in the arguments.
    operands = [load.name for load in tree.loads]
    assert operands == re.findall(r"scale_a|scale_b|azp_adj|azp|bias", draw.formula(tree))
    assert operands == re.findall(r"\{(scale_a|scale_b|azp_adj|azp|bias)[,}]", arguments(tree))
    text = draw.text(tree)
    assert len(text.splitlines()) == 3 + len(nodes)
    assert len(re.findall(r"^  \w+\[", draw.mermaid(tree), re.MULTILINE)) == len(nodes) + 1


@pytest.mark.parametrize("name", FORMULAS)
def test_formula_reads_as_written(name: str) -> None:
    tree = tree_of(EpilogueSpec(name, ScaleA.TOKEN, ScaleB.CHANNEL))
    assert draw.formula(tree) == "D[m,n] = bf16" + FORMULA_TEXTS[name]


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: e.name)
def test_arguments_are_balanced_and_children_first(epilogue: EpilogueSpec) -> None:
    text = re.sub(r"//.*", "", arguments(tree_of(epilogue), end=";"))
    assert text.count("{") == text.count("}") and text.rstrip().endswith("};")
    for scalar, name in (
        (epilogue.scale_a is ScaleA.TENSOR, "scale_a"),
        (epilogue.scale_b is ScaleB.TENSOR, "scale_b"),
    ):
        assert (f"{{{{float(0)}}, {{{name}}}, {{}}}}" in text) == scalar
        assert (f"{{{name}, float(0), {{}}}}" in text) != scalar


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: e.name)
def test_name_is_read_back(epilogue: EpilogueSpec) -> None:
    assert EpilogueSpec.parse(epilogue.name) == epilogue


def test_of_names_the_formula() -> None:
    assert EpilogueSpec.of().name == "scaled_token_channel"
    assert EpilogueSpec.of(azp="token", bias=True, scale_b="tensor").name == "azp-token-bias_token_tensor"
    assert {
        EpilogueSpec.of(azp=azp, bias=bias).formula for azp in ("none", "tensor", "token") for bias in (0, 1)
    } == set(FORMULAS)


def test_unknown_formula_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="scaled, scaled-bias, azp"):
        EpilogueSpec("unscaled", ScaleA.TOKEN, ScaleB.CHANNEL)


@pytest.mark.parametrize("name", FORMULAS)
def test_zero_points_need_an_integer_accumulator(name: str) -> None:
    epilogue = EpilogueSpec(name, ScaleA.TOKEN, ScaleB.CHANNEL)
    if "azp" in name:
        with pytest.raises(UnsupportedError, match=name):
            epilogue.tree(DType.FP32, DType.BF16)
    else:
        assert epilogue.tree(DType.FP32, DType.BF16).loads


def test_integer_arithmetic_stays_integer_and_meets_floats_once() -> None:
    acc, azp = Accum(DType.INT32), Load("azp", DType.INT32, Broadcast.COLUMN)
    scale = Load("scale_a", DType.FP32, Broadcast.COLUMN)
    assert (acc - azp).dtype is DType.INT32
    assert (scale * (acc - azp)).dtype is DType.FP32
    assert fma(acc, azp, azp).dtype is DType.INT32
    assert Broadcast.ROW.transposed is Broadcast.COLUMN and Broadcast.COLUMN.transposed is Broadcast.ROW
    assert Broadcast.SCALAR.transposed is Broadcast.SCALAR


def test_equal_labels_get_distinct_names() -> None:
    scale, other = (Load(name, DType.FP32, Broadcast.ROW) for name in ("scale_b", "bias"))
    once = scale * Accum(DType.INT32)
    tree = Tree(maximum(scale * once, other) + scale * (scale * once), DType.BF16)
    names = list(cppgen._names(tree).values())
    assert len(names) == len(set(names)) == len(list(tree.postorder()))


# One more epilogue ----------------------------------------------------------------------------------------------------


@pytest.fixture
def clamped() -> Iterator[EpilogueSpec]:
    """A formula the package does not have, written as a user would: the dequantised value, but at least ``bias``."""

    @formula("clamped")
    def _clamped(x: Operands) -> Expr:
        return maximum(x.scale_a * (x.scale_b * (x.acc - x.azp_adj)), x.bias)

    yield EpilogueSpec("clamped", ScaleA.TOKEN, ScaleB.TENSOR)
    del FORMULAS["clamped"]


def test_new_formula_is_drawn(clamped: EpilogueSpec) -> None:
    text = draw.text(tree_of(clamped))
    assert "D[m,n] = bf16(max((scale_a[m] * (scale_b * (acc[m,n] - azp_adj[n]))), bias[n]))" in text
    assert "max: fp32" in text and "max: fp32" in draw.mermaid(tree_of(clamped))


def test_new_formula_is_evaluated(clamped: EpilogueSpec) -> None:
    generator = torch.Generator().manual_seed(0)
    acc = torch.randint(-(2**20), 2**20, (5, 16), dtype=torch.int32, generator=generator)
    operands = {
        "scale_a": torch.rand(5, generator=generator),
        "scale_b": torch.rand(1, generator=generator),
        "azp_adj": torch.randint(-999, 999, (16,), dtype=torch.int32, generator=generator),
        "bias": torch.randn(16, generator=generator).bfloat16(),
    }
    scaled = operands["scale_a"][:, None] * (operands["scale_b"] * (acc - operands["azp_adj"]).float())
    expected = torch.maximum(scaled, operands["bias"].float()).bfloat16()
    assert torch.equal(evaluate(tree_of(clamped), acc, operands), expected)
    assert (expected == operands["bias"]).any() and (expected != operands["bias"]).any()


@pytest.mark.parametrize(
    ("arch", "config", "visitor"),
    [
        (SM80, "128x128x64_w64x64x64_multistage_s4", "VisitorCompute"),
        (SM90, "128x128x128_pingpong", "Sm90Compute"),
        (SM90, "64x32x128_pingpong_swap", "Sm90Compute"),
    ],
    ids=["2x", "3x", "3x-swap"],
)
def test_new_formula_is_emitted(clamped: EpilogueSpec, arch: object, config: str, visitor: str) -> None:
    spec = KernelSpec(arch, DType.INT8, DType.BF16, clamped, KernelConfig.parse(config))  # type: ignore[arg-type]
    text = emit.render(spec)["kernel.cu"]
    assert re.search(rf"using MaxBias = [\w:]*{visitor}<\s*cutlass::maximum", text)
    assert "/*operands=*/4" in text
    declared = re.findall(r"auto const\* (\w+) = static_cast<\S+ const\*>\(call\.operand\[(\d)\]\)", text)
    assert declared == [("scale_a", "0"), ("scale_b", "1"), ("azp_adj", "2"), ("bias", "3")]
    body = "\n".join(line.strip() for line in text.splitlines())
    wanted = "\n".join(line.strip() for line in arguments(tree_of(clamped)).splitlines()[:-1])
    assert wanted in body


def test_new_formula_is_known_to_the_command_line(clamped: EpilogueSpec, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "--arch", "sm80", "--epilogue", clamped.name, "--tree"]) == 0
    assert capsys.readouterr().out == draw.text(tree_of(clamped)) + "\n"


def test_fma_is_one_node() -> None:
    root = FORMULAS["scaled-bias"](
        Operands(
            Accum(DType.FP32),
            *(Load(name, DType.FP32, Broadcast.ROW) for name in ("scale_a", "scale_b", "azp", "azp_adj", "bias")),
        )
    )
    assert isinstance(root, Compute) and root.op is Op.FMA and len(root.args) == 3
