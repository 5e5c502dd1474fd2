"""Other names for the columns of a recorded dataset and for the elements of its vectors, given as {its name: our name}.

A dataset that somebody else recorded may call its columns `image`, `state` and `actions`, and its elements `motor_0`;
policies read `observation.*` and `action`. The files stay as they are: names change where they are read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from robopolicy.core.arrays import is_mapping, is_sequence
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError, as_setting
from robopolicy.core.spec import IMAGE_PREFIX, STATE, Field

_STATES = ("state", "qpos", "proprio", "robot_state", "joint_positions")
_BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")


def renamed_features(
    features: Mapping[str, Mapping[str, Any]], rename: Mapping[str, str], folder: Path
) -> dict[str, dict[str, Any]]:
    """Return the features of meta/info.json under their new names; names that they do not have are not asked for.

    Raises DataError where two columns would have one name.
    """
    found: dict[str, dict[str, Any]] = {}
    for column, feature in features.items():
        name = rename.get(column, column)
        if name in found or (name != column and name in features and rename.get(name, name) == name):
            raise DataError(f"{folder} has two columns '{name}' once '{column}' is called so: rename one of them.")
        found[name] = {**feature, "names": _renamed_names(feature.get("names"), rename)} if rename else dict(feature)
    return found


def _renamed_names(names: Any, rename: Mapping[str, str]) -> Any:
    if isinstance(names, str):
        return rename.get(names, names)
    if is_sequence(names):
        return [_renamed_names(name, rename) for name in names]
    if is_mapping(names):
        return {_renamed_names(key, rename): _renamed_names(value, rename) for key, value in names.items()}
    return names


def with_names(episodes: Episodes, rename: Mapping[str, str]) -> Episodes:
    """Return `episodes` whose elements are called as `rename` says."""
    if not rename:
        return episodes

    def named(field: Field) -> Field:
        names = tuple(rename.get(name, name) for name in field.names)
        if twice := [name for name in names if names.count(name) > 1 and name in rename.values()]:
            raise DataError(f"Two elements would be called '{twice[0]}' once they are renamed: rename both, or none.")
        return replace(field, names=names)

    fields = {key: named(field) for key, field in episodes.observation_fields.items()}
    return replace(episodes, observation_fields=fields, action_field=named(episodes.action_field))


def names_in(features: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the names of columns and of their elements."""
    return {*features, *(name for feature in features.values() for name in _texts(feature.get("names")))}


def _texts(names: Any) -> Iterable[str]:
    if isinstance(names, str):
        yield names
    elif is_sequence(names) or is_mapping(names):
        for inner in (*names, *(names.values() if is_mapping(names) else ())):
            yield from _texts(inner)


def advice(features: Mapping[str, Mapping[str, Any]], stored: Mapping[str, str] | None = None) -> str:
    """Return the setting that gives columns the names under which policies read, " rename={...}", "" for none.

    stored: what the files call a column of another name.
    """
    found: dict[str, str] = {}
    for name, feature in features.items():
        kind, shape = str(feature.get("dtype")), feature.get("shape") or ()
        if name in _BOOKKEEPING or name.startswith(("observation.", "next.")):
            continue
        if kind in ("image", "video"):
            found[name] = IMAGE_PREFIX + name.removeprefix("observation/").replace("/", "_").replace(".", "_")
        elif name in ("actions", "a") and "action" not in features:
            found[name] = "action"
        elif kind.startswith("float") and len(shape) == 1 and name in _STATES and STATE not in features:
            found[name] = STATE
    found = {(stored or {}).get(name, name): ours for name, ours in found.items()}
    if undone := [name for name, ours in found.items() if name == ours]:
        return f" train.rename takes the name from '{undone[0]}' under which policies read it: leave that out."
    return f" Give them the names under which policies read: {as_setting('train.rename', found)}." if found else ""
