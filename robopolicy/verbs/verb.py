"""What a verb declares about itself, and how the command line learns it without importing the verb.

A verb is a module with a docstring (its help), `VERB = Verb(...)` written in literals, and `run(config)`. Declarations
are read off the source, so that help on any verb imports neither torch nor anything else that a job needs.
"""

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from robopolicy.core.errors import ConfigError
from robopolicy.core.registry import Registry

NAMES = (
    "demo",
    "collect",
    "convert",
    "train",
    "finetune",
    "worldmodel",
    "imagine",
    "offline",
    "gate",
    "bakeoff",
    "online",
    "deploy",
    "teach",
    "distill",
    "optimize",
    "pipeline",
    "evaluate",
    "rank",
    "serve",
    "drive",
    "doctor",
    "check",
    "bench",
    "algorithms",
    "report",
)
VERBS = Registry("verb", "robopolicy.verbs", {name: f"robopolicy.verbs.{name}:run" for name in NAMES})
"""Every verb, in the order of the overview; other packages add theirs under the entry points."""


@dataclass(frozen=True)
class Verb:
    """One job: a line for the table, the sections of the configuration it reads, an example, and what bare words after
    it set, keys in their order; lists: those of them that hold several, of which the word is one. text: the docstring
    of its module. world_from: keys of what says in which world the verb acts where none is named -> "verb/part", where
    that lies by default ("" for nowhere, "server" for a server's, "unassumed": none is assumed). resumes: whether the
    same command goes on where a killed one was.
    """

    summary: str
    sections: tuple[str, ...]
    example: str
    targets: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    text: str = ""
    world_from: Mapping[str, str] = field(default_factory=dict[str, str])
    resumes: bool = False


def declaration(name: str) -> Verb:
    """Return what the verb called `name` declares; raises ConfigError where there is none."""
    module = VERBS.path(name).partition(":")[0]
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ConfigError(f"The verb '{name}' names the module {module}, which does not exist.")
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _names(node) == ["VERB"]:
            return Verb(**_literals(node.value, module), text=ast.get_docstring(tree) or "")
    raise ConfigError(f"{module} declares no verb: write VERB = Verb(summary=..., sections=(...), example=...).")


def _names(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def _literals(call: ast.Call, module: str) -> dict[str, Any]:
    try:
        return {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    except ValueError as error:
        raise ConfigError(f"{module}: VERB is read as text: give keyword arguments that are literals.") from error
