"""Write the files of a LeRobotDataset v3: data parquet, videos, `meta/episodes`, `meta/tasks`, `meta/stats`,
`meta/info`.

`write_tables` adds episodes to a new folder or an existing dataset. Every column is computed for all episodes at once;
parquet has one row group per episode, as LeRobot's readers expect. Axes: N frame, E episode.
"""

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.interventions import intervention_mask
from robopolicy.core.machine import usable_threads
from robopolicy.core.progress import Advance, progress
from robopolicy.core.storage import read_errors, read_object
from robopolicy.data.lerobot_media import encode_png, quiet_encoder, video_information, write_videos
from robopolicy.data.lerobot_reading import ACTOR, INTERVENTIONS, LABEL_STEPS, LABELS, SEGMENT
from robopolicy.data.lerobot_statistics import Statistics, image_statistics, pooled, vector_statistics

_FILES_IN_A_CHUNK = 1000
_MEGABYTE = 1024**2
_DATA_LIMIT = 100  # megabytes a file
_VIDEO_LIMIT = 200
_DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"

_OWN_FEATURES = {
    "timestamp": {"dtype": "float32", "shape": (1,), "names": None},
    "frame_index": {"dtype": "int64", "shape": (1,), "names": None},
    "episode_index": {"dtype": "int64", "shape": (1,), "names": None},
    "index": {"dtype": "int64", "shape": (1,), "names": None},
    "task_index": {"dtype": "int64", "shape": (1,), "names": None},
}
"""Features that LeRobot adds to every dataset."""


@dataclass(frozen=True)
class _Existing:
    """Existing content of the folder: its info (empty: none), task texts by index, and pooled statistics."""

    information: Mapping[str, Any]
    tasks: tuple[str, ...]
    statistics: Mapping[str, Mapping[str, Any]]


def write_tables(
    folder: Path,
    episodes: Episodes,
    features: Mapping[str, Any],
    existing: bool,
    further: Mapping[str, torch.Tensor] | None = None,
    advance: Advance | None = None,
) -> None:
    """Write `episodes` into `folder`, after the existing ones if `existing`.

    features: LeRobot's description (dtype, shape, names) of each observation, of `action` and of what else is stored; a
    dataset that exists keeps its own. further: columns that are no part of Episodes, name -> [N, ...]; advance: called
    for every episode and every video of one, None for a progress bar of its own. Frames per second are rounded:
    LeRobot's `info.json` takes whole numbers.
    """
    before = _read_existing(folder) if existing else _Existing({}, (), {})
    fps = before.information.get("fps", max(1, round(episodes.fps)))
    if existing:
        features = {key: value for key, value in before.information["features"].items() if key not in _OWN_FEATURES}
    lengths, episode_numbers = episodes.lengths.cpu().numpy(), range(len(episodes))
    tasks = tuple(dict.fromkeys((*before.tasks, *episodes.tasks)))
    columns = _columns(episodes, features, further or {})
    own_columns = _own_columns(episodes, fps, before, tasks)
    cameras = {key: feature for key, feature in features.items() if feature["dtype"] in ("image", "video")}
    videos = [key for key, feature in cameras.items() if feature["dtype"] == "video"]
    statistics = {
        key: vector_statistics(values, lengths, column=key, elements=features.get(key, {}).get("names"))
        for key, values in {**columns, **own_columns}.items()
    }
    own_columns["timestamp"] = own_columns["timestamp"].astype(np.float32)
    encoder_context = quiet_encoder() if videos else nullcontext()
    bar = progress("writing episodes", len(episodes) * (1 + len(videos))) if advance is None else nullcontext(advance)
    with encoder_context, ThreadPoolExecutor(usable_threads()) as pool, bar as step:
        encoding = [pool.submit(_write_camera, folder, episodes, key, fps, step) for key in videos]
        numbers = _write_data(folder, episodes, {**columns, **own_columns}, features, pool, step)
        for key in cameras:
            images = partial(_frames, episodes, key)
            statistics[key] = _stacked(
                pool.map(lambda at, images=images: image_statistics(images(at)), episode_numbers)
            )
        places: dict[str, np.ndarray] = {}
        for future in encoding:
            places |= future.result()
    ordered = {key: statistics[key] for key in (*features, *_OWN_FEATURES)}
    _write_episodes(folder, episodes, before, numbers, places, ordered)
    _write_tasks(folder, tasks)
    _write_information(folder, episodes, features, before, fps, tasks)
    _write_statistics(folder, ordered, before)


def _read_existing(folder: Path) -> _Existing:
    import pyarrow.parquet as pq

    with read_errors(folder):
        table = pq.read_table(folder / "meta" / "tasks.parquet").to_pydict()
        texts = table.get("task", table.get("__index_level_0__", []))
        tasks = dict(zip(table["task_index"], texts, strict=True))
        path = folder / "meta" / "stats.json"
        return _Existing(
            read_object(folder / "meta" / "info.json", DataError),
            tuple(tasks[index] for index in range(len(tasks))),
            read_object(path, DataError) if os.path.lexists(path) else {},
        )


def _columns(
    episodes: Episodes, features: Mapping[str, Any], further: Mapping[str, torch.Tensor]
) -> dict[str, np.ndarray]:
    """Return the numeric columns except LeRobot's own, each [N, *shape] with the feature's dtype."""
    lengths = episodes.lengths
    episode = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    frames = torch.arange(len(episode)) + episode  # every episode has one frame more than actions
    done = torch.zeros(len(episode), dtype=torch.bool)
    done[lengths.cumsum(0) - 1] = True
    values: dict[str, torch.Tensor | None] = {**further, "action": episodes.actions, "next.done": done}
    values["next.reward"] = episodes.reward
    values |= {f"next.reward.{name}": terms for name, terms in (episodes.rewards or {}).items()}
    values["next.success"] = episodes.step_success
    values["next.terminated"] = None if episodes.terminated is None else done & episodes.terminated[episode]
    values["episode_seed"] = None if episodes.seeds is None else episodes.seeds[episode]
    values |= {ACTOR: episodes.actor, SEGMENT: episodes.segment, INTERVENTIONS[0]: intervention_mask(episodes)}
    values[LABELS] = None if episodes.labels is None else episodes.labels.flatten(1)
    values[LABEL_STEPS] = episodes.label_steps
    columns: dict[str, np.ndarray] = {}
    for key, feature in features.items():
        if feature["dtype"] in ("image", "video"):
            continue
        column = episodes.observation[key][frames] if key in episodes.observation else values[key]
        assert column is not None, key
        columns[key] = column.cpu().numpy().astype(feature["dtype"], copy=False).reshape(-1, *feature["shape"])
    return columns


def _own_columns(episodes: Episodes, fps: int, before: _Existing, tasks: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return LeRobot's own columns, each [N, 1]; timestamp is float64, from which LeRobot computes the statistics."""
    lengths = episodes.lengths.cpu().numpy()
    frames, count = before.information.get("total_frames", 0), before.information.get("total_episodes", 0)
    numbers = {text: index for index, text in enumerate(tasks)}
    episode = np.repeat(np.arange(len(lengths)), lengths)
    step = np.arange(len(episode)) - (np.cumsum(lengths) - lengths)[episode]
    columns = {
        "timestamp": step / fps,
        "frame_index": step,
        "episode_index": episode + count,
        "index": np.arange(len(episode)) + frames,
        "task_index": np.array([numbers[text] for text in episodes.tasks], np.int64)[episode],
    }
    return {key: values[:, None] for key, values in columns.items()}


def _frames(episodes: Episodes, key: str, episode: int) -> np.ndarray:
    """Return the images of one episode without its final observation, uint8 [L, height, width, 3]."""
    first = int(episodes.frame_starts[episode])
    return episodes.observation[key][first : first + int(episodes.lengths[episode])].cpu().numpy()


def _stacked(parts: Iterable[Statistics]) -> Statistics:
    part_list = list(parts)
    return {name: np.concatenate([part[name] for part in part_list]) for name in part_list[0]}


def _write_data(
    folder: Path,
    episodes: Episodes,
    columns: Mapping[str, np.ndarray],
    features: Mapping[str, Any],
    pool: ThreadPoolExecutor,
    advance: Advance,
) -> np.ndarray:
    """Write the data files; return the file number of each episode [E]."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    stored_features = {
        key: feature for key, feature in {**features, **_OWN_FEATURES}.items() if feature["dtype"] != "video"
    }
    table = {
        key: _arrow(columns[key], feature) for key, feature in stored_features.items() if feature["dtype"] != "image"
    }
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    fields = [pa.field(key, table[key].type if key in table else image) for key in stored_features]
    schema = pa.schema(fields, {"huggingface": json.dumps({"info": {"features": _descriptions(stored_features)}})})
    number = _next_file(folder, "data")
    files = []
    position = 0
    file_start = 0
    writer: pq.ParquetWriter | None = None
    path = folder
    try:
        for episode, length in enumerate(episodes.lengths.tolist()):
            if writer is not None:
                byte_count, frames = path.stat().st_size, position - file_start
                if byte_count * (1 + length / frames) >= _DATA_LIMIT * _MEGABYTE:
                    writer.close()
                    writer, number = None, number + 1
            if writer is None:
                path, file_start = folder / _DATA_PATH.format(**_place(number)), position
                path.parent.mkdir(parents=True, exist_ok=True)
                writer = pq.ParquetWriter(path, schema, compression="snappy", use_dictionary=True)
            rows = {key: values.slice(position, length) for key, values in table.items()}
            for key in stored_features.keys() - table.keys():
                encoded = pool.map(encode_png, _frames(episodes, key, episode))
                images = [{"bytes": file, "path": f"frame-{step:06d}.png"} for step, file in enumerate(encoded)]
                rows[key] = pa.array(images, image)
            writer.write_table(pa.Table.from_arrays([rows[key] for key in stored_features], schema=schema))
            files.append(number)
            position += length
            advance()
    finally:
        if writer is not None:
            writer.close()
    return np.array(files)


def _arrow(values: np.ndarray, feature: Mapping[str, Any]) -> Any:
    """Convert a column [N, *shape] to the arrow array that LeRobot stores: scalars, fixed lists or nested arrays."""
    import pyarrow as pa

    if tuple(feature["shape"]) == (1,):
        return pa.array(values.reshape(-1))
    if values.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    import datasets

    kind = getattr(datasets, f"Array{values.ndim - 1}D")(shape=values.shape[1:], dtype=feature["dtype"])
    return datasets.Dataset.from_dict({"column": values}, datasets.Features({"column": kind})).data["column"].chunk(0)


def _descriptions(features: Mapping[str, Any]) -> dict[str, Any]:
    """Return the column descriptions that the `datasets` package stores in a parquet file."""
    noted: dict[str, Any] = {}
    for key, feature in features.items():
        shape, value = tuple(feature["shape"]), {"dtype": feature["dtype"], "_type": "Value"}
        if feature["dtype"] == "image":
            noted[key] = {"_type": "Image"}
        elif shape == (1,):
            noted[key] = value
        elif len(shape) == 1:
            noted[key] = {"feature": value, "length": shape[0], "_type": "List"}
        else:
            noted[key] = {"shape": list(shape), "dtype": feature["dtype"], "_type": f"Array{len(shape)}D"}
    return noted


def _write_camera(folder: Path, episodes: Episodes, key: str, fps: int, advance: Advance) -> dict[str, np.ndarray]:
    """Encode the episodes of one camera; return their locations as columns of `meta/episodes` [E]."""
    first, lengths = _next_file(folder, f"videos/{key}"), episodes.lengths.cpu().numpy()
    places = write_videos(
        lengths,
        lambda episode: _frames(episodes, key, episode),
        fps,
        lambda number: folder / _VIDEO_PATH.format(video_key=key, **_place(first + number)),
        _VIDEO_LIMIT * _MEGABYTE,
        advance,
    )
    files = [_place(first + number) for number, _ in places]
    start = np.array([begin for _, begin in places])
    return {
        f"videos/{key}/chunk_index": np.array([file["chunk_index"] for file in files]),
        f"videos/{key}/file_index": np.array([file["file_index"] for file in files]),
        f"videos/{key}/from_timestamp": start,
        f"videos/{key}/to_timestamp": start + lengths / fps,
    }


def _next_file(folder: Path, kind: str) -> int:
    """Return the number of the first file after those in `folder`: appended episodes never rewrite a file."""
    numbers = [
        int(path.parent.name.removeprefix("chunk-")) * _FILES_IN_A_CHUNK + int(path.stem.removeprefix("file-"))
        for path in (folder / kind).glob("chunk-*/file-*")
    ]
    return max(numbers, default=-1) + 1


def _place(number: int) -> dict[str, int]:
    return {"chunk_index": number // _FILES_IN_A_CHUNK, "file_index": number % _FILES_IN_A_CHUNK}


def _write_episodes(
    folder: Path,
    episodes: Episodes,
    before: _Existing,
    numbers: np.ndarray,
    places: Mapping[str, np.ndarray],
    statistics: Mapping[str, Statistics],
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count, frames = before.information.get("total_episodes", 0), before.information.get("total_frames", 0)
    lengths = episodes.lengths.cpu().numpy()
    ends = frames + np.cumsum(lengths)
    file = _place(_next_file(folder, "meta/episodes"))
    columns: dict[str, Any] = {
        "episode_index": count + np.arange(len(lengths)),
        "tasks": pa.array([[text] for text in episodes.tasks], pa.list_(pa.string())),
        "length": lengths,
        "data/chunk_index": numbers // _FILES_IN_A_CHUNK,
        "data/file_index": numbers % _FILES_IN_A_CHUNK,
        "dataset_from_index": ends - lengths,
        "dataset_to_index": ends,
        **places,
    }
    for key, entries in statistics.items():
        columns |= {f"stats/{key}/{name}": _nested(entries[name]) for name in _ORDER}
    columns |= {f"meta/episodes/{name}": np.full(len(lengths), value) for name, value in file.items()}
    path = folder / _EPISODES_PATH.format(**file)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, compression="snappy", use_dictionary=True)


_ORDER = ("min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99")


def _nested(values: np.ndarray) -> Any:
    """Return `values` [E, ...] as nested lists, integers for counts and doubles otherwise."""
    import pyarrow as pa

    kind = np.int64 if values.dtype.kind == "i" else np.float64
    array = pa.array(values.astype(kind, copy=False).reshape(-1))
    for axis in reversed(range(1, values.ndim)):
        size = values.shape[axis]
        offsets = np.arange(len(array) // size + 1, dtype=np.int32) * size
        array = pa.ListArray.from_arrays(pa.array(offsets), array)
    return array


def _write_tasks(folder: Path, tasks: tuple[str, ...]) -> None:
    import pandas as pd

    frame = pd.DataFrame({"task_index": range(len(tasks))}, index=pd.Index(tasks, name="task"))
    frame.to_parquet(folder / "meta" / "tasks.parquet")


def _write_information(
    folder: Path,
    episodes: Episodes,
    features: Mapping[str, Any],
    before: _Existing,
    fps: int,
    tasks: tuple[str, ...],
) -> None:
    described: dict[str, Any] = {key: dict(feature) for key, feature in {**features, **_OWN_FEATURES}.items()}
    for feature in described.values():
        if feature["dtype"] == "video":
            feature["info"] = video_information(feature["shape"], fps)
    information = {
        "codebase_version": "v3.0",
        "fps": fps,
        "features": described,
        "total_episodes": 0,
        "total_frames": 0,
        "total_tasks": 0,
        "chunks_size": _FILES_IN_A_CHUNK,
        "data_files_size_in_mb": _DATA_LIMIT,
        "video_files_size_in_mb": _VIDEO_LIMIT,
        "data_path": _DATA_PATH,
        "video_path": _VIDEO_PATH,
        "robot_type": None,
        "splits": {},
        **before.information,
    }
    information["total_episodes"] += len(episodes)
    information["total_frames"] += episodes.step_count
    information["total_tasks"] = len(tasks)
    information["splits"] = {"train": f"0:{information['total_episodes']}"}
    _write_json(folder / "meta" / "info.json", information)


def _write_statistics(folder: Path, statistics: Mapping[str, Statistics], before: _Existing) -> None:
    result: dict[str, Any] = {}
    for key, entries in statistics.items():
        parts: list[Mapping[str, np.ndarray]] = [entries]
        if key in before.statistics:
            parts.insert(0, {name: np.array(value)[None] for name, value in before.statistics[key].items()})
        result[key] = {name: value.tolist() for name, value in pooled(parts).items()}
    _write_json(folder / "meta" / "stats.json", {**before.statistics, **result})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False), encoding="utf-8")
