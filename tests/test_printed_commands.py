"""What messages, help and docstrings tell one to type works as it is written: verbs, settings, extras, modules."""

import ast
import dataclasses
import importlib.util
import re
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from robopolicy.configuration import Config, compose
from robopolicy.configuration.composition import _tagged_sections
from robopolicy.configuration.description import with_sections
from robopolicy.configuration.former_names import MOVED
from robopolicy.core.errors import ConfigError
from robopolicy.core.structured import Tagged, from_plain
from robopolicy.verbs.verb import VERBS

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
SECTIONS = {item.name for item in dataclasses.fields(Config)}
VALUE = r"\[[^\]\s]*\]|\{[^}\s]*\}|\"[^\"]*\"|'[^']*'|[^\s,;)`'\"]+"
SETTING = re.compile(rf"(?<![\w./{{}}-])((?:{'|'.join(SECTIONS)})(?:\.[a-z_0-9]+)+)(?:=({VALUE}))?")
COMMAND = re.compile(r"(?:^|[`'\" (])robopolicy ([a-z_]+)")
PROSE = {"and", "can", "of", "or", "that", "checkpoint", "checkpoints", "error", "key", "name", "observation", "policy"}
PROSE |= {"in", "only", "servers", "world", "worlds"}
"""What follows the word robopolicy in sentences about it."""
NO_SETTING = re.compile(
    r".*\.(json|html|jinja|mp4)|lerobot\.(policies|datasets|processor|scripts)\b.*|policy\.(log_prob|loss)"
    r"|plan\.step|distill\.divergence|drive\.operator"
)
"""Files, modules, methods, columns and options that are called like settings."""
FILLED = {"NUMBER": "3", "N": "3", "PORT": "3", "d": "3", "my_module:MyPolicy": "diffusion", "<id>": "Reacher-v5"}
FILLED["<warm>"] = "runs/train/push_t/0/checkpoint"
TOGETHER = {
    "collect.chains": "policy that records", "collect.correct.no_progress_steps": "policy",
    "collect.correct.max_policy_steps": "policy", "collect.correct.detector": "policy",
    "collect.correct.random_rate": "policy", "collect.correct.recover_data": "recover_steps",
    "collect.correct.rewind": "detector", "online.assist.no_progress_steps": "method",
    "online.assist.random_rate": "method",
    "online.assist.rewind": "detector",
    "online.dataset": "method", "online.extra_datasets": "method", "online.offline_ratio": "method",
    "offline.data": "model", "success.relabelled": "classifier", "world.success_reward": "success",
    "gate.evaluators": "not none", "policy.token.lora_rank": "model", "pipeline.changes.offline": "stages",
    "imagine.refresh_uncertainty": "refresh_every",
}  # fmt: skip
"""Settings that compose beside another one alone, which the texts name, as all of plan beside its model; here their
names are checked.
"""


def texts(path: Path) -> Iterator[str]:
    """Yield the literals of a module in one line each, {} for what is filled in."""
    tree = ast.parse(path.read_text())
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
        else:
            continue
        yield " ".join(text.split())


MODULES = [path for name in ("robopolicy", "sims", "worldmodels") for path in sorted((ROOT / name).rglob("*.py"))]
TEXTS = [(str(path.relative_to(ROOT)), text) for path in MODULES for text in texts(path)]
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parts[-2] != "reference")]
CODE = [(str(path.relative_to(ROOT)), code) for path in PAGES for code in re.findall(r"`([^`\n]+)`", path.read_text())]
"""Code words in the sentences of the documentation; test_readmes composes the commands in its blocks."""


def has(kind: Any, keys: list[str]) -> bool:
    """Whether a section of type `kind` has the setting at the end of these keys; free mappings have all."""
    if not keys:
        return True
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return "dict" in str(kind) or "Mapping" in str(kind) or "Any" in str(kind)
    if issubclass(kind, Tagged):
        own = keys[1:] if keys[0] == "config" else keys if kind.beside else None
        if own is not None:
            return any(has(kind.kinds.configuration(name), own) for name in kind.kinds.names()) or keys == ["kind"]
    hint = typing.get_type_hints(kind).get(keys[0])
    return hint is not None and has(hint, keys[1:])


def composed(key: str, value: str) -> None:
    """Raise ConfigError unless `key=value` alone, or beside a kind that has it, is a configuration."""
    parsed = OverridesParser.create().parse_override(f"{key}={value}").value()
    paths = [".".join(path) for path, section in _tagged_sections() if key.startswith(f"{'.'.join(path)}.")]
    sections = {".".join(path): section for path, section in _tagged_sections()}
    if key in sections:
        key = f"{key}.kind"
    first: ConfigError | None = None
    for kind in (None, *(name for path in paths for name in sections[path].kinds.names())):
        tree: dict[str, Any] = {}
        for path, setting in ([(f"{paths[0]}.kind", kind)] if kind else []) + [(key, parsed)]:
            node, *keys = tree, *path.split(".")
            for part in keys[:-1]:
                node = node.setdefault(part, {})
            node[keys[-1]] = setting
        try:
            from_plain(Config, tree)
            return
        except ConfigError as error:
            first = first or error
    assert first is not None
    raise first


def filled(value: str) -> str:
    """Return a value as somebody would type it, its placeholders filled in."""
    return re.sub(
        r"\b(?:NUMBER|PORT|N|d|my_module:MyPolicy)\b|<id>|<warm>",
        lambda found: FILLED[found[0]],
        value.replace(",...", "").rstrip(".:"),
    )


SETTINGS = sorted({(match[1], match[2]) for _, text in [*TEXTS, *CODE] for match in SETTING.finditer(text)}, key=str)


def where(key: str, value: str | None) -> list[str]:
    written = f"{key}={value}" if value else key
    return [path for path, text in [*TEXTS, *CODE] if written in text][:3]


def test_settings_that_are_named_exist():
    assert len(SETTINGS) > 400
    lost = []
    for key in {key for key, _ in SETTINGS}:
        section, *keys = key.split(".")
        named = typing.get_type_hints(Config)[section]
        if key not in MOVED and not NO_SETTING.fullmatch(key) and not has(named, keys):
            lost.append((key, where(key, None)))
    assert not lost


def test_settings_with_a_value_compose():
    refused = []
    for key, value in SETTINGS:
        whole = value is not None and "{" not in value and "|" not in value and value.count("[") == value.count("]")
        if (
            not whole
            or key in TOGETHER
            or key.startswith("plan.")
            or key in MOVED
            or not has(typing.get_type_hints(Config)[key.split(".")[0]], key.split(".")[1:])
        ):
            continue
        try:
            composed(key, filled(value))
        except Exception as error:
            refused.append((f"{key}={value}", where(key, value), str(error)[:200]))
    assert not refused


def test_commands_name_verbs():
    command_names = {(name, path) for path, text in TEXTS for name in COMMAND.findall(text) if name not in PROSE}
    assert {name for name, _ in command_names} > {"train", "finetune", "doctor"}
    assert not [each for each in command_names if each[0] not in VERBS.names()]


def test_extras_and_modules_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        name for _, text in TEXTS for names in re.findall(r"robopolicy\[([a-z,]+)\]", text) for name in names.split(",")
    }
    assert extras and extras <= set(project["optional-dependencies"])
    modules = {name for _, text in TEXTS for name in re.findall(r"python3? -m ([a-z_][\w.]*\w)", text)}
    modules -= {"pip", "robopolicy_client"}  # a distribution of its own, from robopolicy/client
    assert modules and not [name for name in modules if not is_installed(name)]


def is_installed(module: str) -> bool:
    """Whether a module's file is there; it is not imported."""
    first, *rest = module.split(".")
    module_spec = importlib.util.find_spec(first)
    places = (
        [] if module_spec is None else [Path(place, *rest) for place in module_spec.submodule_search_locations or ()]
    )
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


@pytest.mark.parametrize(
    ("sections", "message", "typed"),
    [
        (("finetune", "run"), "set precision=fp32.", "set finetune.precision=fp32."),
        (
            ("finetune",),
            "set scored_steps=0, or ratio_level=step",
            "set finetune.scored_steps=0, or finetune.ratio_level=step",
        ),
        (("train", "policy"), "decoding=causal", "policy.token.decoding=causal"),
        (("finetune",), "finetune.clip=0.1 and world=NAME", "finetune.clip=0.1 and world=NAME"),
        (
            ("finetune",),
            "ActionLimits(epochs=1), [epochs=2], nothing_of_ours=3",
            "ActionLimits(epochs=1), [epochs=2], nothing_of_ours=3",
        ),
    ],
)
def test_settings_of_libraries_are_printed_as_they_are_typed(sections: tuple[str, ...], message: str, typed: str):
    config = compose(["policy.kind=token"]) if "policy" in sections else Config()
    assert with_sections(message, sections, config) == typed
