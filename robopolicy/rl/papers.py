"""The papers that this suite was asked for, and those its mechanisms are from: what carries each, and how far.

papers.json has a row a paper; a test compares it with the register of mechanisms and with the marks of the tests, and
`python tests/papers.py` writes the tests' names into it and the table into README.md. Nothing here imports torch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from robopolicy.core.arrays import is_sequence
from robopolicy.core.storage import resource

FILE = Path(__file__).with_name("papers.json")

Kind = Literal["robots", "language models", "others"]
"""What a paper of the list was written for; others are not of the list, but mechanisms name them as their source."""

TITLES: Mapping[Kind, str] = {
    "robots": "Papers on robots",
    "language models": "Papers on language models",
    "others": "Other sources of mechanisms",
}

Status = Literal["works", "part", "absent"]
"""works: all that the paper calls its own is here, reached from the command line, and a test checks its mathematics."""

HEADER = ("paper", "arXiv", "where", "test", "status", "effect on success")


@dataclass(frozen=True)
class Paper:
    """One row. mechanisms: "slot/name" of those that carry it; settings: others' "section.key=value", or a verb with
    its target; note: what is missing, why it is absent, or, of what works, how it differs; tests: ids of those that
    check its mathematics; check: the ablation of `bench mechanisms` that measures it, with the variant where it has
    several methods, "" for none.
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

    @property
    def where(self) -> str:
        """What carries it, separated by commas."""
        return ", ".join((*self.mechanisms, *self.settings))

    @property
    def said(self) -> str:
        """Its status with the note."""
        return f"{self.status}: {self.note}" if self.note else self.status


@cache
def papers() -> tuple[Paper, ...]:
    """Return every row, in the order of the file."""
    rows: list[Mapping[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(map(_paper, rows))


def _paper(row: Mapping[str, Any]) -> Paper:
    values: dict[str, Any] = {key: tuple(value) if is_sequence(value) else value for key, value in row.items()}
    return Paper(**values)


def papers_of(mechanism: str) -> list[Paper]:
    """Return the papers that a mechanism, "slot/name", carries."""
    return [paper for paper in papers() if mechanism in paper.mechanisms]


def cells(paper: Paper, effect: str) -> tuple[str, ...]:
    """Return one line of the table under HEADER; of several tests the first is named."""
    more = f" and {len(paper.tests) - 1} more" if len(paper.tests) > 1 else ""
    return paper.id, paper.arxiv, paper.where, (paper.tests[0] if paper.tests else "") + more, paper.said, effect


@cache
def published() -> Mapping[str, Any]:
    """Return the checks of `bench mechanisms` out of assets/figures, {} before they were published."""
    path = resource("assets", "figures/mechanisms.json")
    return json.loads(path.read_text(encoding="utf-8"))["checks"] if path.exists() else {}


def effect(paper: Paper, checks: Mapping[str, Any]) -> str:
    """Say by how much the method of the paper beat its ablation in `bench mechanisms`, and whether that shows.

    The difference of the success rates after the last iteration, pooled over seeds, with Newcombe's interval of 95 %:
    shown where it lies above 0, reversed where below.
    """
    name, _, variant = paper.check.partition("/")
    if name not in checks:
        return "not in bench mechanisms" if paper.status != "absent" else ""
    rows = checks[name]
    method = rows[variant or list(rows)[-1]]["last deterministic"]
    baseline = next(iter(rows.values()))["last deterministic"]
    difference = method["success_rate"] - baseline["success_rate"]
    below, above = (rate["success_rate"] - rate["low"] for rate in (method, baseline))
    up, down = (rate["high"] - rate["success_rate"] for rate in (method, baseline))
    low, high = difference - math.hypot(below, down), difference + math.hypot(up, above)
    verdict = "shown" if low > 0 else "reversed" if high < 0 else "not shown"
    return f"{verdict}: {100 * difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"


def counted(*kinds: Kind) -> str:
    """Return how many papers of these kinds work, are there in part, and are absent."""
    chosen = [paper.status for paper in papers() if paper.kind in kinds]
    parts = ", ".join(f"{chosen.count(status)} {status}" for status in ("works", "part", "absent"))
    return f"{len(chosen)} papers: {parts}"
