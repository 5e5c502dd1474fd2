"""Writes which tests check which paper into robopolicy/rl/papers.json, and its table into robopolicy/rl/README.md.

Run `python tests/papers.py` after a test has got or lost a mark `checks`, or papers.json has been edited. What is no
longer as it was written is found by tests/rl/test_papers.py.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marked import marked

from robopolicy.core.storage import write_atomic
from robopolicy.evaluation.paper_effects import effect
from robopolicy.rl.papers import FILE, HEADER, TITLES, Paper, cells, count_by_status, papers

TESTS = Path(__file__).parent
README = FILE.with_name("README.md")
PLACE = re.compile(r"<!-- papers -->\n.*?<!-- end -->", re.DOTALL)


def naming(row: Mapping[str, Any], marks: Mapping[str, list[str]]) -> list[str]:
    """Return the tests that are marked for a paper or for a mechanism that carries it.

    Those that the row names keep their order, so that the table shows the one that says most; then come the paper's own
    and those of its mechanisms.
    """
    others = sorted({test for name in row["mechanisms"] for test in marks.get(name, [])})
    names = dict.fromkeys([*marks.get(row["id"], []), *others])
    return list(dict.fromkeys([*(test for test in row["tests"] if test in names), *names]))


def refreshed(rows: list[dict[str, Any]], marks: Mapping[str, list[str]]) -> str:
    """Return the text of papers.json with the tests that are marked now."""
    return json.dumps([{**row, "tests": naming(row, marks)} for row in rows], indent=2, ensure_ascii=False) + "\n"


def markdown(paper: Paper) -> str:
    """Return a paper's line of the table."""
    name, arxiv, where, test, *rest = (cell.replace("|", "\\|") for cell in cells(paper, effect(paper)))
    linked = f"[{arxiv}](https://arxiv.org/abs/{arxiv})" if arxiv else ""
    code = ", ".join(f"`{item}`" for item in (*paper.mechanisms, *paper.settings)) if where else ""
    return f"| {' | '.join((name, linked, code, test, *rest))} |"


def written(text: str) -> str:
    """Return the README's text with the tables made anew."""
    parts = []
    for kind, title in TITLES.items():
        lines = [markdown(paper) for paper in papers() if paper.kind == kind]
        head = [f"| {' | '.join(HEADER)} |", f"|{' --- |' * len(HEADER)}"]
        parts.append("\n".join([f"**{title}: {count_by_status(kind)}.**", "", *head, *lines]))
    table = "\n\n".join(parts)
    return PLACE.sub(lambda _: f"<!-- papers -->\n{table}\n<!-- end -->", text)


def main() -> None:
    """Write both files."""
    write_atomic(FILE, refreshed(json.loads(FILE.read_text(encoding="utf-8")), marked(TESTS)))
    papers.cache_clear()
    write_atomic(README, written(README.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
