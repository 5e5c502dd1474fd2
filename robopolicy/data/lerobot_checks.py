"""What a LeRobotDataset promises and must keep, checked before it is used: nothing shifts, nothing reaches outside.

A frame that is missing or stands twice moves states against images, which no loss shows. Each check names the place.
"""

import math
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.core.errors import DataError, RobopolicyWarning
from robopolicy.core.spec import camera_key

TIMESTAMP_SLACK = 0.1
"""Share of a frame's duration by which a timestamp may miss step / fps."""


def check_information(information: Any, path: Path) -> None:
    """Raise DataError unless `meta/info.json` at `path` holds a frame rate, totals and well-formed features."""
    if not isinstance(information, dict):
        raise DataError(f"{path} holds {type(information).__name__}, not a dictionary: restore it from a copy.")
    fps = information.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not (0 < fps < math.inf):
        raise DataError(f"{path}: fps is {fps!r}, not a number of frames per second: correct it.")
    for name in ("total_episodes", "total_frames"):
        if not isinstance(information.get(name, 0), int):
            raise DataError(f"{path}: {name} is {information[name]!r}, not a whole number.")
    features = information.get("features")
    if not isinstance(features, dict) or not features:
        raise DataError(f"{path}: features is {str(features)[:60]}, not a dictionary of columns.")
    absent = [key for key in ("episode_index", "frame_index", "task_index") if key not in features]
    if absent:
        raise DataError(f"{path}: there is no feature {absent[0]}, by which frames find their episode.")
    for key, feature in features.items():
        shape = feature.get("shape") if isinstance(feature, dict) else None
        sizes = isinstance(shape, list | tuple) and all(isinstance(size, int) and size >= 0 for size in shape)
        if not (sizes and isinstance(feature.get("dtype"), str)):
            raise DataError(f"{path}: feature '{key}' has no dtype and shape, but {str(feature)[:60]}.")


def camera_columns(features: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the columns of pictures by their cameras' keys, whatever they are called under `observation.`.

    A picture is a column of images or videos, or of uint8 with three axes, one of them the channels. Depth is none.
    Raises DataError where two columns of `meta/info.json`, at `path`, would be one camera.
    """
    found: dict[str, str] = {}
    for name, feature in features.items():
        if not name.startswith("observation.") or not is_picture(feature) or is_depth(feature):
            continue
        if other := found.get(camera_key(name)):
            raise DataError(
                f"{path}: '{other}' and '{name}' would both be the camera '{camera_key(name)}': rename one."
            )
        found[camera_key(name)] = name
    return found


def is_picture(feature: Mapping[str, Any]) -> bool:
    """Whether a column holds pictures: by its type, not by its name."""
    shape = feature["shape"]
    return feature["dtype"] in ("image", "video") or (
        feature["dtype"] == "uint8" and len(shape) == 3 and (shape[-1] in (1, 3, 4) or shape[0] in (1, 3))
    )


def is_depth(feature: Mapping[str, Any]) -> bool:
    """Whether a column of pictures holds distances, as LeRobot marks them."""
    notes = [feature.get(name) for name in ("info", "video_info")]
    marks = ("is_depth_map", "video.is_depth_map")
    return any(isinstance(note, Mapping) and note.get(mark) for note in notes for mark in marks)


def kind_in_words(feature: Mapping[str, Any]) -> str:
    """Return what a column holds: "float32 [8]", "pictures [256, 256, 3]", "depth [48, 64, 1]"."""
    kind = "depth" if is_depth(feature) else "pictures" if is_picture(feature) else feature["dtype"]
    return f"{kind} {list(feature['shape'])}"


def check_frames(folder: Path, columns: Mapping[str, np.ndarray], lengths: np.ndarray, fps: float) -> None:
    """Raise DataError unless every episode's frames are numbered 0, 1, ... and lie 1 / fps apart.

    columns: in order of episode and frame number, [N]; lengths: [E].
    """
    step = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    episode = columns["episode_index"]
    wrong = np.flatnonzero(columns["frame_index"] != step)
    if len(wrong):
        chosen = episode == episode[wrong[0]]
        numbers = ", ".join(map(str, columns["frame_index"][chosen][:12]))
        raise DataError(
            f"{folder}: episode {episode[wrong[0]]} has frame_index {numbers}{', ...' * bool(chosen.sum() > 12)}, not "
            f"0 to {chosen.sum() - 1}: frames are missing or stand twice, so images and states would not belong "
            "together. Leave that episode out, or record it again."
        )
    if "timestamp" not in columns:
        return
    late = np.abs(columns["timestamp"].reshape(-1) * fps - step)
    wrong = np.flatnonzero(~(late <= TIMESTAMP_SLACK))
    if len(wrong):
        place = wrong[0]
        raise DataError(
            f"{folder}: episode {episode[place]} has frame {step[place]} at timestamp "
            f"{float(columns['timestamp'].reshape(-1)[place]):g} s, which at fps {fps:g} is frame "
            f"{float(columns['timestamp'].reshape(-1)[place] * fps):.2f}: correct fps in meta/info.json, or leave that "
            "episode out."
        )


def file_within(folder: Path, path: str, what: str) -> Path:
    """Return the regular file at `path`, relative to the dataset's `folder`.

    Raises DataError where it lies outside (a dataset must not read the rest of the disk), or is no regular file (a pipe
    would never end).
    """
    found = (folder / path).resolve()
    if not found.is_relative_to(folder.resolve()):
        raise DataError(f"{what} is said to lie at {path[:100]}, outside of {folder}: it is not read.")
    try:
        regular = stat.S_ISREG(found.stat().st_mode)
    except OSError:
        regular = False
    if not regular:
        raise DataError(f"{what} is said to lie at {path[:100]}, and there is no file in {folder}.")
    return found


def one_task_each(folder: Path, task: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return lengths [E] of episodes with one task each, of tasks [N] step by step and the lengths as recorded."""
    starts, recorded = np.zeros(len(task), dtype=bool), np.cumsum(lengths) - lengths
    starts[recorded] = True
    changes = np.flatnonzero(np.diff(task, prepend=task[:1]).astype(bool) & ~starts)
    if len(changes):
        count = len(np.unique(np.searchsorted(recorded, changes, side="right")))
        warnings.warn(
            f"{folder}: {count} of {len(lengths)} episodes change their task on the way. Each part is read as an "
            "episode of its own, with its own instruction.",
            RobopolicyWarning,
            stacklevel=4,
        )
    starts[changes] = True
    return np.diff(np.flatnonzero(starts), append=len(task))
