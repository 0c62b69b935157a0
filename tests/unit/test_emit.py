"""Emission: the same bytes in every process and place, no trace of the machine, and nothing written anywhere."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import grimp
import pytest

from cutlass_w8a8 import emit
from cutlass_w8a8.arch import ARCHS, SM90, SM100, SM120, Arch, Family
from cutlass_w8a8.config import KernelConfig
from cutlass_w8a8.dispatch.select import TABLES
from cutlass_w8a8.dtypes import OUTPUT_DTYPES, DType
from cutlass_w8a8.evt.epilogues import FORMULAS, EpilogueSpec, ScaleA, ScaleB
from cutlass_w8a8.spec import KernelSpec, Spec
from scripts import regenerate

ROOT = Path(__file__).parents[2]
# The package's function of this name hides the module from ``from ... import``.
render = sys.modules["cutlass_w8a8.emit.render"]
SPECS: list[Spec] = [
    *map(regenerate.kernel, regenerate.KERNELS),
    *map(regenerate.quantization, regenerate.QUANTIZATIONS),
]

RENDER_ALL = """
import hashlib, json, sys
from cutlass_w8a8 import emit
from cutlass_w8a8.spec import spec_from_json
specs = [spec_from_json(text) for text in json.loads(sys.argv[1])]
print(json.dumps([{name: hashlib.sha256(text.encode()).hexdigest() for name, text in emit.render(spec).items()}
                  for spec in specs]))
"""


def run(code: str, cwd: Path, *arguments: str, seed: str = "random") -> str:
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_equal_bytes_in_every_process_and_nothing_written(tmp_path: Path) -> None:
    here = [
        {name: hashlib.sha256(text.encode()).hexdigest() for name, text in emit.render(spec).items()} for spec in SPECS
    ]
    for seed in ("0", "4294967295"):
        folder = tmp_path / seed
        folder.mkdir()
        specs = json.dumps([spec.to_json() for spec in SPECS])
        assert json.loads(run(RENDER_ALL, folder, specs, seed=seed)) == here
        assert list(folder.iterdir()) == []


STEPS = {
    "import": "import cutlass_w8a8",
    "show": "import cutlass_w8a8.cli; cutlass_w8a8.cli.main(['show', '--tree'])",
    "doctor": "cutlass_w8a8.cli.main(['doctor'])",
    "list": "cutlass_w8a8.cli.main(['list'])",
    "call": "import torch\n"
    "a = torch.ones(4, 16, dtype=torch.int8); s = torch.ones(1)\n"
    "assert cutlass_w8a8.scaled_mm(a, torch.ones(16, 16, dtype=torch.int8).t(), s, s)[0, 0] == 16",
}


def test_nothing_is_written_to_the_current_directory(tmp_path: Path) -> None:
    folder = tmp_path / "cwd"
    folder.mkdir()
    # One process, since starting one takes seconds; it looks after each step, to name the one to blame.
    look = "import os; assert not os.listdir(), ({name!r}, os.listdir())"
    run("\n".join(f"{code}\n{look.format(name=name)}" for name, code in STEPS.items()), folder)
    assert list(folder.iterdir()) == []
    assert not Path(os.environ["CUTLASS_W8A8_CACHE_DIR"]).exists()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_text_holds_no_machine_paths_and_no_holes(spec: Spec) -> None:
    for name, text in emit.render(spec).items():
        for path in (str(ROOT), sys.prefix, str(Path.home()), "/usr/", "/tmp/", "site-packages"):
            assert path not in text, (name, path)
        assert not re.search(r"\b(None|True|False)\b|\{%", text)
        assert "\t" not in text and not re.search(r" +$", text, re.MULTILINE)
        code = re.sub(r"//.*", "", text)
        assert all(code.count(opening) == code.count(closing) for opening, closing in ("()", "{}"))


def table_specs(arch: Arch, operand: DType) -> list[KernelSpec]:
    """Every configuration of the tables, and every epilogue and output, not all with all."""
    configs = list(dict.fromkeys(row.config for row in TABLES[arch.name][operand]))
    formulas = [name for name in FORMULAS if operand is DType.INT8 or "azp" not in name]
    by_config = [KernelSpec(arch, operand, DType.BF16, EpilogueSpec.of(), config) for config in configs]
    by_epilogue = [
        KernelSpec(arch, operand, out, EpilogueSpec(formula, scale_a, scale_b), configs[-1])
        for formula in formulas
        for scale_a in ScaleA
        for scale_b in ScaleB
        for out in OUTPUT_DTYPES
    ]
    return by_config + by_epilogue


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_text_says_what_the_spec_says(arch: Arch) -> None:
    for operand in arch.operands:
        for spec in table_specs(arch, operand):
            text = emit.render(spec)["kernel.cu"]
            tree = spec.epilogue.tree(operand.accumulator, spec.out)
            assert f"// {spec.name}\n" in text and spec.command("show") in text
            assert f"/*operands=*/{len(tree.loads)}" in text
            assert f"using ElementA = {operand.cpp};" in text
            for index, load in enumerate(tree.loads):
                declaration = f"{load.name} = static_cast<{load.element.cpp} const*>(call.operand[{index}]);"
                assert declaration in text
            separator = ", " if spec.family is Family.MULTISTAGE else ", cute::_"
            assert separator.join(map(str, spec.config.tile)) in text


def kernel(config: str, operand: DType = DType.E4M3, arch: Arch = SM90) -> str:
    spec = KernelSpec(arch, operand, DType.BF16, EpilogueSpec.of(), KernelConfig.parse(config))
    return emit.render(spec)["kernel.cu"]


def test_two_blocks_share_a_tile_and_each_stores_half() -> None:
    one, two = (kernel(config, arch=SM100) for config in ("128x64x128_1sm", "256x64x128_2x1_2sm"))
    assert "KernelTmaWarpSpecialized1SmSm100;" in one and "TmaWarpSpecialized1Sm;" in one
    assert "KernelTmaWarpSpecialized2SmSm100;" in two and "TmaWarpSpecialized2Sm;" in two
    assert "cute::Shape<cute::_256, cute::_64, cute::_128>;" in two
    assert "cute::Shape<cute::_128, cute::_64, cute::_128>;  // of one block" in two and "of one block" not in one


def test_small_tiles_have_an_epilogue_tile_of_their_own() -> None:
    assert "EpilogueTile = cute::Shape<cute::_16, cute::_32>;" in kernel("16x64x128_pingpong", arch=SM120)
    assert "EpilogueTile = cutlass::epilogue::collective::EpilogueTileAuto;" in kernel("64x64x128_pingpong", arch=SM120)


def test_choices_reach_the_text() -> None:
    plain = kernel("128x128x128_pingpong")
    assert (
        "PingpongFP8FastAccum;" in plain
        and "StageCountAutoCarveout" in plain
        and "call.overlap != w8a8::kNone" in plain
    )
    accurate = kernel("128x128x128_pingpong_accurate")
    assert "KernelTmaWarpSpecializedPingpong;" in accurate
    assert "FastAccum" not in kernel("128x128x128_pingpong", DType.INT8)
    assert "StageCount<3>" in kernel("128x128x128_pingpong_s3")
    sliced = kernel("64x16x256_ws_swap_slices4")
    assert "kSlices = 4" in sliced and "SlicedEpilogue" in sliced and "SlicedEpilogue" not in plain
    assert "StreamKScheduler" in kernel("128x128x128_cooperative_streamk")
    assert "{call.n, call.m, call.k, 1}" in kernel("64x32x128_pingpong_swap")


def test_digest_covers_every_module_that_emission_uses() -> None:
    """A module that shapes the text but not the digest would let a stale kernel be served."""
    graph = grimp.build_graph("cutlass_w8a8")
    used = graph.find_descendants("cutlass_w8a8.emit")
    used |= {upstream for module in used for upstream in graph.find_upstream_modules(module)}
    # They raise; they decide nothing.
    used -= {"cutlass_w8a8.errors"}
    files = {
        path.relative_to(ROOT / "cutlass_w8a8").as_posix()
        for module in used
        for path in (ROOT / (module.replace(".", "/") + ".py"), ROOT / module.replace(".", "/") / "__init__.py")
        if path.is_file()
    }
    assert {"spec.py", "evt/tree.py", "emit/context.py"} <= files
    missing = {file for file in files if not any(fnmatch(file, pattern) for pattern in render._SOURCES)}
    assert missing == set()


def test_digest_changes_with_a_template(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in render.template_dir().rglob("*"):
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(render, "template_dir", lambda: tmp_path)
    monkeypatch.setattr(render, "templates", render.templates.__wrapped__)
    before = render.digest.__wrapped__()
    (tmp_path / ".kernel.cu.j2.swp").write_text("an editor's leftovers")
    assert render.digest.__wrapped__() == before
    with (tmp_path / "kernel.cu.j2").open("a") as file:
        file.write("\n")
    assert render.digest.__wrapped__() != before


def test_templates_are_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was digested is what is rendered, even if the package is replaced on the disk meanwhile."""
    before = render.render(SPECS[0])
    monkeypatch.setattr(render, "template_dir", lambda: tmp_path)
    assert render.render(SPECS[0]) == before


def test_dependent_launch_waits_before_scalars_are_read() -> None:
    """The epilogue reads scalars when it is constructed: before the kernel's own wait."""

    def waits(epilogue: EpilogueSpec) -> bool:
        config = KernelConfig.parse("128x128x128_2x1_pingpong")
        text = render.render(KernelSpec(SM90, DType.E4M3, DType.BF16, epilogue, config))["kernel.cu"]
        return "wait_for_preceding_grids" in text

    assert not waits(EpilogueSpec.of("token", "channel"))
    assert waits(EpilogueSpec.of("tensor", "channel"))
    assert waits(EpilogueSpec.of("token", "tensor"))
    assert waits(EpilogueSpec.of("tensor", "tensor", bias=True))
