"""Register of implemented papers, and of the sources of mechanisms: location and completeness of each implementation.

papers.json has one row per paper; a test compares it with the registered mechanisms and with the test markers. `python
tests/papers.py` writes the tests' names into it and the table into README.md. It does not import torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from robopolicy.core.arrays import is_sequence
from robopolicy.core.former_names import keep_former_names

FILE = Path(__file__).with_name("papers.json")

Kind = Literal["robots", "language models", "others"]
"""Application area of a listed paper; others are not on the list, but are named by mechanisms as their source."""

TITLES: Mapping[Kind, str] = {
    "robots": "Papers on robots",
    "language models": "Papers on language models",
    "others": "Other sources of mechanisms",
}

Status = Literal["works", "part", "absent", "not applicable"]
"""works: everything that is specific to the paper is implemented, available on the command line, and its mathematics is
tested. not applicable: there is nothing to run on a robot's policy, for the reason in the note.
"""

UNBUILT: tuple[Status, ...] = ("absent", "not applicable")
"""Statuses of rows that no mechanism or setting implements."""

HEADER = ("paper", "arXiv", "where", "test", "status", "effect")


@dataclass(frozen=True)
class Paper:
    """One row of the register. mechanisms: "slot/name" of those that implement it; settings: other "section.key=value",
    or a verb with its target; note: what is missing, the reason for its absence, or, if it works, the differences;
    tests: ids of tests of its mathematics; check: the ablation of `bench mechanisms` that measures it, with the variant
    if it has several methods, "" for none; figure: another published figure that shows its claim, see
    `evaluation.paper_effects`, "" for none.
    """

    id: str
    title: str
    arxiv: str
    kind: Kind
    status: Status
    mechanisms: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    note: str = ""
    tests: tuple[str, ...] = ()
    check: str = ""
    figure: str = ""

    @property
    def where(self) -> str:
        """Its mechanisms and settings, separated by commas."""
        return ", ".join((*self.mechanisms, *self.settings))

    @property
    def said(self) -> str:
        """Its status with the note."""
        return f"{self.status}: {self.note}" if self.note else self.status


@cache
def papers() -> tuple[Paper, ...]:
    """Load every row, in the order of the file."""
    rows: list[Mapping[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(map(_paper, rows))


def _paper(row: Mapping[str, Any]) -> Paper:
    values: dict[str, Any] = {key: tuple(value) if is_sequence(value) else value for key, value in row.items()}
    return Paper(**values)


def papers_of(mechanism: str) -> list[Paper]:
    """Return the papers that a mechanism, "slot/name", implements."""
    return [paper for paper in papers() if mechanism in paper.mechanisms]


def cells(paper: Paper, effect: str) -> tuple[str, ...]:
    """Return one row of the table under HEADER; of several tests the first is named."""
    rest_text = f" and {len(paper.tests) - 1} more" if len(paper.tests) > 1 else ""
    return paper.id, paper.arxiv, paper.where, (paper.tests[0] if paper.tests else "") + rest_text, paper.said, effect


def count_by_status(*kinds: Kind) -> str:
    """Count the papers of these kinds that work, are partly implemented, absent, and not applicable (only if any)."""
    statuses = [paper.status for paper in papers() if paper.kind in kinds]
    rest = ["not applicable"] if "not applicable" in statuses else []
    parts = ", ".join(f"{statuses.count(status)} {status}" for status in ("works", "part", "absent", *rest))
    return f"{len(statuses)} papers: {parts}"


keep_former_names(__name__, {"counted": "count_by_status"})
