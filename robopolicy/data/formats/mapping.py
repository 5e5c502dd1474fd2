"""Mapping from a source's columns to those of the LeRobotDataset: guessed from keys and shapes, or set by the user."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from robopolicy.core.errors import ConfigError, DataError, did_you_mean
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE, camera_key
from robopolicy.data.formats.format import Column
from robopolicy.data.formats.hdf5 import ENCODED
from robopolicy.data.formats.pixels import layout

ACTION = "action"
REWARD, SUCCESS = "next.reward", "next.success"
TERMINATED = "next.terminated"
OUTCOMES = (REWARD, SUCCESS, TERMINATED)
_VECTORS = {
    ACTION: r"actions?|a",
    STATE: r"(robot_|joint_|low_dim_)?states?|obs|observations?|qpos|proprio|agent_pos|joint_positions|"
    r"robot\d+_(eef_(pos|quat|rot_axis_angle)|gripper_(qpos|width))",
    ENVIRONMENT_STATE: r"object|environment_state|env_state|desired_goal|goal|keypoints?",
    REWARD: r"rewards?",
    SUCCESS: r"(is_)?success(es)?",
    TERMINATED: r"terminals?|terminated|terminateds|terminations?|dones?",
}
"""Last parts of keys that always mean the same column."""
_PICTURES = ("img", "image", "images", "rgb", "pixels", "observation", "observations", "obs")
"""Keys that identify a column only as images."""


@dataclass(frozen=True)
class Part:
    """A column of the source, or a slice of its rows, elements first to last (exclusive)."""

    key: str
    first: int | None = None
    last: int | None = None

    def __str__(self) -> str:
        return self.key if self.first is None else f"{self.key}[{self.first}:{self.last}]"


ColumnMap = dict[str, tuple[Part, ...]]
"""Name in the LeRobotDataset -> source columns, which are concatenated."""


def is_picture(column: Column) -> bool:
    """Whether a column contains images."""
    return column.dtype == ENCODED or layout(column.shape, column.dtype) is not None


def mapped(columns: Mapping[str, Column], asked: Mapping[str, Any], where: object) -> ColumnMap:
    """Return the mapping of a source's `columns`; the user's entries, `asked` (convert.map), override guesses.

    Raises ConfigError if `asked` contains unknown or invalid names, DataError if no action or observation is found.
    """
    requested_targets = {_part(key, columns, where): _targets(key, value) for key, value in asked.items()}
    requested_keys = {part.key for part in requested_targets}
    used_targets = {target for targets in requested_targets.values() for target in targets}
    guesses: dict[str, list[Part]] = {}
    for key, column in columns.items():
        if key not in requested_keys:
            for part, target in _guessed(key, column):
                if target not in used_targets:
                    guesses.setdefault(target, []).append(part)
    result = _one_picture_each({target: tuple(parts) for target, parts in guesses.items()}, columns)
    for part, targets in requested_targets.items():
        for target in targets:
            result[target] = (*result.get(target, ()), part)
    _require_fitting(result, columns, where)
    return result


def _part(text: str, columns: Mapping[str, Column], where: object) -> Part:
    match = re.fullmatch(r"(.+)\[(\d*):(\d*)\]", text)
    key = match[1] if match else text
    if key not in columns:
        raise ConfigError(
            f"convert.map contains '{key}', which is not a column of {where}.{did_you_mean(key, columns)}"
        )
    if not match:
        return Part(key)
    size = _size(columns[key])
    first, last = int(match[2] or 0), int(match[3] or size)
    if is_picture(columns[key]) or not first < last <= size:
        raise ConfigError(f"convert.map: '{text}' is not a valid slice of a vector of {size} elements.")
    return Part(key, first, last)


def _targets(key: str, value: Any) -> tuple[str, ...]:
    names = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    for name in names:
        if not (isinstance(name, str) and (name in (ACTION, *OUTCOMES) or re.fullmatch(r"observation\.[\w.]+", name))):
            raise ConfigError(
                f"convert.map: '{key}' cannot be converted to '{name}': valid names are action, observation.state, "
                "observation.environment_state, observation.images.CAMERA, any other observation.NAME, "
                f"{', '.join(OUTCOMES)}, or null to drop the column."
            )
    return names


def _guessed(key: str, column: Column) -> Iterable[tuple[Part, str]]:
    """Yield the guessed mapping of a column that the user did not set."""
    if column.slices is not None:
        for text, target in column.slices.items():
            first, _, last = text.partition(":")
            yield Part(key, int(first), int(last)), target
        return
    if column.targets is not None:
        yield from ((Part(key), target) for target in column.targets)
        return
    leaf = key.rsplit("/", 1)[-1]
    if is_picture(column):
        yield Part(key), camera_key(key) if key.startswith("observation.") else IMAGE_PREFIX + _camera(leaf)
        return
    if key.startswith("observation.") or key in (ACTION, *OUTCOMES):
        yield Part(key), key
        return
    yield from ((Part(key), target) for target, names in _VECTORS.items() if re.fullmatch(names, leaf))


def _camera(leaf: str) -> str:
    if leaf in _PICTURES:
        return "image"
    return re.sub(r"\W", "_", re.sub(r"_(image|img|rgb)s?$", "", leaf))


def _one_picture_each(found: ColumnMap, columns: Mapping[str, Column]) -> ColumnMap:
    """Name images by their complete keys where the guessed names coincide."""
    result: ColumnMap = {}
    for target, parts in found.items():
        if len(parts) > 1 and all(is_picture(columns[part.key]) for part in parts):
            result |= {IMAGE_PREFIX + re.sub(r"\W", "_", part.key): (part,) for part in parts}
        else:
            result[target] = parts
    return result


def _require_fitting(found: ColumnMap, columns: Mapping[str, Column], where: object) -> None:
    listing = ", ".join(f"{key} ({in_words(column)})" for key, column in columns.items())
    if ACTION not in found:
        raise DataError(
            f'{where}: the action column is unknown. Set "convert.map={{KEY: action}}". The columns are {listing}.'
        )
    if not any(target.startswith("observation.") for target in found):
        raise DataError(
            f'{where}: the observation column is unknown. Set "convert.map={{KEY: observation.state}}". The '
            f"columns are {listing}."
        )
    for target, parts in found.items():
        pictures = [is_picture(columns[part.key]) for part in parts]
        names, key = ", ".join(map(str, parts)), next(part.key for part in parts)
        if any(pictures) and (len(parts) > 1 or not target.startswith(IMAGE_PREFIX)):
            raise ConfigError(
                f"convert.map: {names} would all become '{target}', but each image needs a camera name: "
                "observation.images.NAME."
            )
        if target.startswith(IMAGE_PREFIX) and not any(pictures):
            raise ConfigError(
                f"convert.map: '{names}' is not an image ({in_words(columns[key])}), but '{target}' is a camera."
            )
        if target in OUTCOMES and sum(size_of(part, columns) for part in parts) != 1:
            raise ConfigError(f"convert.map: '{target}' is one number per step, but {names} have more.")


def size_of(part: Part, columns: Mapping[str, Column]) -> int:
    """Return the number of elements of a vector or slice."""
    return _size(columns[part.key]) if part.first is None or part.last is None else part.last - part.first


def names_of(parts: tuple[Part, ...], columns: Mapping[str, Column]) -> tuple[str, ...]:
    """Return names for the elements of concatenated `parts`: their own, numbered keys if there are several parts, or
    ().
    """
    names: list[str] = []
    for part in parts:
        column_names = columns[part.key].names
        if len(column_names) == _size(columns[part.key]):
            names += column_names[part.first : part.last]
        elif len(parts) > 1:
            leaf = part.key.rsplit("/", 1)[-1]
            names += [
                f"{leaf}_{number}" for number in range(part.first or 0, (part.first or 0) + size_of(part, columns))
            ]
        else:
            return ()
    return tuple(names) if len(set(names)) == len(names) else ()


def _size(column: Column) -> int:
    return math.prod(column.shape)


def in_words(column: Column) -> str:
    """Describe the content of a column: "float64 [7]", "images uint8 [84, 84, 3]"."""
    kind = "" if column.dtype == ENCODED else f" {column.dtype}"
    return f"images{kind} {list(column.shape)}" if is_picture(column) else f"{column.dtype} {list(column.shape)}"


def table(columns: Mapping[str, Column], found: ColumnMap) -> list[list[str]]:
    """Return a line for every column of the source: its key, its content, and its new name."""
    lines: list[list[str]] = []
    for key, column in columns.items():
        becomes = [
            target if part.first is None else f"{target} ({part.first}:{part.last})"
            for target, parts in found.items()
            for part in parts
            if part.key == key
        ]
        lines.append([key, in_words(column), ", ".join(becomes) or "dropped"])
    return lines
