"""Writes the tables of results in the READMEs from assets/figures, so that no figure in them is ever typed.

A table stands between `<!-- table:NAME -->` and `<!-- end -->`, NAME being a benchmark whose figures lie in
assets/figures/NAME.json, where `robopolicy bench NAME json=assets/figures/NAME.json` puts them. Without them the place
says which command makes them. `robopolicy bench tables` runs this.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError
from robopolicy.core.resources import resource
from robopolicy.core.storage import read_json, write_atomic
from robopolicy.verbs.bench import BENCHMARKS, Benchmark, Table

PLACE = re.compile(r"<!-- table:(\w+) -->\n.*?<!-- end -->", re.DOTALL)
"""Where a table stands; the group is its name."""

HERE = Path(__file__).parent
READMES = (HERE / "README.md", HERE.parents[1] / "README.md")
"""The results, and the README of the checkout."""


def figures_of(name: str) -> Path:
    """Return where the published figures of a benchmark lie, or would."""
    return resource("assets", f"figures/{name}.json")


def markdown(table: Table) -> str:
    """Return a table in Markdown, under its title."""
    rows = [table.header, ["---"] * len(table.header), *table.lines]
    return "\n".join([f"**{table.title}**", "", *(f"| {' | '.join(row)} |" for row in rows)])


def block(name: str) -> str:
    """Return what stands between the markers of benchmark `name`. Raises ConfigError where there is no such name."""
    benchmark: Benchmark = BENCHMARKS.load(name)
    path = figures_of(name)
    if not path.exists():
        return f"*Not measured yet: `robopolicy bench {name} json=assets/figures/{name}.json`, then `bench tables`.*"
    figures = read_json(path)
    tables = [markdown(table) for table in benchmark.tables(figures)]
    return "\n\n".join([*tables, f"*Figures: assets/figures/{name}.json, made by `{figures['command']}`.*"])


def written(text: str) -> str:
    """Return the text of a README with every table made anew."""
    return PLACE.sub(lambda match: f"<!-- table:{match[1]} -->\n{block(match[1])}\n<!-- end -->", text)


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Write the READMEs' tables, and return {"readmes": {file: names of its tables}}.

    Raises ConfigError outside of a checkout, where there are no READMEs to write.
    """
    found = {}
    for path in READMES:
        if not path.exists():
            raise ConfigError(f"{path} does not exist: tables are written in a checkout of the repository.")
        text = path.read_text()
        write_atomic(path, written(text))
        found[str(path.relative_to(HERE.parents[1]))] = PLACE.findall(text)
    return {"readmes": found}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return which tables were written, and which wait for their figures."""
    lines = [
        [name, path, "written" if figures_of(name).exists() else "not measured yet"]
        for path, names in figures["readmes"].items()
        for name in names
    ]
    return [Table("Tables of the READMEs", ["table", "file", ""], lines)]


BENCHMARK = Benchmark("Tables of the READMEs, from assets/figures.", (), benchmark, tables)
