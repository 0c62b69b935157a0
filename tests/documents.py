"""What README.md and the guide hold that can be tried: snippets, commands, links, variables."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))


def snippets(text: str) -> list[str]:
    """The Python code that a reader would run, in order."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def commands(text: str, program: str) -> list[list[str]]:
    """The words of each command of ``program`` that is shown on a line of its own."""
    lines = re.findall(rf"^    (?:python )?{re.escape(program)}(?: .*)?$", text, re.MULTILINE)
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] if line[0] == "python" else line for line in words]


def run(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``code`` in a process of its own, on the CPU whatever this machine has."""
    before = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport torch\ntorch.manual_seed(0)\n"
    code = before + code.replace("torch.cuda.is_available()", "False")
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)


def variables_read() -> set[str]:
    """The environment variables that the package's code reads."""
    return {
        name
        for path in (ROOT / "cutlass_w8a8").rglob("*.py")
        for name in re.findall(r"\"(CUTLASS_W8A8_[A-Z0-9_]+)\"", path.read_text(encoding="utf-8"))
    }


def messages() -> list[str]:
    """The texts in the package's code, "..." where values are put in."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "cutlass_w8a8").rglob("*.py")]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    formatted = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    plain = [[node] for node in nodes if isinstance(node, ast.Constant)]
    return [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts)
        for parts in [*formatted, *plain]
    ]


def anchors(path: Path) -> set[str]:
    """The anchors of a Markdown file's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    """Links of a Markdown file to files or headings that are not there."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken
