"""Writes the tables of results in the READMEs, and draws their plots, from assets/figures; no number is typed by hand.

A table stands between `<!-- table:NAME -->` and `<!-- end -->`. NAME is a benchmark with results in
assets/figures/NAME.json, written by `robopolicy bench NAME json=assets/figures/NAME.json`. Without results, the command
that measures them stands there. The plot of a benchmark with a `picture` stands above its tables:
assets/pictures/NAME.svg, which contains the checksum of its results. `robopolicy bench tables` runs this.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError
from robopolicy.core.storage import read_json, resource, write_atomic
from robopolicy.evaluation.tables import markdown_table
from robopolicy.verbs.bench import BENCHMARKS, Benchmark, Table

PLACE = re.compile(r"<!-- table:(\w+) -->\n.*?<!-- end -->", re.DOTALL)
"""Where a table stands; the group is its name."""

HERE = Path(__file__).parent
READMES = (HERE / "README.md", HERE.parents[1] / "README.md")
"""The results, and the README of the checkout."""


def figures_of(name: str) -> Path:
    """Return the path of a benchmark's published results, which may not exist."""
    return resource("assets", f"figures/{name}.json")


def picture_of(name: str) -> Path:
    """Return the path of the plot of a benchmark's published results, which may not exist."""
    return resource("assets", f"pictures/{name}.svg")


def drawn_of(name: str) -> str:
    """Return the comment at the end of the plot of benchmark `name`: the checksum of its published results."""
    checksum = hashlib.sha256(figures_of(name).read_bytes()).hexdigest()
    return f"<!-- drawn by robopolicy bench tables; sha256 of assets/figures/{name}.json: {checksum} -->\n"


def draw(name: str) -> bool:
    """Draw the plot of benchmark `name`; return False if it has none, or no published results."""
    benchmark: Benchmark = BENCHMARKS.load(name)
    if benchmark.picture is None or not figures_of(name).exists():
        return False
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": name}):  # the same figures give the same file
        svg = benchmark.picture(read_json(figures_of(name))).svg
    write_atomic(picture_of(name), svg + drawn_of(name))
    return True


def markdown(table: Table) -> str:
    """Return a table in Markdown, under its title."""
    return "\n".join([f"**{table.title}**", "", markdown_table(table.header, table.lines)])


def block(name: str, folder: Path) -> str:
    """Return the text between the markers of benchmark `name` in the README in `folder`. Raises ConfigError for an
    unknown name.
    """
    benchmark: Benchmark = BENCHMARKS.load(name)
    path = figures_of(name)
    if not path.exists():
        return f"*Not measured yet: `robopolicy bench {name} json=assets/figures/{name}.json`, then `bench tables`.*"
    figures = read_json(path)
    parts = [markdown(table) for table in benchmark.tables(figures)]
    if benchmark.picture is not None:
        plot = benchmark.picture(figures)
        parts.insert(0, f"![{plot.title}. {plot.caption}]({picture_of(name).relative_to(folder, walk_up=True)})")
    return "\n\n".join([*parts, f"*Figures: assets/figures/{name}.json, made by `{figures['command']}`.*"])


def written(text: str, folder: Path) -> str:
    """Return the text of a README in `folder` with all tables updated."""
    return PLACE.sub(lambda match: f"<!-- table:{match[1]} -->\n{block(match[1], folder)}\n<!-- end -->", text)


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Write the READMEs' tables and draw their plots; return {"readmes": {file: its tables}, "pictures": [file]}.

    Raises ConfigError outside a checkout, where there are no READMEs.
    """
    tables_of: dict[str, list[str]] = {}
    for path in READMES:
        if not path.exists():
            raise ConfigError(f"{path} does not exist: tables are written in a checkout of the repository.")
        text = path.read_text()
        write_atomic(path, written(text, path.parent))
        tables_of[str(path.relative_to(HERE.parents[1]))] = PLACE.findall(text)
    pictures = sorted(name for name in {name for names in tables_of.values() for name in names} if draw(name))
    return {"readmes": tables_of, "pictures": pictures}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the written tables and those without results."""
    lines = [
        [
            name,
            path,
            "written" if figures_of(name).exists() else "not measured yet",
            "drawn" if name in figures["pictures"] else "",
        ]
        for path, names in figures["readmes"].items()
        for name in names
    ]
    return [Table("Tables of the READMEs", ["table", "file", "", "plot"], lines)]


BENCHMARK = Benchmark("Tables and plots of the READMEs, from assets/figures.", (), benchmark, tables)
