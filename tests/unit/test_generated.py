"""generated/ shows what is emitted today."""

from __future__ import annotations

from pathlib import Path

from scripts import regenerate


def test_generated_is_up_to_date() -> None:
    found = regenerate.differences(regenerate.expected())
    assert not found, "run python scripts/regenerate.py and review the changes:\n" + "\n".join(found)


def test_differences_are_found(tmp_path: Path) -> None:
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / "same.cu").write_text("a\nb\n")
    (tmp_path / "sm90" / "changed.cu").write_text("a\nb\n")
    (tmp_path / "sm90" / "stale.cu").write_text("a\n")
    files = {"sm90/same.cu": "a\nb\n", "sm90/changed.cu": "a\nc\n", "new.md": "x\n"}
    found = "\n".join(regenerate.differences(files, tmp_path))
    assert "same.cu" not in found
    assert "sm90/changed.cu: 4 lines of differences" in found and "-b" in found and "+c" in found
    assert "new.md: missing" in found and "sm90/stale.cu: no longer generated" in found
