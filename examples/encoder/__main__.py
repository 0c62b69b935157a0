"""Embed sentences with int8 and fp8 linear layers, and show how close to fp32 they come and which kernels ran."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

import cutlass_w8a8
from cutlass_w8a8.errors import W8A8Error

from . import checkpoint, compressed, report
from .checkpoint import Layers
from .compressed import ModuleLinears
from .kernels import Built, build, build_all, served
from .model import DemoError, Encoder, LinearFunction, Tokens, fp32_linear, load_pretrained
from .w8a8 import OUT_DTYPE, VARIANTS, QuantizedLinear, QuantizedLinears, Variant, quantize

_SENTENCES = Path(__file__).parent / "sentences.txt"
# Without a GPU the tables and the one compilation are for this device: an H100 or H200.
_ASSUMED = (9, 0)
_TIMED_RUNS = 5


@dataclass(frozen=True)
class Workload:
    """What to embed, with what, and the truth to compare with."""

    encoder: Encoder
    layers: Layers
    sentences: list[str]
    reference: Tensor
    fp32_seconds: float | None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("mode", nargs="?", choices=("run", "export"), default="run", help="default: run")
    parser.add_argument("--sentences", type=Path, metavar="FILE", help="one a line, two or more; default: 200 built in")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="run from a file that `export` wrote, or, "
        "of the published model, from a folder in the compressed-tensors format, which `export` makes a file of",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="where `export` writes the quantised checkpoint")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU with kernels")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="sentences at a time (default 256)")
    parser.add_argument("--no-compile", action="store_true", help="without a GPU: do not compile the sample kernel")
    options = parser.parse_args(arguments)
    if (options.mode == "export") != (options.output is not None):
        parser.error("`export` needs --output FILE, and --output needs `export`")
    options.folder = options.checkpoint is not None and options.checkpoint.is_dir()
    if options.checkpoint and not options.folder and (options.mode == "export" or options.sentences):
        parser.error("--checkpoint brings its own sentences and is quantised already: drop the other option")
    if options.batch_size < 1:
        parser.error(f"--batch-size {options.batch_size}: must be 1 or more")
    return options


def read_sentences(path: Path) -> list[str]:
    """The non-empty lines of ``path``.

    Raises:
        DemoError: the file cannot be read, or holds fewer than two sentences.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(f"cannot read the sentences: {error}; give --sentences a UTF-8 text file") from error
    sentences = [line for line in lines if line]
    if len(sentences) < 2:
        raise DemoError(f"{path} has {len(sentences)} sentences; nearest neighbours need two or more, one a line")
    return sentences


def pick_device(wanted: str | None) -> torch.device:
    """The device to run on.

    Raises:
        DemoError: cuda was asked for and there is none, or the package has no kernels for it.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if wanted == "cuda":
            raise DemoError(
                "torch sees no CUDA device: check nvidia-smi and that this torch build has CUDA, or leave "
                "--device out to run on the CPU"
            )
        return torch.device("cpu")
    if not supported_variants(torch.cuda.get_device_capability()):
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        if wanted == "cuda":
            raise DemoError(f"{name} (compute capability {major}.{minor}) has no kernels here; use --device cpu")
        return torch.device("cpu")
    return torch.device("cuda")


def supported_variants(capability: tuple[int, int]) -> list[Variant]:
    """The variants that have kernels on devices of ``capability``."""
    return [variant for variant in VARIANTS if support(variant, capability)]


def support(variant: Variant, capability: tuple[int, int]) -> cutlass_w8a8.Support:
    """Whether ``variant`` has kernels on devices of ``capability``, and if not, why."""
    azp = "token" if variant.zero_point else "none"
    return cutlass_w8a8.is_supported(capability, variant.operand, OUT_DTYPE, azp=azp)


def embed(encoder: Encoder, batches: Sequence[Tokens], linear: LinearFunction) -> tuple[Tensor, float]:
    """Embed all batches; the embeddings [S, H], and seconds: the one run on the CPU, the best of several on a GPU."""

    def once() -> tuple[Tensor, float]:
        start = time.perf_counter()
        result = torch.cat([encoder.embed(batch, linear) for batch in batches])
        if result.is_cuda:
            torch.cuda.synchronize()
        return result, time.perf_counter() - start

    result, seconds = once()
    if result.is_cuda:
        seconds = min(once()[1] for _ in range(_TIMED_RUNS))
    return result, seconds


def prepare(options: argparse.Namespace, device: torch.device) -> Workload:
    """Load a checkpoint's file, or embed with the published model in fp32 and quantise it, or load its folder."""
    if options.checkpoint and not options.folder:
        stored = checkpoint.load(options.checkpoint)
        layers = _moved(stored.layers, device)
        return Workload(stored.encoder.to(device), layers, stored.sentences, stored.reference.to(device), None)
    sentences = read_sentences(options.sentences or _SENTENCES)
    published, linears = load_pretrained()
    found = compressed.load(options.checkpoint, published) if options.folder else None
    encoder, linears = published.to(device), {name: tensor.to(device) for name, tensor in linears.items()}
    batches = [batch.to(device) for batch in encoder.batches(sentences, options.batch_size)]
    reference, seconds = embed(encoder, batches, fp32_linear(linears))
    if found is not None:
        return Workload(found[0].to(device), found[1].to(device), sentences, reference, seconds)
    return Workload(encoder, quantize(encoder.config, linears), sentences, reference, seconds)


def _moved(layers: Layers, device: torch.device) -> Layers:
    if isinstance(layers, ModuleLinears):
        return layers.to(device)
    return {name: layer.to(device) for name, layer in layers.items()}


def export(options: argparse.Namespace, out: Console) -> None:
    """Write the quantised checkpoint."""
    work = prepare(options, torch.device("cpu"))
    checkpoint.save(options.output, checkpoint.Checkpoint(work.encoder, work.layers, work.sentences, work.reference))
    size = options.output.stat().st_size / 1e6
    out.print(f"Wrote {options.output} ({size:.1f} MB). Run it with: scripts/demo --checkpoint {options.output}")


def run(options: argparse.Namespace, out: Console) -> None:
    """Embed, with the layers of a folder's checkpoint or else under every variant, and report."""
    device = pick_device(options.device)
    on_gpu = device.type == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    if not on_gpu:
        out.print(
            "Running on the CPU, through the evaluator of the same formulas: exact, not fast; about 10 seconds for\n"
            "each variant of 200 sentences on two idle cores, several times that on busy ones."
        )
    work = prepare(options, device)
    batches = [batch.to(device) for batch in work.encoder.batches(work.sentences, options.batch_size)]
    if isinstance(work.layers, ModuleLinears):
        run_modules(options, out, work, work.layers, batches, where)
    else:
        run_variants(options, out, work, work.layers, batches, where)


def run_variants(
    options: argparse.Namespace,
    out: Console,
    work: Workload,
    layers: dict[str, QuantizedLinear],
    batches: Sequence[Tokens],
    where: str,
) -> None:
    """Embed under every variant and report."""
    on_gpu = work.reference.is_cuda
    capability = torch.cuda.get_device_capability() if on_gpu else _ASSUMED
    variants = supported_variants(capability)
    for left_out in (variant for variant in VARIANTS if variant not in variants):
        reason = support(left_out, capability).reason
        out.print(f"Without {left_out.name}: {reason}", markup=False, soft_wrap=True)

    rows = served(layers, variants, [batch.count for batch in batches], capability)
    built: list[Built] = []
    if on_gpu:
        specs = list({row.spec.name: row.spec for row in rows}.values())
        out.print(f"Running on {where}. Preparing {len(specs)} kernels; one takes up to a minute unless cached.")
        built = build_all(specs, progress(out, len(specs)))

    results = [report.compare("fp32", work.reference, work.reference, work.fp32_seconds)]
    for variant in variants:
        embeddings, seconds = embed(work.encoder, batches, QuantizedLinears(variant, layers))
        results.append(report.compare(variant.name, embeddings, work.reference, seconds))
        if not on_gpu:
            out.print(f"  [{len(results) - 1}/{len(variants)}] {variant.name} ({seconds:.0f} s)")
    report.print_results(out, results, len(work.sentences))
    if not on_gpu:
        out.print("Times are the evaluator's and say nothing about a GPU.\n")
    title = f"Kernel that served each layer on {where}" if on_gpu else "Kernel that would serve each layer on sm90"
    report.print_served(out, rows, title)

    if not on_gpu and not options.no_compile:
        sample = next(row for row in rows if row.variant == VARIANTS[1].name)
        out.print(f"Compiling the kernel of {sample.variant} {sample.layer}, to be run on an H100 or H200:")
        built = [build(sample.spec)]
        report.print_built(out, built[0])
    if options.json:
        sentences = len(work.sentences)
        report.write_json(options.json, device=where, sentences=sentences, results=results, served=rows, built=built)
        out.print(f"Wrote {options.json}")


def run_modules(
    options: argparse.Namespace,
    out: Console,
    work: Workload,
    layers: ModuleLinears,
    batches: Sequence[Tokens],
    where: str,
) -> None:
    """Embed with the layers that a folder in the compressed-tensors format had, and report."""
    embeddings, seconds = embed(work.encoder, batches, layers)
    results = [
        report.compare("fp32", work.reference, work.reference, work.fp32_seconds),
        report.compare(layers.name, embeddings, work.reference, seconds),
    ]
    report.print_results(out, results, len(work.sentences))
    if layers.floats:
        out.print(f"Left in float: {', '.join(layers.floats)}", soft_wrap=True)
    if options.json:
        sentences = len(work.sentences)
        report.write_json(options.json, device=where, sentences=sentences, results=results, served=[], built=[])
        out.print(f"Wrote {options.json}")


def progress(out: Console, total: int) -> Callable[[int, Built], None]:
    """A function that prints one line for each kernel that is ready."""

    def line(count: int, built: Built) -> None:
        how = f"{built.seconds:.0f} s" if built.compiled else "cached"
        out.print(f"  [{count}/{total}] {built.name} ({how})", markup=False, soft_wrap=True)

    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status is 1 after an error that was explained."""
    options = parse(arguments)
    out = report.console()
    try:
        with torch.inference_mode():
            (export if options.mode == "export" else run)(options, out)
    except (DemoError, W8A8Error) as error:
        print(f"scripts/demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
