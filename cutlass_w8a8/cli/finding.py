"""What ``doctor`` reports: one line a finding."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """Whether what was found suffices. A note does not make the command fail."""

    GOOD = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        what: the thing looked for.
        found: what there is.
        verdict: whether that suffices.
        remedy: what to do or to know, where it does not.
    """

    what: str
    found: str
    verdict: Verdict = Verdict.GOOD
    remedy: str = ""
