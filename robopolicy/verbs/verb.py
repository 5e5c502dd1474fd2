"""Declaration of a verb, and how the command line reads it without importing the verb.

A verb is a module with a docstring (its help), `VERB = Verb(...)` with literal arguments, and `run(config)`.
Declarations are parsed from the source, so help on any verb imports neither torch nor other dependencies of the job.
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
    "improve",
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
    "watch",
)
VERBS = Registry("verb", "robopolicy.verbs", {name: f"robopolicy.verbs.{name}:run" for name in NAMES})
"""All verbs, in the order of the overview; other packages add theirs through entry points."""


@dataclass(frozen=True)
class Verb:
    """One job: its summary line, the configuration sections that it reads, an example, and the settings that positional
    words fill, in order. lists: those of them that are lists, of which the word is one element. text: the docstring of
    its module. short: other spellings of settings, name -> setting. world_from: settings whose checkpoint or dataset
    determines the world when none is named -> its default location "verb/part" ("" for none, "server" for the policy
    server, "unassumed": no world is assumed, "alone": where it is given, there is no world). resumes: whether the same
    command resumes an interrupted run.
    """

    summary: str
    sections: tuple[str, ...]
    example: str
    targets: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    text: str = ""
    short: Mapping[str, str] = field(default_factory=dict[str, str])
    world_from: Mapping[str, str] = field(default_factory=dict[str, str])
    resumes: bool = False


def declaration(name: str) -> Verb:
    """Return the declaration of the verb `name`; raises ConfigError when there is none."""
    module = VERBS.path(name).partition(":")[0]
    module_spec = importlib.util.find_spec(module)
    if module_spec is None or module_spec.origin is None:
        raise ConfigError(f"The verb '{name}' names the module {module}, which does not exist.")
    tree = ast.parse(Path(module_spec.origin).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _names(node) == ["VERB"]:
            return Verb(**_literals(node.value, module), text=ast.get_docstring(tree) or "")
    raise ConfigError(f"{module} declares no verb: add VERB = Verb(summary=..., sections=(...), example=...).")


def _names(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def _literals(call: ast.Call, module: str) -> dict[str, Any]:
    try:
        return {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    except ValueError as error:
        raise ConfigError(
            f"{module}: VERB is parsed without running the module: pass keyword arguments that are literals."
        ) from error
