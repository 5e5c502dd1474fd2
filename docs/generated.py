"""Reference pages that are written from the code at every build: verbs, settings, algorithms, papers."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from robopolicy.configuration import compose, described
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.presets import PRESETS
from robopolicy.verbs.verb import NAMES, declaration

API = {
    "Everyday names": ["robopolicy"],
    "Policies": ["robopolicy.core.policy", "robopolicy.policies.abilities", "robopolicy.policies.loading"],
    "Worlds": ["robopolicy.core.world", "robopolicy.core.spec"],
    "World models": ["worldmodels.protocol", "worldmodels.env"],
    "Algorithms": ["robopolicy.rl.registry", "robopolicy.rl.context"],
    "Checks of your own classes": ["robopolicy.testing.policy", "robopolicy.testing.world"],
    "Evaluation": ["robopolicy.evaluation.success", "robopolicy.evaluation.intervals"],
    "Registry and errors": ["robopolicy.core.registry", "robopolicy.core.errors"],
}
"""What is stable: modules whose public names keep working within a minor version, by the page's headings."""


def write_reference(folder: Path) -> None:
    """Write every generated page below `folder`; a page that has not changed is left alone, for faster rebuilds."""
    pages = {"verbs.md": verbs(), "settings.md": settings(), "algorithms.md": algorithms(), "api.md": api()}
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def verbs() -> str:
    """Return the page of every command: what it does, an example, and the sections of settings that it reads."""
    parts = ["# Commands", "Every command is `robopolicy VERB [TARGET] [section.key=value ...] [json=PATH]`."]
    for name in NAMES:
        verb = declaration(name)
        targets = "".join(f" [{key.split('.')[1].upper()}]" for key in verb.targets)
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
            parts.append(table(("setting", "default", "meaning"), ((f"`{k}`", f"`{v}`", m) for k, v, m in part.keys)))
    return "\n\n".join(parts) + "\n"


def algorithms() -> str:
    """Return the page of presets: which mechanism each of them puts into which slot."""
    rows = []
    for name in sorted(PRESETS):
        resolved = AlgorithmConfig(name).resolved()
        rows.append((f"`{name}`", *_preset(resolved)))
    parts = [
        "# Algorithms",
        "Choose one with `finetune.algorithm=NAME`; `robopolicy algorithms NAME` explains it, its options and its "
        "source. Slots that a preset leaves empty are not listed.",
        table(("preset", "mechanisms"), rows),
    ]
    return "\n\n".join(parts) + "\n"


def _preset(resolved: Any) -> tuple[str]:
    """Return the cell that lists what a preset resolves to."""
    return (", ".join(f"{entry.slot.value}: `{entry.name}`" for entry in resolved.entries),)


def api() -> str:
    """Return the page of the public Python interface, by Sphinx's autodoc."""
    parts = [
        "# Python interface",
        "These modules are the public interface: their names keep working within a minor version. Everything else may "
        "move. Arrays have their shape in brackets: B batch rows, T decisions, C control steps of an action chunk, A "
        "action elements, H frames of history, K denoising steps or tokens.",
    ]
    for heading, modules in API.items():
        parts.append(f"## {heading}")
        for module in modules:
            options = ":imported-members:\n:members:" if module == "robopolicy" else ":members:"
            body = f"```{{eval-rst}}\n.. automodule:: {module}\n" + "\n".join(f"   {o}" for o in options.split("\n"))
            parts += [f"### {module}", f"{body}\n```"]
    return "\n\n".join(parts) + "\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; bars inside cells are escaped."""
    names = list(head)
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines)


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
