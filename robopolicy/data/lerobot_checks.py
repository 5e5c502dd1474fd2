"""Validate LeRobotDataset files before use: no missing or duplicate frames, no paths outside the folder.

A missing or duplicate frame shifts states against images, which no loss reveals. Each check names the location.
"""

import math
import stat
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robopolicy.core.errors import DataError, RobopolicyWarning, in_one_line
from robopolicy.core.hub import blobs_of
from robopolicy.core.machine import free_memory, in_bytes
from robopolicy.core.spec import camera_key

TIMESTAMP_SLACK = 0.1
"""Tolerance of timestamps against step / fps, as a fraction of a frame's duration."""


def check_information(information: Any, path: Path) -> None:
    """Raise DataError unless `meta/info.json` at `path` contains a frame rate, totals and well-formed features."""
    if not isinstance(information, dict):
        raise DataError(
            f"{path} contains {type(information).__name__} instead of a dictionary: restore it from a copy."
        )
    fps = information.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not (0 < fps < math.inf):
        raise DataError(f"{path}: fps is {in_one_line(repr(fps), 60)}, not a number of frames per second: correct it.")
    for name in ("total_episodes", "total_frames"):
        if not isinstance(information.get(name, 0), int) or information.get(name, 0) < 0:
            raise DataError(f"{path}: {name} is {in_one_line(information[name], 60)}, not a valid count.")
    features = information.get("features")
    if not isinstance(features, dict) or not features:
        raise DataError(f"{path}: features is {in_one_line(features, 60)}, not a dictionary of columns.")
    missing_features = [key for key in ("episode_index", "frame_index", "task_index") if key not in features]
    if missing_features:
        raise DataError(f"{path}: the feature {missing_features[0]} is missing, which assigns frames to episodes.")
    for key, feature in features.items():
        shape = feature.get("shape") if isinstance(feature, dict) else None
        sizes = isinstance(shape, list | tuple) and all(isinstance(size, int) and 0 <= size < 2**31 for size in shape)
        if not (sizes and isinstance(feature.get("dtype"), str)):
            raise DataError(f"{path}: feature '{key}' needs a dtype and a shape, but is {in_one_line(feature, 60)}.")


def camera_columns(features: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return camera key -> image column, whatever the columns are called under `observation.`.

    An image column is of type image or video, or uint8 with three axes, one of them channels; depth is excluded. Raises
    DataError if two columns of `meta/info.json`, at `path`, would be the same camera.
    """
    columns: dict[str, str] = {}
    for name, feature in features.items():
        if not name.startswith("observation.") or not is_picture(feature) or is_depth(feature):
            continue
        if other := columns.get(camera_key(name)):
            raise DataError(f"{path}: '{other}' and '{name}' both map to the camera '{camera_key(name)}': rename one.")
        columns[camera_key(name)] = name
    return columns


def is_picture(feature: Mapping[str, Any]) -> bool:
    """Whether a column contains images, by its type and not by its name."""
    shape = feature["shape"]
    return feature["dtype"] in ("image", "video") or (
        feature["dtype"] == "uint8" and len(shape) == 3 and (shape[-1] in (1, 3, 4) or shape[0] in (1, 3))
    )


def is_depth(feature: Mapping[str, Any]) -> bool:
    """Whether an image column contains depth, as marked by LeRobot."""
    notes = [feature.get(name) for name in ("info", "video_info")]
    marks = ("is_depth_map", "video.is_depth_map")
    return any(isinstance(note, Mapping) and note.get(mark) for note in notes for mark in marks)


def kind_in_words(feature: Mapping[str, Any]) -> str:
    """Describe the content of a column: "float32 [8]", "images [256, 256, 3]", "depth [48, 64, 1]"."""
    kind = "depth" if is_depth(feature) else "images" if is_picture(feature) else feature["dtype"]
    return f"{kind} {list(feature['shape'])}"


def check_frames(folder: Path, columns: Mapping[str, np.ndarray], lengths: np.ndarray, fps: float) -> None:
    """Raise DataError unless every episode's frames are numbered 0, 1, ... and are 1 / fps apart.

    columns: sorted by episode and frame number, [N]; lengths: [E].
    """
    step = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    episode = columns["episode_index"]
    bad_frames = np.flatnonzero(columns["frame_index"] != step)
    if len(bad_frames):
        in_episode = episode == episode[bad_frames[0]]
        numbers = ", ".join(map(str, columns["frame_index"][in_episode][:12]))
        raise DataError(
            f"{folder}: episode {episode[bad_frames[0]]} has frame_index "
            f"{numbers}{', ...' * bool(in_episode.sum() > 12)}, not 0 to {in_episode.sum() - 1}: frames are missing "
            "or duplicated, so images and states would not be aligned. Exclude that episode, or record it again."
        )
    if "timestamp" not in columns:
        return
    # Where a recorder's clock began says nothing: frames are told by their number.
    times = columns["timestamp"].reshape(-1).astype(np.float64)
    times = times - np.repeat(times[step == 0], lengths)
    delays = np.abs(times * fps - step)
    bad_frames = np.flatnonzero(~(delays <= TIMESTAMP_SLACK))
    if len(bad_frames):
        place = bad_frames[0]
        raise DataError(
            f"{folder}: episode {episode[place]} has frame {step[place]} at a timestamp {times[place]:g} s after its "
            f"first, which at fps {fps:g} is frame {times[place] * fps:.2f}: correct fps in meta/info.json, or "
            "exclude that episode."
        )


def file_within(folder: Path, path: str, what: str) -> Path:
    """Return the regular file at `path`, relative to the dataset's `folder`.

    Raises DataError if it lies outside the folder (a dataset must not read the rest of the disk) or is not a regular
    file (a pipe would never end).
    """
    try:
        resolved = (folder / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, or no path
        raise DataError(
            f"{what} should be at {path[:100]!r}, which is not a valid file path ({in_one_line(error, 60)})."
        ) from error
    blobs = blobs_of(folder.resolve())  # in the hub's cache, files are links to there
    if not (resolved.is_relative_to(folder.resolve()) or (blobs is not None and resolved.is_relative_to(blobs))):
        raise DataError(f"{what} should be at {path[:100]}, outside {folder}: it is not read.")
    try:
        regular = stat.S_ISREG(resolved.stat().st_mode)
    except OSError:
        regular = False
    if not regular:
        raise DataError(f"{what} should be at {path[:100]}, but {folder} has no such file.")
    return resolved


def require_room(folder: Path, what: str, needed: int) -> None:
    """Raise DataError if `needed` bytes exceed the free memory."""
    free_bytes = free_memory(torch.device("cpu"))
    if free_bytes is not None and needed > free_bytes:
        raise DataError(
            f"{folder}: {what} needs {in_bytes(needed)} of memory, but only {in_bytes(free_bytes)} are free: read "
            f"fewer cameras or episodes, or use a larger machine."
        )


def table_within(folder: Path, path: Path, most: int, columns: Sequence[str] | None = None) -> Any:
    """Read columns of a parquet file inside `folder` as a pyarrow table; None: all columns.

    Raises DataError if it is damaged, has more than `most` rows, or has rows larger than one number or a short text.
    The check runs before much is read: parquet stores equal values once, so a small file may expand to any size.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table_path = file_within(folder, str(path.relative_to(folder)), "A table")
    try:
        with pq.ParquetFile(table_path) as file:
            if file.metadata.num_rows > most:
                raise DataError(f"{path} has {file.metadata.num_rows} rows, but meta/info.json declares {most}.")
            chunks = [
                group.column(index)
                for group in map(file.metadata.row_group, range(file.metadata.num_row_groups))
                for index in range(file.metadata.num_columns)
            ]
            chunks = [chunk for chunk in chunks if columns is None or chunk.path_in_schema.startswith(tuple(columns))]
            if any(chunk.num_values > file.metadata.num_rows for chunk in chunks):
                raise DataError(f"{path} contains lists where a number or a text is expected.")
            largest = max((chunk.total_uncompressed_size for chunk in chunks), default=1)
            batches, size = [], 0
            if largest <= LARGEST_TABLE:
                rows = max(1, min(LARGEST_BATCH, LARGEST_TABLE // max(1, largest)))
                for batch in file.iter_batches(rows, columns=columns):
                    batches.append(batch)
                    size += batch.nbytes
                    if size > LARGEST_TABLE:
                        break
            if max(size, largest) > LARGEST_TABLE:
                raise DataError(
                    f"{path} contains more than {in_bytes(LARGEST_TABLE)}, more than any valid table of this kind."
                )
            return pa.Table.from_batches(batches) if batches else file.read(columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged ({in_one_line(error, 120)}). Restore the dataset from a copy.") from error


LARGEST_TABLE, LARGEST_BATCH = 2**26, 2**16
"""Maximum bytes read from a table of episodes or tasks, and number of rows read at once."""
NUMBERS = ("BOOLEAN", "INT32", "INT64", "FLOAT", "DOUBLE")
"""Numeric parquet types; float16 is stored as two bytes of fixed length."""
LARGEST_PIXEL, LARGEST_HEAD = 8, 2**16
"""Maximum bytes of an encoded image: per pixel (four 16-bit channels), and for the header."""


def check_columns(file: Any, path: Path, wanted: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise DataError if the columns of a parquet file contain more data than the features declare for its rows.

    file: pyarrow file of which only metadata is read, because parquet stores equal values once and a small file may
    expand to any size; wanted: features by name.
    """
    metadata = file.metadata
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for index in range(metadata.num_columns):
            column = group.column(index)
            name = column.path_in_schema
            owners = [key for key in wanted if name == key or name.startswith(f"{key}.")]
            if not owners:
                continue
            key = max(owners, key=len)
            feature = wanted[key]
            count = max(1, math.prod(feature["shape"]))
            if feature["dtype"] == "image":
                size = group.num_rows * (count * LARGEST_PIXEL + LARGEST_HEAD)
                fits = name in (f"{key}.bytes", f"{key}.path") and column.total_uncompressed_size <= size
                fits = fits and column.num_values <= group.num_rows
            else:
                half = column.physical_type == "FIXED_LEN_BYTE_ARRAY" and metadata.schema.column(index).length == 2
                fits = (column.physical_type in NUMBERS or half) and column.num_values <= group.num_rows * count
            if not fits:
                raise DataError(
                    f"{path}: column '{key}' contains other values, or more ({column.num_values} of "
                    f"{column.physical_type} in {group.num_rows} rows), than meta/info.json declares: "
                    f"{feature['dtype']} {feature['shape']}."
                )


def one_task_each(folder: Path, task: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Split episodes so that each has one task: return lengths [E], given tasks [N] per step and the recorded
    lengths.
    """
    starts, first_steps = np.zeros(len(task), dtype=bool), np.cumsum(lengths) - lengths
    starts[first_steps] = True
    changes = np.flatnonzero(np.diff(task, prepend=task[:1]).astype(bool) & ~starts)
    if len(changes):
        count = len(np.unique(np.searchsorted(first_steps, changes, side="right")))
        warnings.warn(
            f"{folder}: {count} of {len(lengths)} episodes change their task. Each part is read as a separate "
            "episode with its own instruction.",
            RobopolicyWarning,
            stacklevel=4,
        )
    starts[changes] = True
    return np.diff(np.flatnonzero(starts), append=len(task))
