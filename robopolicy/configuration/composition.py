"""Composes the configuration from defaults, a recipe, a world and `key=value` overrides, and writes it as YAML.

hydra, omegaconf and yaml are imported where used: they are half of the time of `robopolicy VERB --help`, which needs
them only if it is given settings.
"""

import copy
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from robopolicy.configuration.config import Config
from robopolicy.configuration.former_names import FormerNames
from robopolicy.configuration.sections.run import DEMONSTRATIONS, WORLD_MODEL
from robopolicy.core.errors import ConfigError, RobopolicyNote, did_you_mean, in_one_line
from robopolicy.core.registry import is_dotted
from robopolicy.core.storage import read_text, resource
from robopolicy.core.structured import SINCE, Tagged, fixed, from_plain, to_plain
from sims.names import WORLDS, suite_of

GROUPS = ("recipe", "world")


def compose(
    overrides: list[str], origin: Callable[[Config], Config] | None = None, sections: Sequence[str] = ()
) -> Config:
    """Compose defaults, recipe, world and `key=value` overrides; later ones take precedence.

    `recipe=path/to/mine.yaml` and `world=path/to/mine.yaml` read custom files. When the command line selects another
    kind of policy or world model than the recipe, the recipe's kind-specific settings are ignored. origin: called when
    neither overrides nor recipe name a world; returns the configuration with one. sections: sections that are read,
    searched for unknown keys as well. Raises ConfigError naming the key.
    """
    if not overrides and origin is None:
        return Config()
    former = FormerNames(overrides)
    arguments = [_prepare(override, sections, former) for override in former.present(overrides)]
    composed = _hydra(arguments)
    again = former.present(arguments, composed)  # settings of kinds: which kind, is known now
    if again != arguments:
        arguments, composed = again, _hydra(again)
    for path, section in _tagged_sections():
        _leave_out_other_kinds(composed, path, section, arguments)
    composed = former.replaced(composed)
    for note in former.notes:
        warnings.warn(note, RobopolicyNote, stacklevel=2)
    config = from_plain(Config, composed)
    for key, value in _fixed_in(composed, {name: to_plain(getattr(config, name)) for name in composed}):
        note = (
            f"{key} is no longer a setting: it has been fixed at {value} since {SINCE}, the value you pass. Remove it."
        )
        warnings.warn(note, RobopolicyNote, stacklevel=2)
    names_world = any(_at(composed, ("world", key), None) is not None for key in ("name", "simulator"))
    return config if names_world or origin is None else origin(config)


def _fixed_in(given: Any, taken: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of plain settings that are no longer part of a configuration, because they are `fixed`."""
    if isinstance(given, Mapping) and isinstance(taken, Mapping):
        for key, value in given.items():
            place = f"{path}.{key}".lstrip(".")
            if str(key) in taken:
                yield from _fixed_in(value, taken[str(key)], place)
            else:
                yield place, value


def to_yaml(config: Config, sections: tuple[str, ...]) -> str:
    """Return the given sections as YAML, in the form saved in a run folder."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create({name: to_plain(getattr(config, name)) for name in sections}))


def groups() -> dict[str, list[str]]:
    """Return the names that `recipe=` and `world=` accept, in addition to files, suites and import paths."""
    recipes = sorted(path.stem for path in resource("configs", "recipe").glob("*.yaml"))
    return {"recipe": recipes, "world": [*WORLDS.names(), WORLD_MODEL, DEMONSTRATIONS]}


def _hydra(overrides: list[str]) -> dict[str, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        folder = str(resource("configs"))
        with _without_groups_of_hydra(), initialize_config_dir(folder, version_base="1.3", job_name="robopolicy"):
            composed = OmegaConf.to_container(hydra_compose("robopolicy", overrides=overrides), resolve=True)
    except OverrideParseException as error:
        raise ConfigError(
            f"{error.override.lstrip('+')} cannot be parsed: write a list as [a,b], a mapping as {{a: 1}}, and text "
            "that contains = , : [ ] { } ' \" in quotes within those of the shell, \"KEY='a=b'\"."
        ) from error
    except HydraException as error:
        hint = " A recipe sets its world as 'world: {name: push_t}'." if "override 'world'" in str(error) else ""
        raise ConfigError(f"{error}{hint}") from error
    except (OmegaConfBaseException, RecursionError, ValueError) as error:
        raise ConfigError(f"The settings cannot be combined: {in_one_line(error)}.") from error
    assert isinstance(composed, dict)
    return {str(key): value for key, value in composed.items()}


@contextmanager
def _without_groups_of_hydra() -> Iterator[None]:
    """Omit the config groups that Hydra composes for its own applications: launcher, logging, help and others.

    They are unused here and take 0.6 of the composition time.
    """
    from hydra.core.config_store import ConfigNode, ConfigStore

    groups = ConfigStore.instance().repo["hydra"]
    full_config: ConfigNode = groups["config.yaml"]
    groups["config.yaml"] = dataclasses.replace(full_config, node=_bare(full_config.name))
    try:
        yield
    finally:
        groups["config.yaml"] = full_config


@cache
def _bare(name: str) -> Any:
    """Return Hydra's own node of this name without its groups."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    bare = copy.deepcopy(ConfigStore.instance().repo["hydra"][name].node)
    OmegaConf.update(bare, "defaults", [])
    return bare


@cache
def _tagged_sections() -> tuple[tuple[tuple[str, ...], type[Tagged]], ...]:
    return tuple(_tagged(Config))


def _tagged(kind: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[Tagged]]]:
    """Yield path and class of every section that selects one of several kinds."""
    for item in dataclasses.fields(kind):
        if isinstance(item.type, type) and dataclasses.is_dataclass(item.type):
            if issubclass(item.type, Tagged):
                yield (*path, item.name), item.type
            yield from _tagged(item.type, (*path, item.name))


def _at(tree: Any, path: tuple[str, ...], *default: Any) -> Any:
    for part in path:
        if default and not (isinstance(tree, Mapping) and part in tree):
            return default[0]
        tree = tree[part]
    return tree


def _leave_out_other_kinds(
    composed: dict[str, Any], path: tuple[str, ...], section: type[Tagged], overrides: list[str]
) -> None:
    """Drop a recipe's kind-specific settings when the command line selects another kind without them."""
    place = ".".join(path)
    if not any(override.lstrip("+").startswith(f"{place}.kind=") for override in overrides):
        return
    config_path = path if section.beside else (*path, "config")
    kind_overrides = [item for item in overrides if item.lstrip("+").startswith(f"{place}.")]
    recipe = _at(_hydra([item for item in overrides if item not in kind_overrides]), config_path, {})
    kind = section.kinds.configuration(str(_at(composed, (*path, "kind"))))
    kind_keys = {"kind", *(item.name for item in dataclasses.fields(kind))}
    keys = [item.lstrip("+").partition("=")[0].split(".") for item in kind_overrides]
    override_keys = {parts[len(config_path)] for parts in keys if len(parts) > len(config_path)}
    node = _at(composed, config_path, {})
    for key in recipe:
        if key not in kind_keys and key not in override_keys:
            node.pop(key, None)


def _defaults(section: str) -> Any:
    """Return the plain defaults of a section; of a subsection with several kinds, only the kind."""
    tree = {section: to_plain(getattr(Config(), section))}
    for path, kind in _tagged_sections():
        if path[0] == section:
            node = _at(tree, path)
            settings = {} if kind.beside else {key: node[key] for key in node if key != "config"}
            _at(tree, path[:-1])[path[-1]] = {**settings, "kind": kind.kind}
    return tree[section]


def _prepare(override: str, sections: Sequence[str], former: FormerNames) -> str:
    key, _, value = override.partition("=")
    key = key.lstrip("+")
    if key == "world" and not value.endswith((".yaml", ".yml")):
        return _named_world(value)
    if key in GROUPS:
        return f"{key}={_group_option(key, value, former)}"
    _require_each_key_once(key, value)
    parts = tuple(key.split("."))
    for path, section in _tagged_sections():
        config_path = path if section.beside else (*path, "config")
        if parts == path and not value.startswith("{"):
            return f"++{key}.kind={value}"
        if parts[: len(config_path)] == config_path and len(parts) > len(config_path):
            return f"++{key}={value}"  # which keys there are depends on the kind, known once all is composed
    node: Any = dict.fromkeys(item.name for item in dataclasses.fields(Config))
    if parts[0] in node:
        node[parts[0]] = _defaults(parts[0])
    for depth, part in enumerate(parts):
        kind = _type_at(parts[:depth])
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and part in fixed(kind):
            break  # a constant, which is compared once all is composed
        if not isinstance(node, Mapping) or (part not in node and dataclasses.is_dataclass(kind)):
            place = ".".join(parts[:depth])
            candidates = [f"{place}.{name}" if place else name for name in node] if isinstance(node, Mapping) else []
            hint = _elsewhere(parts, sections) or did_you_mean(key, candidates)
            raise ConfigError(f"Unknown configuration key '{key}'.{hint}")
        node = node.get(part, {})
    if isinstance(node, str) and re.fullmatch(r"[\w.+-]+", value):
        value = f"'{value}'"  # a text may look like a number: run.name=1e3 is not 1000.0
    return f"++{key}={value}"


def _require_each_key_once(key: str, value: str) -> None:
    """Raise ConfigError when a mapping contains a key twice; Hydra would silently use the last one."""
    import yaml

    try:
        nodes = [yaml.compose(value, yaml.SafeLoader)] if value.startswith(("{", "[")) else []
    except yaml.YAMLError:
        return  # no YAML, such as a string in Hydra's quotes: whether it can be read Hydra says
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            names = [name.value for name, _ in node.value]
            if duplicates := [str(name) for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise ConfigError(f"{key} contains '{duplicates[0]}' twice: keep one of them.")
            nodes += [each for _, each in node.value]


def _elsewhere(parts: tuple[str, ...], sections: Sequence[str]) -> str:
    """Return " Did you mean 'x'?" for the closest setting with the same last name, preferring the key's own section."""
    if len(parts) < 2:
        return ""
    section_names = {item.name for item in dataclasses.fields(Config)}
    for section in dict.fromkeys((parts[0], *sections)):
        tree = _defaults(section) if section in section_names else None
        for path in sorted(_leaves(tree, (section,)), key=len):
            if path[-1] == parts[-1]:
                return f" Did you mean '{'.'.join(path)}'?"
    return ""


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the path of every setting."""
    if not isinstance(tree, Mapping):
        yield path
        return
    for name, subtree in tree.items():
        yield from _leaves(subtree, (*path, name))


def _named_world(name: str) -> str:
    """Return the override for `world=name`: a registered world, a suite's world, or an import path."""
    names = groups()["world"]
    if name not in names and suite_of(name) is None and not is_dotted(name):
        raise ConfigError(
            f"world={name} is not known.{did_you_mean(name, names)} Or pass an import path, package.module:Name, or "
            "a .yaml file."
        )
    return f"++world.name={name}"


def _type_at(path: tuple[str, ...]) -> Any:
    """Return the type of the section at `path`; a mapping instead of a dataclass accepts any keys."""
    kind: Any = Config
    for part in path:
        if not dataclasses.is_dataclass(kind):
            return Any
        kind = next((item.type for item in dataclasses.fields(kind) if item.name == part), Any)
    return kind


def _group_option(group: str, value: str, former: FormerNames) -> str:
    if not value.endswith((".yaml", ".yml")):
        names = groups()[group]
        if value not in names:
            raise ConfigError(
                f"{group}={value} is not known.{did_you_mean(value, names)} Or pass the path of a .yaml file."
            )
        return value
    path = Path(value)
    if not path.is_file():
        raise ConfigError(f"{group}={value}: this file does not exist.")
    package = "_global_" if group == "recipe" else group
    node = former.replaced(read_yaml(path) if group == "recipe" else {group: read_yaml(path)})
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(
        group=group, name=path.stem, package=package, node=node if group == "recipe" else node[group]
    )
    return path.stem


LONGEST_YAML, MOST_VALUES = 2**18, 20_000
"""Maximum bytes of a YAML file (parsing more takes seconds), and maximum number of values with aliases expanded."""


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file of plain values. Raises ConfigError when it contains anything else."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf._utils import get_yaml_loader
    from omegaconf.errors import OmegaConfBaseException

    text, loader = read_text(path, ConfigError, LONGEST_YAML), get_yaml_loader()
    try:
        if _values(yaml.compose(text, loader), {}) > MOST_VALUES:
            raise ConfigError(f"{path} expands to more than {MOST_VALUES} values: write them without aliases.")
        content = OmegaConf.to_container(OmegaConf.create(yaml.load(text, loader) or {}))
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a YAML file of plain settings ({in_one_line(error)}).") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} contains a {type(content).__name__}, not sections with settings.")
    return {str(key): value for key, value in content.items()}


def _values(node: Any, known: dict[int, float]) -> float:
    """Return the number of values that a YAML node expands to, aliases included; known: cached counts by node."""
    if id(node) not in known:
        known[id(node)] = float("inf")  # met again inside of itself
        content = getattr(node, "value", ())
        children = content if isinstance(content, list) else ()
        parts = (part for child in children for part in (child if isinstance(child, tuple) else (child,)))
        known[id(node)] = 1 + sum(_values(part, known) for part in parts)
    return known[id(node)]
