"""Former names of settings: replaced by the current names, with a note.

The names are those that the sections' classes list (`core.structured.renamed`), and moved sections (`MOVED`). Saved
files need none of this: `core.structured.from_plain` reads them under either name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from robopolicy.configuration.config import Config
from robopolicy.core.errors import ConfigError
from robopolicy.core.registry import is_dotted
from robopolicy.core.structured import Tagged, renamed, renamed_values, with_current_names

MOVED = {
    "policy.joint": "policy",
    **dict.fromkeys(
        (f"worldmodel.{kind}" for kind in ("ensemble", "rssm", "pixel_diffusion", "video")), "worldmodel.config"
    ),
}
"""Sections of earlier versions and their current path."""


class FormerNames:
    """Replaces former names in the settings of one command and collects a note on each; overrides: the command line."""

    def __init__(self, overrides: Sequence[str]):
        pairs = [override.lstrip("+").partition("=")[::2] for override in overrides]
        self._kinds = {key.removesuffix(".kind"): value for key, value in pairs}
        self.notes: dict[str, None] = {}

    def present(self, overrides: Sequence[str], composed: Mapping[str, Any] | None = None) -> list[str]:
        """Return `key=value` overrides under current names; settings of a section's kind are renamed only when the
        settings are `composed`, because the kind is then known.

        Raises ConfigError when a setting is given under two names with different values.
        """
        current_overrides: list[str] = []
        by_path: dict[str, tuple[str, str]] = {}
        for override in overrides:
            key, equals, value = override.partition("=")
            plain = key.lstrip("+")
            path, now = self._present(plain, value, composed)
            other, before = by_path.setdefault(path, (plain, now))
            if equals and other != plain and before != now:
                raise ConfigError(
                    f"'{plain}' and '{other}' are the same setting, given as {now} and {before}: keep one."
                )
            if path != plain:
                self._note(plain, path)
            elif now != value:
                self._note(f"{plain}={value}", f"{plain}={now}")
            current_overrides.append(f"{key.removesuffix(plain)}{path}{equals}{now}")
        return current_overrides

    def replaced(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain settings, such as those of a recipe, under current names. Raises ConfigError as `present`."""
        settings = dict(tree)
        for old, new in MOVED.items():
            top, inner = old.split(".")
            section = settings.get(top)
            if isinstance(section, Mapping) and isinstance(section.get(inner), Mapping):
                rest = {key: value for key, value in section.items() if key != inner}
                place = new.partition(".")[2]
                inside = {**rest.get(place, {}), **section[inner]} if place else section[inner]
                settings[top] = {**rest, place: inside} if place else {**rest, **inside}
                self._note(old, new)
        return self._replaced(Config, settings, "")

    def _replaced(self, kind: Any, tree: Mapping[str, Any], where: str) -> dict[str, Any]:
        if isinstance(kind, type) and issubclass(kind, Tagged):
            config = self._configuration(kind, where, tree)
            if kind.beside:
                if config is None:
                    return dict(tree)
                tag = {key: value for key, value in tree.items() if key == "kind"}
                return {**tag, **self._replaced(config, {key: tree[key] for key in tree if key != "kind"}, where)}
        else:
            config = None
        types = {item.name: item.type for item in dataclasses.fields(kind)}
        names, values = renamed(kind), renamed_values(kind)
        for key, value in tree.items():
            name, place = names.get(key, key), f"{where}.{key}".lstrip(".")
            if name != key:
                self._note(place, f"{where}.{name}".lstrip("."))
            elif isinstance(value, str) and value in values.get(name, {}):
                self._note(f"{place}={value}", f"{place}={values[name][value]}")
        settings = with_current_names(kind, tree, where)
        for key, value in settings.items():
            inner = config if key == "config" and config is not None else types.get(key)
            if isinstance(inner, type) and dataclasses.is_dataclass(inner) and isinstance(value, Mapping):
                settings[key] = self._replaced(inner, value, f"{where}.{key}".lstrip("."))
        return settings

    def _present(self, key: str, value: str, composed: Mapping[str, Any] | None) -> tuple[str, str]:
        """Return one override's current key and value."""
        for old, new in MOVED.items():
            if key == old or key.startswith(f"{old}."):
                key = new + key.removeprefix(old)
        kind: Any = Config
        path: list[str] = []
        for part in key.split("."):
            if isinstance(kind, type) and issubclass(kind, Tagged) and (kind.beside or part == "config"):
                node: Any = composed
                for each in path:
                    node = node.get(each, {}) if isinstance(node, Mapping) else {}
                config = None if composed is None else self._configuration(kind, ".".join(path), node)
                if not kind.beside:
                    path.append(part)
                    kind = config
                    continue
                kind = None if part == "kind" else config
            if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
                path.append(part)
                continue
            name = renamed(kind).get(part, part)
            value = renamed_values(kind).get(name, {}).get(value, value)
            kind = next((item.type for item in dataclasses.fields(kind) if item.name == name), None)
            path.append(name)
        return ".".join(path), value

    def _configuration(self, section: type[Tagged], path: str, node: Any) -> type | None:
        """Return the configuration class of the chosen kind of a section; None for an unknown name."""
        saved_kind = node.get("kind") if isinstance(node, Mapping) else None
        name = str(self._kinds.get(path) or saved_kind or section.kind)
        if name not in section.kinds and not is_dotted(name):
            return None  # an unknown kind is reported where the section is built
        return section.kinds.configuration(name)

    def _note(self, old: str, new: str) -> None:
        self.notes.setdefault(f"{old} is now {new}.")
