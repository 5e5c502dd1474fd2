"""Report of the data that training reads: columns used and skipped, episodes, frames, instructions."""

import textwrap
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from robopolicy.core.episodes import Episodes, require_recorded
from robopolicy.core.errors import DataError
from robopolicy.core.finite_values import join_names
from robopolicy.core.spec import TASK, PolicySpec
from robopolicy.data.lerobot_checks import camera_columns, is_depth, kind_in_words
from robopolicy.data.lerobot_reading import LABEL_STEPS, LABELS, WHO_ACTED

_KEPT = (
    "episode_index",
    "frame_index",
    "timestamp",
    "task_index",
    "index",
    "episode_seed",
    "action",
    LABELS,
    LABEL_STEPS,
    *WHO_ACTED,
)
_READING = {
    True: ": the policy reads them",
    False: ": the policy reads no text, and treats all of them as one task",
    None: "",
}
_OUTCOMES = ("next.reward", "next.success", "next.terminated", "next.done", "next.truncated")


@dataclass(frozen=True)
class DataRead:
    """Data that was read: columns by name, skipped columns with the reason; reads_text: whether the policy reads
    instructions.

    reads_text is None when the policy does not report it.
    """

    data: str
    episodes: int
    frames: int
    columns: tuple[str, ...]
    skipped: Mapping[str, str]
    instructions: tuple[str, ...]
    reads_text: bool | None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {**asdict(self), "skipped": dict(self.skipped)}

    def lines(self) -> list[str]:
        """Return a human-readable report, one line per fact."""
        lines = [
            f"Data: {self.data}, {self.episodes} episodes, {self.frames} frames",
            f"Reads: {', '.join(self.columns)}",
        ]
        lines += [f"Skipped: {name} ({reason})" for name, reason in self.skipped.items()]
        if len(self.instructions) > 1:
            texts = join_names([f"'{textwrap.shorten(text, 60)}'" for text in self.instructions])
            lines.append(f"Instructions: {len(self.instructions)}, {texts}{_READING[self.reads_text]}")
        return lines


def describe_reading(
    data: Path | str,
    features: Mapping[str, Mapping[str, Any]],
    episodes: Episodes,
    used: Collection[str],
    reads_text: bool | None = None,
) -> DataRead:
    """Describe the training data in the dataset at `data`, whose columns are `features` (meta/info.json).

    used: keys of observations that the policy reads; reads_text: whether it reads instructions, None if unknown.
    """
    columns = camera_columns(features, Path(data))
    keys = {column: key for key, column in columns.items()}
    skipped = {
        name: _reason(name, feature, keys.get(name, name) in episodes.observation)
        for name, feature in features.items()
        if keys.get(name, name) not in used and name not in _KEPT and not name.startswith(_OUTCOMES)
    }
    instructions = tuple(sorted(set(episodes.tasks)))
    key_names = [f"{key} (from {columns[key]})" if columns.get(key, key) != key else key for key in used]
    columns_used = (*key_names, "action", *((TASK,) if reads_text and len(instructions) > 1 else ()))
    return DataRead(str(data), len(episodes), episodes.step_count, columns_used, skipped, instructions, reads_text)


def _reason(name: str, feature: Mapping[str, Any], was_read: bool) -> str:
    if was_read:
        return "not read by the policy; built-in policies read the keys in policy.observation_keys"
    if not name.startswith("observation."):
        return f"{kind_in_words(feature)}; only observation.* and action are read"
    if is_depth(feature):
        return f"{kind_in_words(feature)}; only colour images are read"
    return f"its values are of type {feature['dtype']}, neither numbers nor images"


SLACK = 0.05
"""Tolerated relative deviation of a dataset's control rate from the policy's: LeRobot rounds rates to integers."""


def require_fit_of(path: Path, episodes: Episodes, spec: PolicySpec) -> None:
    """Raise DataError unless the data has the policy's inputs with their shapes, elements, units and control rate."""
    require_recorded(path, episodes, spec.observation, spec.action)
    if not spec.fps:
        raise DataError(
            f'{path} has {episodes.fps:g} steps per second, but the policy\'s control rate is unknown: add "fps": N '
            "(its training rate) to robopolicy.json next to its config.json."
        )
    if abs(episodes.fps - spec.fps) > SLACK * spec.fps:
        raise DataError(
            f"{path} has {episodes.fps:g} steps per second, but the policy acts at {spec.fps:g}: correct fps in "
            "meta/info.json, or resample the episodes."
        )
