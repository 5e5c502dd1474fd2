"""LeRobotDatasets of formats v2.0 and v2.1: a parquet file and a video of each camera for every episode.

meta/info.json has `codebase_version`, `data_path` and `video_path`, meta/episodes.jsonl the lengths, meta/tasks.jsonl
the instructions. Columns keep their names. Source: huggingface/lerobot at v0.3.3, datasets/utils.py.
"""

import re
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.core.errors import DataError, in_one_line
from robopolicy.core.storage import read_json_lines, read_object
from robopolicy.data.formats.format import Column, DatasetFormat, Source
from robopolicy.data.lerobot_checks import check_columns, check_information, file_within, is_depth, require_room
from robopolicy.data.lerobot_media import decode_image, decode_video, filled_in, promised_sizes
from robopolicy.data.lerobot_reading import WHO_ACTED

INFORMATION = "meta/info.json"
_OWN = ("timestamp", "frame_index", "episode_index", "index", "task_index", "next.done", *WHO_ACTED)


class OlderLeRobot(DatasetFormat):
    """LeRobotDatasets of formats v2.0 and v2.1."""

    title = "LeRobotDataset v2"

    def recognises(self, path: Path) -> bool:
        """Implement `DatasetFormat.recognises`."""
        return _version(path).startswith(("v1", "v2", "1.", "2."))

    @contextmanager
    def open(self, path: Path) -> Generator[Source]:
        """Implement `DatasetFormat.open`."""
        version = _version(path)
        if version.startswith(("v1", "1.")):
            raise DataError(
                f"{path} is a LeRobotDataset {version}, which is not supported: let LeRobot 0.3 write it as v2 "
                "(lerobot/datasets/v2/convert_dataset_v1_to_v2.py), then convert that."
            )
        yield _OlderSource(path, version)


def _version(path: Path) -> str:
    for name in (INFORMATION, "meta_data/info.json"):
        if (path / name).is_file():
            return str(read_object(path / name, DataError).get("codebase_version", ""))[:20]
    return ""


class _OlderSource(Source):
    """An opened LeRobotDataset v2."""

    def __init__(self, path: Path, version: str):
        self.path = path
        self.version = version
        file = file_within(path, INFORMATION, INFORMATION)
        self.information = read_object(file, DataError)
        check_information(self.information, file)
        self.fps = float(self.information["fps"])
        rows = _episodes(path, self.information)
        self.numbers = [row["episode_index"] for row in rows]
        self.lengths = tuple(row["length"] for row in rows)
        self.tasks = tuple(row["task"] for row in rows)
        if changing := sum(row["tasks"] > 1 for row in rows):
            self.notes = (
                f"{changing} of {len(rows)} episodes change their task: only the first task of each is kept.",
            )
        self.features: Mapping[str, Any] = self.information["features"]
        columns = {key: _column(path, key, feature) for key, feature in self.features.items() if key not in _OWN}
        self.columns = {key: column for key, column in columns.items() if column is not None}

    def shapes(self, episode: int, keys: Collection[str]) -> Mapping[str, tuple[int, ...]]:
        """Implement `Source.shapes`."""
        import pyarrow.parquet as pq

        path = self._file(episode, "data_path", "")
        in_table = [key for key in keys if self.features[key]["dtype"] != "video"]
        with pq.ParquetFile(path) as file:
            missing_columns = set(in_table) - set(file.schema_arrow.names)
            if missing_columns:
                raise DataError(f"{path} lacks the column '{min(missing_columns)}', which meta/info.json declares.")
            check_columns(file, path, {key: self.features[key] for key in in_table})
            rows = file.metadata.num_rows
        for key in keys:
            if self.features[key]["dtype"] == "video":
                self._file(episode, "video_path", key)
        return {key: (rows, *self.columns[key].shape) for key in keys}

    def read(self, episode: int, keys: Collection[str]) -> Mapping[str, np.ndarray]:
        """Implement `Source.read`."""
        import pyarrow.parquet as pq

        path = self._file(episode, "data_path", "")
        in_table = [key for key in keys if self.features[key]["dtype"] != "video"]
        table = pq.read_table(path, columns=in_table)
        arrays: dict[str, np.ndarray] = {}
        for key in keys:
            shape = (self.lengths[episode], *self.columns[key].shape)
            require_room(path, f"'{key}'", 2 * int(np.prod(shape, dtype=object)))
            if self.features[key]["dtype"] == "video":
                arrays[key] = self._video(episode, key)
            elif self.features[key]["dtype"] == "image":
                sizes = promised_sizes(self.path, key, self.features[key])
                label = f"of episode {self.numbers[episode]},"
                rows = enumerate(table.column(key))
                arrays[key] = np.stack(
                    [
                        decode_image(self.path, f"'{key}', frame {step} {label}", each.as_py(), sizes)
                        for step, each in rows
                    ]
                )
            else:
                arrays[key] = _numbers(table.column(key), path, key).reshape(shape)
        return arrays

    def _video(self, episode: int, key: str) -> np.ndarray:
        length = self.lengths[episode]
        path = self._file(episode, "video_path", key)
        sizes = promised_sizes(self.path, key, self.features[key])
        frames: np.ndarray | None = None
        count = 0
        for count, frame in enumerate(decode_video(self.path, path, length - 1, sizes), start=1):
            if frames is None:
                frames = np.empty((length, *frame.shape), np.uint8)
            frames[count - 1] = frame
        if frames is None or count != length:
            raise DataError(f"{path} has {count} frames but the episode has {length} steps. Exclude that episode.")
        return frames

    def _file(self, episode: int, template: str, key: str) -> Path:
        """Return the path of an episode's file, inside the dataset's folder."""
        number = self.numbers[episode]
        size = self.information.get("chunks_size") or 1000
        placeholders: dict[str, str | int] = {"episode_chunk": number // int(size), "episode_index": number}
        if key:
            placeholders["video_key"] = key
        name = filled_in(self.path, self.information.get(template), **placeholders)
        label = f"The video '{key}' of episode {number}" if key else f"The data of episode {number}"
        return file_within(self.path, name, label)


def _episodes(path: Path, information: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return number, length and task of every episode, in order."""
    rows = read_json_lines(file_within(path, "meta/episodes.jsonl", "The list of episodes"))
    total = information.get("total_episodes", len(rows))
    if len(rows) != total or not rows:
        raise DataError(f"{path}/meta/episodes.jsonl lists {len(rows)} episodes, but meta/info.json declares {total}.")
    episodes: list[dict[str, Any]] = []
    for row in rows:
        number, length = row.get("episode_index"), row.get("length")
        tasks = row.get("tasks")
        if not (isinstance(number, int) and isinstance(length, int) and number >= 0 and length >= 1):
            raise DataError(f"{path}/meta/episodes.jsonl: episode {number} has length {length}.")
        texts = [str(text) for text in tasks] if isinstance(tasks, list) else []
        episodes.append(
            {"episode_index": number, "length": length, "task": texts[0] if texts else "", "tasks": len(texts)}
        )
    return sorted(episodes, key=lambda row: row["episode_index"])


def _column(path: Path, key: str, feature: Mapping[str, Any]) -> Column | None:
    """Return a numeric or image column, None for texts and depth."""
    if feature["dtype"] in ("video", "image"):
        if is_depth(feature):
            return None
        height, width = min(promised_sizes(path, key, feature))
        return Column((height, width, 3), "uint8", names=())
    if not re.fullmatch(r"(float|int|uint)\d+|bool", feature["dtype"]):
        return None
    return Column(tuple(feature["shape"]), feature["dtype"], names=_names(feature.get("names")))


def _names(names: Any) -> tuple[str, ...]:
    """Return the names of a vector's elements, () if they are not a list: {"motors": [...]} is LeRobot's old form."""
    if isinstance(names, Mapping) and len(names) == 1:
        names = next(iter(names.values()))
    return tuple(names) if isinstance(names, list) and all(isinstance(each, str) for each in names) else ()


def _numbers(column: Any, path: Path, key: str) -> np.ndarray:
    array = column.combine_chunks()
    while hasattr(array, "storage"):
        array = array.storage
    while hasattr(array.type, "value_type"):
        array = array.flatten()
    try:
        return array.to_numpy(zero_copy_only=False)
    except Exception as error:
        raise DataError(f"{path}: column '{key}' is damaged ({in_one_line(error, 80)}).") from error
