"""The guide: its snippets run, its commands are understood, its links lead somewhere, the reference is whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import cutlass_w8a8
from cutlass_w8a8 import cli, errors
from cutlass_w8a8.vllm import custom_ops
from scripts import pregenerate, prove
from tests import documents
from tests.documents import GUIDE, ROOT

PAGES = [documents.README, *GUIDE, *sorted((ROOT / "docs").glob("*.md"))]
# Each page's code in one namespace, as a reader would run it; all pages in one process, for importing torch takes long.
RUNNER = """
import json, sys, traceback
for page, code in json.loads({pages!r}):
    try:
        exec(compile(code, page, "exec"), {{"__name__": "__main__"}})
    except BaseException:
        print(page, traceback.format_exc(), file=sys.stderr)
        sys.exit(1)
    print(f"ran {{page}}")
"""


def test_snippets_run(tmp_path: Path) -> None:
    codes = {page.name: "\n".join(documents.snippets(page.read_text(encoding="utf-8"))) for page in GUIDE}
    pages = [(name, code) for name, code in codes.items() if code]
    done = documents.run(RUNNER.format(pages=json.dumps(pages)), tmp_path)
    assert done.returncode == 0, done.stderr
    ran = re.findall(r"^ran (.*)$", done.stdout, re.MULTILINE)
    assert ran == [name for name, _ in pages] and len(ran) >= 7
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_commands_are_understood(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for command in documents.commands(text, "cutlass-w8a8"):
        # The shell writes a plan, which a later command reads.
        words, file = (command[1:-2], command[-1]) if ">" in command else (command[1:], None)
        options = cli._parser().parse_args(words)
        if options.verb in ("show", "support") or file is not None:
            capsys.readouterr()
            assert cli.main(words) == 0
        if file is not None:
            (tmp_path / file).write_text(capsys.readouterr().out)
    for command in documents.commands(text, "scripts/pregenerate.py"):
        assert pregenerate.main([*dict.fromkeys([*command[1:], "--print-plan"])]) == 0
    for command in documents.commands(text, "scripts/prove.py"):
        monkeypatch.setattr("sys.argv", command)
        prove.parse()
    capsys.readouterr()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_pages_name_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert documents.broken_links(page) == []
    named = set(re.findall(r"\b((?:scripts|benchmarks|examples)/[\w/.-]*\w)", text))
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert set(re.findall(r"CUTLASS_W8A8_[A-Z0-9_]+", text)) <= documents.variables_read()
    extras = set(re.findall(r"pip install '(?:\.|cutlass-w8a8)\[(\w+)\]'", text))
    declared = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", declared, re.MULTILINE) for extra in extras)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A heading, of sorts\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#a-heading-of-sorts) [b](there.md#gone) [c](gone.md) [d](https://example.org)")
    assert documents.broken_links(page) == ["there.md#gone", "gone.md"]


def test_errors_that_are_explained_exist() -> None:
    text = (ROOT / "docs" / "guide" / "troubleshooting.md").read_text(encoding="utf-8")
    symptoms = "\n".join(re.findall(r"^\|([^|]*)\|", text, re.MULTILINE))
    quoted = [re.sub(r"^\w+: ", "", each) for each in re.findall(r"`([^`]+)`", symptoms)]
    classes = {each for each in quoted if each.isidentifier()}
    assert classes == {name for name, each in vars(errors).items() if isinstance(each, type)} - {"W8A8Error", "Path"}
    said = documents.messages()
    parts = [part.strip(" ,;") for each in quoted if each not in classes for part in each.split("...")]
    parts = [part for part in parts if part]
    assert len(parts) > 25 and [part for part in parts if not any(part in message for message in said)] == []


def test_reference_is_whole() -> None:
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("api.md", "vllm-api.md"))
    told = set(re.findall(r"auto(?:function|class):: ([\w.]+)", text))
    public = set(cutlass_w8a8.__all__) - {"__version__"} - set(vars(errors))
    # These two are exported under their own names, and told where they are defined.
    elsewhere = {"cutlass_scaled_mm", "cutlass_scaled_mm_azp"}
    assert {f"cutlass_w8a8.{name}" for name in public - elsewhere} <= told
    assert {f"cutlass_w8a8.vllm.custom_ops.{name}" for name in custom_ops.__all__} <= told


def test_documentation_is_built_by_what_is_declared() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    docs = re.search(r"^docs = \[(.*?)\]", declared, re.MULTILINE | re.DOTALL)
    dev = re.search(r"^dev = \[(.*?)^\]", declared, re.MULTILINE | re.DOTALL)
    assert docs and dev and all(line in dev[1] for line in re.findall(r'"[^"]+"', docs[1]))
    command = r"-m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/docs"
    assert all(command in (ROOT / "scripts" / name).read_text() for name in ("test", "docs"))
