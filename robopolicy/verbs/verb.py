"""Declaration of a verb, and how the command line reads it without importing the verb.

A verb is a module with a docstring (its help), `VERB = Verb(...)` with literal arguments, and `run(config)`.
Declarations are parsed from the source, so help on any verb imports neither torch nor other dependencies of the job.
"""

import ast
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from robopolicy.core.errors import ConfigError
from robopolicy.core.registry import Registry

if TYPE_CHECKING:
    from robopolicy.configuration import Config

PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)(?:[A-Za-z_/~]|\.\.?/)[A-Za-z0-9_./@%+~-]*", re.IGNORECASE)
"""Text that is a setting's value without quotes."""

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
    "export",
    "pipeline",
    "sweep",
    "success",
    "evaluate",
    "detect",
    "analyze",
    "rank",
    "route",
    "serve",
    "drive",
    "doctor",
    "check",
    "bench",
    "algorithms",
    "report",
    "watch",
    "push",
)
VERBS = Registry("verb", "robopolicy.verbs", {name: f"robopolicy.verbs.{name}:run" for name in NAMES})
"""All verbs, in the order of the overview; other packages add theirs through entry points."""


@dataclass(frozen=True)
class Verb:
    """One job: its summary line, the configuration sections that it reads, an example, and the settings that positional
    arguments set, in order. lists: those that are lists, of which the argument is one element. text: the docstring of
    its module. short: other spellings of settings, name -> setting. world_from: settings whose checkpoint or dataset
    determines the world when none is named -> its default location "verb/part" ("" for none, "server" for the policy
    server, "unassumed": no world is assumed, "alone": where it is given, there is no world). resumes: whether the same
    command resumes an interrupted run. replicas: whether several processes of torchrun or `accelerate launch` train
    data-parallel. rest: a setting that takes all words and settings but the verb's own, as they are written, for a verb
    that runs others.
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
    replicas: bool = False
    rest: str = ""


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


def configuration_of(verb: Verb, settings: list[str]) -> "Config":
    """Compose the configuration of a verb: `key=value` settings, the world of its checkpoint, dataset or server if no
    world is named, and local folders in place of repositories on the hub.
    """
    from robopolicy.configuration import compose, with_downloads  # imports hydra: only once a verb is known

    def in_origin(config: "Config") -> "Config":
        from robopolicy.building.origins import with_origin  # imports torch: only for verbs that need it

        return with_origin(with_downloads(config, verb.sections), verb.world_from)

    config = compose(settings, in_origin if verb.world_from else None, verb.sections)
    return with_downloads(config, verb.sections)


def overrides(name: str, verb: Verb, arguments: list[str]) -> list[str]:
    """Turn positional words into the verb's target settings; keep `key=value` unchanged."""
    if verb.rest:
        prefixes = (*(f"{section}." for section in verb.sections), "json=")
        verb_settings = [argument for argument in arguments if argument.startswith(prefixes)]
        rest = ",".join(_in_quotes(argument) for argument in arguments if argument not in verb_settings)
        return [*verb_settings, f"{verb.rest}=[{rest}]"]
    result: list[str] = []
    targets = list(verb.targets)
    for argument in arguments:
        is_path = bool(targets) and _exists(argument)
        if "=" in argument and not is_path:
            key, _, value = argument.partition("=")
            value_text = quoted(value) if key in verb.short and _exists(value) else value
            result.append(f"{verb.short.get(key, key)}={value_text}")
        elif argument.startswith("-"):
            raise ConfigError(
                f"'{argument}' is not an option: write settings as key=value. See: robopolicy {name} --help"
            )
        elif not targets:
            more = "no further positional argument" if verb.targets else "no positional argument"
            raise ConfigError(f"'{name}' takes {more} ('{argument}'): write settings as key=value.")
        else:
            key, text = targets.pop(0), quoted(argument) if is_path else argument
            result.append(f"{key}=[{text}]" if key in verb.lists else f"{key}={text}")
    return result


def _exists(argument: str) -> bool:
    """Whether an argument is an existing path; an argument too long for a path is not."""
    try:
        return Path(argument).exists()
    except OSError:
        return False


def setting(key: str, value: object) -> str:
    """Return key=value as it is written on the command line."""
    return f"{key}={quoted(value)}"


def quoted(value: object) -> str:
    """Return the value of a setting as text that is parsed back unchanged, whatever characters it contains."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{quoted(each)}" for key, each in cast(Mapping[str, object], value).items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(quoted, cast(Sequence[object], value)))}]"
    if isinstance(value, str | Path):
        return str(value) if PLAIN.fullmatch(str(value)) else _in_quotes(str(value))
    return json.dumps(value)


def _in_quotes(text: str) -> str:
    """Return a text in Hydra's quotes: backslashes count as such only before a quote."""
    doubled = re.sub(r"(\\+)('|$)", r"\1\1\2", text)
    return "'" + doubled.replace("'", r"\'") + "'"
