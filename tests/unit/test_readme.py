"""The README: its example runs, its commands are understood, its variables are those the code reads."""

from __future__ import annotations

import argparse
import doctest
import json
import re
from pathlib import Path

import pytest

from cutlass_w8a8 import cli
from cutlass_w8a8.cli.bench import add_bench_options
from cutlass_w8a8.cli.cache import add_cache_options
from cutlass_w8a8.cli.tune import add_tune_options
from cutlass_w8a8.request import MAX_K_INT8, MAX_K_INT8_AZP
from scripts import pregenerate, regenerate
from tests import documents

TEXT = documents.README.read_text(encoding="utf-8")


def test_examples_run(tmp_path: Path) -> None:
    done = documents.run("\n".join(documents.snippets(TEXT)), tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    match = re.fullmatch(r"\(64, 256\) on cpu, relative error (\d\.\d+)", first)
    assert match and 0.001 < float(match[1]) < 0.02
    assert second.startswith("sm90_int8_bf16_scaled-bias_token_channel_")
    assert list(tmp_path.iterdir()) == []


VERBS = {"show": 2, "support": 2, "tune": 5, "bench": 4, "build": 1, "cache": 4}


def test_commands_are_understood(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = documents.commands(TEXT, "cutlass-w8a8")
    told = {verb: [command for command in shown if command[1] == verb] for verb in VERBS}
    assert {verb: len(words) for verb, words in told.items()} == VERBS
    assert sum(map(len, told.values())) == len(shown)
    for command in told["support"] + told["show"]:
        assert cli.main(command[1:]) == 0
    for verb, add in (("tune", add_tune_options), ("bench", add_bench_options), ("cache", add_cache_options)):
        for command in told[verb]:
            options = argparse.ArgumentParser()
            add(options)
            options.parse_args(command[2:])
    drawn = capsys.readouterr().out.split("#endif\n")[-1].strip()
    assert "\n".join(line.removeprefix("    ") for line in TEXT.splitlines()).count(drawn) == 1

    # The shell writes a plan, which a later command reads.
    monkeypatch.chdir(tmp_path)
    ((*listing, redirected, path),) = told["build"]
    assert redirected == ">" and cli.main(listing[1:]) == 0
    (tmp_path / path).write_text(capsys.readouterr().out)
    counts = []
    for made in documents.commands(TEXT, "scripts/pregenerate.py"):
        assert pregenerate.main([*made[1:], "--print-plan"]) == 0
        counts.append(len(json.loads(capsys.readouterr().out)))
    assert len(counts) == 6 and f"each of the {counts[0]} configurations" in TEXT


def test_dialogue_is_as_told() -> None:
    (dialogue,) = re.findall(r"```pycon\n(.*?)```", TEXT, re.DOTALL)
    test = doctest.DocTestParser().get_doctest(dialogue, {}, "README", None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    assert len(test.examples) == 4 and runner.run(test).failed == 0


def test_variables_are_those_the_code_reads() -> None:
    read = documents.variables_read()
    told = set(re.findall(r"^\| `(CUTLASS_W8A8_[A-Z0-9_]+)`", TEXT, re.MULTILINE))
    assert read == told and len(read) >= 5


def test_stated_limits_are_those_of_the_code() -> None:
    assert f"K up to {MAX_K_INT8}, or {MAX_K_INT8_AZP} with zero points" in TEXT
    assert regenerate.support() in TEXT
