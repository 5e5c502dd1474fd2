"""The one configuration of every verb: sections with their defaults, composed by hydra.

`configs/recipe/<task>.yaml` holds what differs from the defaults for a task, `configs/world/<world>.yaml` names one.
"""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.resources import resource
from robopolicy.core.structured import choices, explanations, from_plain, to_plain
from robopolicy.sections import Config

GROUPS = ("recipe", "world")
RENAMED = {
    "finetune.units": "finetune.finetuned_steps",
    "finetune.scored_units": "finetune.scored_steps",
    "finetune.branch_unit": "finetune.branch_sampling_step",
    "finetune.worlds": "finetune.num_envs",
    "finetune.decisions": "finetune.rollout_length",
    "finetune.actor_rate": "finetune.learning_rate",
    "finetune.critic_rate": "finetune.critic_learning_rate",
    "policy.finetuned_units": "policy.finetuned_steps",
    "policy.noisy_units": "policy.noisy_steps",
}
"""Keys of earlier versions and what they are called now."""
OUTSIDE = ("gymnasium:", "metaworld/")
"""What names of worlds from outside suites begin with: `world=` takes them as they are."""


def compose(overrides: list[str]) -> Config:
    """Compose defaults, world, recipe and `key=value` overrides, in this order of growing weight.

    `recipe=path/to/mine.yaml` and `world=path/to/mine.yaml` read your own file. Raises ConfigError naming the key.
    """
    defaults = to_plain(Config())
    store = ConfigStore.instance()
    store.store(name="defaults", node=defaults)
    prepared = [_prepare(override, defaults, store) for override in overrides]
    try:
        with initialize_config_dir(str(resource("configs")), version_base="1.3", job_name="robopolicy"):
            composed = hydra_compose("robopolicy", overrides=prepared)
    except HydraException as error:
        raise ConfigError(f"{error}") from error
    return from_plain(Config, OmegaConf.to_container(composed, resolve=True))  # pyright: ignore[reportArgumentType]


def to_yaml(config: Config, sections: tuple[str, ...]) -> str:
    """Return the given sections as YAML, as saved in a run folder."""
    plain = to_plain(config)
    return OmegaConf.to_yaml(OmegaConf.create({name: plain[name] for name in sections}))


def groups() -> dict[str, list[str]]:
    """Return the names that `recipe=` and `world=` accept."""
    return {group: sorted(path.stem for path in resource("configs", group).glob("*.yaml")) for group in GROUPS}


@dataclass(frozen=True)
class Described:
    """A section for the help page: its path, such as worldmodel.video, what it is about, and a line a key: name,
    value and what it means.
    """

    path: str
    text: str
    keys: list[tuple[str, str, str]]


def described(names: tuple[str, ...], config: Config) -> list[Described]:
    """Return sections of a configuration with the sections inside them, as the help page shows them."""
    return [part for name in names for part in _described(name, getattr(config, name))]


def _described(path: str, section: Any) -> Iterator[Described]:
    kind, keys, inner = type(section), [], []
    hints, texts = typing.get_type_hints(kind), explanations(kind)
    for item in dataclasses.fields(kind):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            inner.append((f"{path}.{item.name}", value))
            continue
        text = texts.get(item.name, "")
        unsaid = [name for name in choices(hints[item.name]) if name not in text]
        if unsaid:
            text = f"{text} One of {', '.join(choices(hints[item.name]))}."
        keys.append((item.name, _as_written(to_plain(value)), text))
    yield Described(path, " ".join((kind.__doc__ or "").split("\n\n")[0].split()), keys)
    for name, value in inner:
        yield from _described(name, value)


def _as_written(value: Any) -> str:
    """Return a value as it is written after the `=`."""
    if isinstance(value, list):
        return f"[{','.join(map(_as_written, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return '""' if value == "" else str(value)


def _prepare(override: str, defaults: Mapping[str, Any], store: ConfigStore) -> str:
    key, _, value = override.partition("=")
    key = key.lstrip("+")
    if key == "world" and value.startswith(OUTSIDE):
        return f"++world.name={value}"
    if key in GROUPS:
        return f"{key}={_group_option(key, value, store)}"
    if key in RENAMED:
        raise ConfigError(f"'{key}' is called '{RENAMED[key]}' now.")
    node: Any = defaults
    for depth, part in enumerate(key.split(".")):
        if not isinstance(node, Mapping) or (part not in node and not _is_open(key.split(".")[:depth])):
            place = ".".join(key.split(".")[:depth])
            known = [f"{place}.{name}" if place else name for name in node] if isinstance(node, Mapping) else []
            raise ConfigError(f"Unknown configuration key '{key}'.{did_you_mean(key, known)}")
        node = node.get(part, {})
    return f"++{key}={value}"


def _is_open(path: list[str]) -> bool:
    """Whether the section at `path` takes keys of the user's own (a dict field)."""
    kind: Any = Config
    for part in path:
        item = (
            {entry.name: entry for entry in dataclasses.fields(kind)}.get(part)
            if dataclasses.is_dataclass(kind)
            else None
        )
        if item is None:
            return not dataclasses.is_dataclass(kind)
        kind = item.type if not isinstance(item.type, str) else Any
    return not dataclasses.is_dataclass(kind)


def _group_option(group: str, value: str, store: ConfigStore) -> str:
    if not value.endswith((".yaml", ".yml")):
        known = groups()[group]
        if value not in known:
            raise ConfigError(
                f"{group}={value} is not known.{did_you_mean(value, known)} Or give a path to a .yaml file."
            )
        return value
    path = Path(value)
    if not path.is_file():
        raise ConfigError(f"{group}={value}: there is no such file.")
    package = "_global_" if group == "recipe" else group
    store.store(group=group, name=path.stem, package=package, node=OmegaConf.to_container(OmegaConf.load(path)))
    return path.stem
