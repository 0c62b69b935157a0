"""What a wheel holds: pyproject.toml lists the packages by hand, since templates come from outside of them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_is_in_the_wheel():
    text = (ROOT / "pyproject.toml").read_text()
    listed = set(re.findall(r'"([\w.]+)"', re.search(r"^packages = \[(.*?)\]", text, re.M | re.S)[1]))
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "cutlass_w8a8").rglob("__init__.py")}
    assert listed == found | {"cutlass_w8a8.templates"}
