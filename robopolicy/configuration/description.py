"""Sections as the help page shows them."""

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from robopolicy.configuration.config import Config
from robopolicy.core.registry import load_dotted
from robopolicy.core.structured import REGISTRY, Tagged, choices, explanations, to_plain


@dataclass(frozen=True)
class Described:
    """A section for the help page: its path, such as world.imagination, what it is about, and a line a key: name,
    value and what it means.
    """

    path: str
    text: str
    keys: list[tuple[str, str, str]]


def described(names: tuple[str, ...], config: Config) -> list[Described]:
    """Return sections of a configuration with the sections inside them; of kinds, the chosen one."""
    return [part for name in names for part in _described(name, getattr(config, name))]


def _described(path: str, section: Any) -> Iterator[Described]:
    kind, keys, inner = type(section), [], []
    hints, texts = typing.get_type_hints(kind), explanations(kind)
    for item in dataclasses.fields(kind):
        value = getattr(section, item.name)
        if isinstance(section, Tagged) and section.beside and item.name == "config":
            own, *deeper = _described(path, value)
            keys += [row for row in own.keys if row[0] != "kind"]
            inner += deeper
            continue
        if dataclasses.is_dataclass(value):
            inner += _described(f"{path}.{item.name}", value)
            continue
        text = texts.get(item.name, "")
        names = choices(hints[item.name])
        if isinstance(section, Tagged) and item.name == "kind":
            names = section.kinds.names()
        elif REGISTRY in item.metadata:
            names = load_dotted(item.metadata[REGISTRY], "Registry").names()
        if any(name not in text for name in names):
            text = f"{text} One of {', '.join(names)}."
        keys.append((item.name, _as_written(to_plain(value)), text))
    yield Described(path, " ".join((kind.__doc__ or "").split("\n\n")[0].split()), keys)
    yield from inner


def _as_written(value: Any) -> str:
    """Return a value as it is written after the `=`."""
    if isinstance(value, list):
        return f"[{','.join(map(_as_written, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return '""' if value == "" else str(value)
