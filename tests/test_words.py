"""Words that are not to come back in public names, settings, help and docstrings, each with the term to use instead."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from robopolicy.configuration import Config, compose, described
from robopolicy.configuration.composition import _tagged_sections
from robopolicy.verbs.verb import VERBS, declaration

ROOT = Path(__file__).resolve().parents[1]
INSTEAD = {
    r"told|is told": "is given, reads",
    r"(?:so|as|that) many": "number of ...",
    r"lesson": "loss",
    r"knobs?": "setting, loss scale",
    r"reborn": "reset",
    r"rests|let \w+ rest": "is frozen",
    r"nobody|somebody|everybody": "the user, the policy, passive voice",
    r"what it|what they|what is": "a noun",
    r"how it stands": "state",
    r"picture|pictures": "image",
    r"leash": "weight toward the base policy",
    r"dreams?": "imagined rollout",
    r"twin": "simulator",
    r"of ours|of yours": "built-in, custom",
    r"verdict|judgement": "result",
}
"""Pattern of a word or phrase -> the term to use."""
NAMES = {"told", "lesson", "knob", "knobs", "reborn", "leash", "judge", "judges", "share", "watch", "tighten"}
NAMES |= {"near", "coin", "wave", "known", "seen", "given", "without", "more", "picture", "film", "patience_of"}
"""Words that no setting is called, alone or as a part of its name; the terms are in the settings' RENAMED."""
VERBS_OF_USE = {"watch"}
"""Sections that are called like their command."""


def settings() -> Iterator[tuple[str, str]]:
    """Yield path and help line of every setting, of every kind."""
    top = tuple(name for name in Config.__dataclass_fields__ if name != "json")
    parts = described(top, Config())
    for path, section in _tagged_sections():
        for kind in section.kinds.ours:
            parts += described((path[0],), compose([f"{'.'.join(path)}.kind={kind}"]))
    for part in parts:
        yield part.path, part.text
        yield from ((f"{part.path}.{key}", text) for key, _, text in part.keys)


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in ("robopolicy", "worldmodels", "sims"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def wrong_words(text: str) -> list[str]:
    found = {word: term for word, term in INSTEAD.items() if re.search(rf"\b(?:{word})\b", text, re.IGNORECASE)}
    return [f"{word} (write: {term})" for word, term in found.items()]


def test_settings_are_called_by_the_fields_terms():
    wrong = {path for path, _ in settings() if NAMES & {*path.rpartition(".")[2].split("_")}} - VERBS_OF_USE
    assert not wrong


def test_help_lines_and_summaries_of_commands_use_the_fields_terms():
    lines = dict(settings()) | {name: declaration(name).summary for name in VERBS.names()}
    wrong = {path: (words, text) for path, text in lines.items() if (words := wrong_words(text))}
    assert not wrong


def test_the_first_line_of_a_module_names_its_subject():
    heads = {path: (ast.get_docstring(tree) or "").split("\n")[0] for path, tree in sources()}
    assert not {path: head for path, head in heads.items() if re.match(r"(What|How|Which|Who|Where)\b", head)}


def test_docstrings_return_nouns():
    wrong = [
        f"{path}:{node.lineno}: {text.splitlines()[0]}"
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and (text := ast.get_docstring(node))
        and (re.match(r"(Return|Yield) (what|how|which|who|where)\b", text) or re.search(r"\bso many\b", text))
    ]
    assert not wrong
