"""Pages that are written from the code at every build: commands, settings, algorithms, long tables of results."""

import re
from pathlib import Path
from typing import Any

from results_table import RESULTS, ROOT

from robopolicy.configuration import compose, described
from robopolicy.evaluation.tables import markdown_table
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.presets import PRESETS
from robopolicy.verbs.verb import NAMES, declaration

API = {
    "Top-level functions": ["robopolicy"],
    "Policies": ["robopolicy.core.policy", "robopolicy.policies.abilities", "robopolicy.policies.loading"],
    "Worlds": ["robopolicy.core.world", "robopolicy.core.spec"],
    "World models": ["worldmodels.protocol", "worldmodels.env"],
    "Algorithms": ["robopolicy.rl.registry", "robopolicy.rl.context"],
    "Conformance checks of custom classes": ["robopolicy.testing.policy", "robopolicy.testing.world"],
    "Evaluation": ["robopolicy.evaluation.success", "robopolicy.evaluation.intervals"],
    "Registry and errors": ["robopolicy.core.registry", "robopolicy.core.errors"],
}
"""What is stable: modules whose public names keep working within a minor version, by the page's headings."""


def write_reference(folder: Path) -> None:
    """Write every generated page below `folder`; a page that has not changed is left alone, for faster rebuilds."""
    pages = {"verbs.md": verbs(), "settings.md": settings(), "algorithms.md": algorithms(), "api.md": api()}
    pages["results_tables.md"] = results_tables(folder)
    folder.mkdir(exist_ok=True)
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def verbs() -> str:
    """Return the page of every command: its description, an example, and the sections of settings that it reads."""
    parts = ["# Commands", "Every command is `robopolicy VERB [TARGET] [section.key=value ...] [json=PATH]`."]
    for name in NAMES:
        verb = declaration(name)
        targets = " VERB" if verb.rest else "".join(f" [{key.split('.')[1].upper()}]" for key in verb.targets)
        sections = ", ".join(f"[`{section}`](settings.md#{section})" for section in verb.sections)
        parts += [f"## {name}", verb.text, f"```sh\n{verb.example}\n```"]
        parts += [f"Usage: `robopolicy {name}{targets} [section.key=value ...]`. Settings: {sections}."]
    return "\n\n".join(parts) + "\n"


def settings() -> str:
    """Return the page of all settings: default and meaning, section by section."""
    config = compose([])
    top = tuple(dict.fromkeys(section for name in NAMES for section in declaration(name).sections))
    parts = [
        "# Settings",
        "Settings are written `section.key=value` on the command line, or as YAML in a recipe. Defaults are those of "
        "the default kind of policy and world model; `robopolicy VERB policy.kind=token --help` shows another kind's.",
    ]
    for part in described(top, config):
        parts.append(f"{'#' * (2 + part.path.count('.'))} {part.path}")
        parts.append(part.text)
        if part.keys:
            parts.append(
                markdown_table(("setting", "default", "meaning"), ((f"`{k}`", f"`{v}`", m) for k, v, m in part.keys))
            )
    return "\n\n".join(parts) + "\n"


def algorithms() -> str:
    """Return the page of presets: the mechanisms of each preset by slot."""
    rows = []
    for name in sorted(PRESETS):
        entries = AlgorithmConfig(name).resolved().entries
        rows.append((f"`{name}`", ", ".join(f"{entry.slot.value}: `{entry.name}`" for entry in entries)))
    parts = [
        "# Algorithms",
        "Choose one with `finetune.algorithm=NAME`; `robopolicy algorithms NAME` explains it, its options and its "
        "source. Slots that a preset leaves empty are not listed.",
        markdown_table(("preset", "mechanisms"), rows),
    ]
    return "\n\n".join(parts) + "\n"


def api() -> str:
    """Return the page of the public Python interface, by Sphinx's autodoc."""
    parts = [
        "# Python interface",
        "These modules are the public interface: their names keep working within a minor version. Everything else may "
        "move. Arrays have their shape in brackets: B batch rows, T policy calls, C control steps of an action chunk, "
        "A action elements, H frames of history, K denoising steps or tokens.",
    ]
    for heading, modules in API.items():
        parts.append(f"## {heading}")
        for module in modules:
            options = "   :members:\n" + ("   :imported-members:\n" if module == "robopolicy" else "")
            parts += [f"### {module}", f"```{{eval-rst}}\n.. automodule:: {module}\n{options}```"]
    return "\n\n".join(parts) + "\n"


LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#|mailto:)([^)#\s]*)(#[^)\s]*)?\)")
"""A link to a file: its text, its path and its anchor; pictures are none."""


def results_tables(folder: Path) -> str:
    """Return the page of long tables below `folder`: what a reader of results needs of the benchmarks' README."""
    title, *sections = re.split(r"^(?=## )", RESULTS.read_text(), flags=re.MULTILINE)
    kept = [
        part
        for part in sections
        if not part.startswith(("## How the tables are made", "## A benchmark of your own", "## A claim of yours"))
    ]
    contents = re.sub(r"^# .*$", "# Tables of results", title, flags=re.MULTILINE)
    text = re.sub(r"\]\((?:\.\./)+assets/", "](../../assets/", "".join((contents, *kept)))
    return with_links(text, RESULTS.parent, folder)


def with_links(text: str, source: Path, folder: Path) -> str:
    """Return a page of folder `source` for the documentation's folder `folder`: what is no page of it is only named.

    Links in the repository lead to files, so that they work where it is browsed; the built pages have no such files.
    """

    def linked(match: re.Match[str]) -> str:
        words, path, anchor = match[1], (source / match[2]).resolve(), match[3] or ""
        if path == RESULTS:
            path = ROOT / "docs" / "reference" / "results_tables.md"
        if path.is_relative_to(ROOT / "docs") and path.suffix == ".md":
            return f"[{words}]({path.relative_to(folder, walk_up=True)}{anchor})"
        name = f"`{path.relative_to(ROOT)}`"
        return name if name.strip("`").endswith(words.strip("`")) else f"{words} ({name})"

    return LINK.sub(linked, text)


def docstring_as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Change the lines of a docstring, which is plain text with `code` in backticks, into reStructuredText."""
    text = "\n".join(lines)
    pieces = re.split(r"(`[^`\n]+`)", text)
    cleaned = [
        f"`{piece}`"
        if piece.startswith("`") and len(piece) > 1
        else re.sub(r"([*|\\]|(?<=\w)_(?=\W|$))", r"\\\1", piece)
        for piece in pieces
    ]
    lines[:] = "".join(cleaned).split("\n")
