"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cutlass_w8a8 import emit
from cutlass_w8a8.arch import ARCHS, Arch
from cutlass_w8a8.cli import main
from cutlass_w8a8.dispatch import select
from cutlass_w8a8.dispatch.select import TABLES
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.evt import draw
from cutlass_w8a8.evt.epilogues import FORMULAS, EpilogueSpec, ScaleA, ScaleB
from cutlass_w8a8.problem import Problem
from cutlass_w8a8.spec import KernelSpec, Spec
from cutlass_w8a8.version import VERSION
from scripts import regenerate

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]


def shown_name(capsys: Capture, *words: str) -> str:
    """The name of the kernel that ``show`` with these options prints."""
    assert main(["show", *words]) == 0
    return capsys.readouterr().out.splitlines()[0].removeprefix("// ")


# show -----------------------------------------------------------------------------------------------------------------


BANNERS = [*map(regenerate.kernel, regenerate.KERNELS), *map(regenerate.quantization, regenerate.QUANTIZATIONS)]


@pytest.mark.parametrize("spec", BANNERS, ids=lambda spec: spec.name)
def test_command_in_a_kernels_banner_prints_that_kernel(spec: Spec, capsys: Capture) -> None:
    text = emit.render(spec)["kernel.cu"]
    (command,) = re.findall(r"^//   (cutlass-w8a8 show .*)$", text, re.MULTILINE)
    assert command == spec.command("show")
    assert main(shlex.split(command)[1:]) == 0
    captured = capsys.readouterr()
    assert captured.out == text and captured.err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bias --k 64 --stages 3", "leave out --bias, --k, --stages"),
        ("--out-dtype fp16", "leave out --out-dtype"),
        ("--tile 64x64x128", "leave out --tile"),
        ("--scheme static-azp --a-dtype e4m3", "quantises to int8 only"),
        ("--tree", "sm90_quantize_bf16_e4m3 has no epilogue to draw; leave out --tree"),
    ],
)
def test_quantisation_has_no_options_of_a_gemm(words: str, message: str, capsys: Capture) -> None:
    assert main(["show", "--quantize", "bf16", *words.split()]) == 1
    assert message in capsys.readouterr().err


def test_schemes_are_for_quantisation(capsys: Capture) -> None:
    assert main(["show", "--scheme", "static"]) == 1
    assert "--scheme static is for kernels that quantise; add --quantize" in capsys.readouterr().err
    assert main(["show", "--quantize", "bf16", "--scheme", "token-azp"]) == 0
    assert "// sm90_quantize_bf16_int8_token-azp\n" in capsys.readouterr().out


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_every_epilogue_name_is_accepted(arch: Arch, capsys: Capture) -> None:
    config = TABLES[arch.name][DType.INT8][0].config
    for formula in FORMULAS:
        for scale_a in ScaleA:
            for scale_b in ScaleB:
                epilogue = EpilogueSpec(formula, scale_a, scale_b)
                spec = KernelSpec(arch, DType.INT8, DType.FP16, epilogue, config)
                assert main([*shlex.split(spec.command("show"))[1:], "--tree"]) == 0
                assert capsys.readouterr().out == draw.text(epilogue.tree(DType.INT32, DType.FP16)) + "\n"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "sm90_e4m3_bf16_scaled_token_channel_{table}"),
        ("--arch sm80", "sm80_int8_bf16_scaled_token_channel_{table}"),
        ("--arch sm90 --a-dtype int8 --m 1", "sm90_int8_bf16_scaled_token_channel_{table}"),
        ("--a-dtype fp8", "sm90_e4m3_bf16_scaled_token_channel_{table}"),
        ("--config 128x128x128_ws", "sm90_e4m3_bf16_scaled_token_channel_128x128x128_1x1_ws"),
        (
            "--scale-a tensor --scale-b tensor --bias --out-dtype fp16 --config 128x128x128_2x1_pingpong",
            "sm90_e4m3_fp16_scaled-bias_tensor_tensor_128x128x128_2x1_pingpong",
        ),
        (
            "--a-dtype int8 --azp token --out-dtype fp32 --config 128x128x128_ws_swizzle4_along_n",
            "sm90_int8_fp32_azp-token_token_channel_128x128x128_1x1_ws",
        ),
        (
            "--tile 128x64x128 --cluster 2x1 --schedule cooperative --stages 3 --scheduler streamk --no-fast-accum",
            "sm90_e4m3_bf16_scaled_token_channel_128x64x128_2x1_cooperative_s3_streamk_accurate",
        ),
        (
            "--arch sm80 --tile 64x64x64 --warp 32x64x64 --stages 4",
            "sm80_int8_bf16_scaled_token_channel_64x64x64_1x1_multistage_w32x64x64_s4",
        ),
        (
            "--config 64x32x128_ws_swap --no-swap-ab --slices 2 --stages 5",
            "sm90_e4m3_bf16_scaled_token_channel_64x32x128_1x1_ws_s5_slices2",
        ),
    ],
)
def test_options_name_the_kernel(words: str, name: str, capsys: Capture) -> None:
    split = words.split()
    if "{table}" in name:
        arch, operand = (
            ("sm80", DType.INT8) if "sm80" in words else ("sm90", DType.INT8 if "int8" in words else DType.E4M3)
        )
        m = 1 if "--m" in words else 4096
        choice = select(Problem(ARCHS[arch], m, 4096, 4096, operand, DType.BF16, EpilogueSpec.of()))
        name = name.format(table=choice.compiled.name)
    assert shown_name(capsys, *split) == name


def test_tree_and_mermaid(capsys: Capture) -> None:
    tree = EpilogueSpec.of(azp="tensor", bias=True).tree(DType.INT32, DType.BF16)
    words = ["show", "--a-dtype", "int8", "--azp", "tensor", "--bias"]
    assert main([*words, "--tree"]) == 0
    assert capsys.readouterr().out == draw.text(tree) + "\n"
    assert main([*words, "--mermaid"]) == 0
    assert capsys.readouterr().out == draw.mermaid(tree) + "\n"


def test_terminal_gets_colours_and_the_same_text(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["show", "--config", "128x128x128_pingpong"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[" in out
    plain = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()]
    assert plain[0] == "// sm90_e4m3_bf16_scaled_token_channel_128x128x128_1x1_pingpong"


def test_pipe_that_closes_early_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m cutlass_w8a8 show | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0" and done.stderr == ""


def test_support_says_what_serves_each_capability(capsys: Capture) -> None:
    assert main(["support"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(ARCHS)
    assert "7.5   e4m3  no: sm75 has no e4m3 tensor cores" in "\n".join(lines)
    assert "9.0   e4m3  sm90, hopper, CUDA 12.0" in lines
    assert main(["support", "7.0", "13.0", "8.6", "--configs"]) == 0
    out = capsys.readouterr().out
    assert "7.0   int8  no: compute capability 7.0 is served by no kernels" in out
    assert "13.0  e4m3  sm89, multistage, CUDA 12.4 (compute capability 13.0 is not known" in out
    names = [row.config.name for row in TABLES["sm86"][DType.INT8]]
    assert out.splitlines()[-len(names) :] == [f"            {name}" for name in names]
    for wrong in ("9", "nine.zero", "9.0.0"):
        with pytest.raises(SystemExit):
            main(["support", wrong])
        assert "write it like 8.9" in capsys.readouterr().err


# Exit statuses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("show --arch sm70", "sm70"),
        ("show --config 128x128x128_pingpang", "pingpang"),
        ("show --tile 128x128", "3 numbers joined by x"),
        ("show --m 0", "positive"),
        ("show --epilogue scaled", "azp-token-bias_token_channel"),
        ("show --epilogue unscaled_token_channel", "not defined"),
        ("show --epilogue scaled_row_channel", "tensor or token"),
        ("show --config 128x128x128_ws --tile 128x128x128", "not allowed"),
        ("show --tree --mermaid", "not allowed"),
        ("show --no-such-option", "--no-such-option"),
        ("shew", "shew"),
        ("", "COMMAND"),
    ],
)
def test_wrong_usage_is_status_2(words: str, message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    captured = capsys.readouterr()
    assert caught.value.code == 2
    assert message in captured.err and captured.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("show --arch sm80 --a-dtype e4m3", "sm80 has no e4m3 tensor cores"),
        ("show --azp token", "needs int8 operands"),
        ("show --config 96x128x128_pingpong", "tile m 96 is not 64, 128 or 256"),
        ("show --config 128x128x128_pingpong_split2", "add streamk"),
        ("show --tile 128x128x128", "needs --schedule: ws or pingpong or cooperative\n"),
        ("show --n 12 --k 16", "--n 12: N must be a multiple of 8; pad the operands with zeros to 16"),
        ("show --n 16 --k 17", "--k 17: K must be a multiple of 16; pad the operands with zeros to 32"),
        ("show --a-dtype int8 --k 131072", "--k 131072: int8 products could overflow int32 beyond K=131071"),
        ("show --a-dtype int8 --azp token --k 65808", "--k 65808: int8 products could overflow int32 beyond K=65793"),
        ("show --a-dtype int8 --azp token --k 131056", "beyond K=65793"),
        ("show --epilogue scaled_token_channel --bias --scale-a token", "leave out --scale-a, --bias"),
        ("build --config 128x128x128_multistage", "multistage does not exist for e4m3 on sm90"),
    ],
)
def test_our_errors_are_status_1_without_traceback(words: str, message: str, capsys: Capture) -> None:
    assert main(words.split()) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("cutlass-w8a8: ") and message in captured.err
    assert "Traceback" not in captured.err and captured.out == ""


def test_version_and_module() -> None:
    command = [sys.executable, "-m", "cutlass_w8a8", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == VERSION + "\n"


def test_import_leaves_the_heavy_parts_for_later() -> None:
    code = "import cutlass_w8a8.cli, sys; print(*sorted({'cutlass_cppgen', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_not_a_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cutlass_w8a8", "show", "--tree"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "cannot write the output" in done.stderr and "Traceback" not in done.stderr


def test_a_tree_survives_a_plain_locale() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "cutlass_w8a8", "show", "--tree"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "scale_a[m]: fp32" in done.stdout
