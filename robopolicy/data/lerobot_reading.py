"""Reading LeRobotDataset v3 folders into memory, straight from parquet and mp4: no import of lerobot, no row loop.

Reads what `lerobot_format.write_dataset` wrote and what others recorded with LeRobot: success, reward, seed and the
final observation may be missing (None, or `final_known` False). Only `observation.*` columns of numbers and images,
`action` and who acted are read; images come back as uint8, height x width x 3. A column of images is a camera whatever
it is called: `observation.image` is read as `observation.images.image`.
"""

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import CheckpointError, DataError, did_you_mean
from robopolicy.core.finite_values import listed
from robopolicy.core.interventions import Acted, Segment
from robopolicy.core.spec import IMAGE_PREFIX, Field
from robopolicy.core.storage import recover_folder
from robopolicy.core.tensors import load_tree
from robopolicy.data.lerobot_checks import (
    camera_columns,
    check_frames,
    check_information,
    file_within,
    is_picture,
    kind_in_words,
    one_task_each,
)

SIDECAR = "meta/robopolicy"
"""Folder inside a dataset with what LeRobot's format has no place for."""


def read_dataset(folder: Path, episodes: Sequence[int] | None = None, cameras: Sequence[str] | None = None) -> Episodes:
    """Read `folder` into memory: the chosen `episodes` (None: all) and `cameras` (None: all, (): no images).

    Raises DataError: folder missing, not a dataset, written by an older LeRobot, never finalised, episode or camera
    absent, damaged file. An episode that changes its task on the way is read as several, each told its own.
    """
    folder = recover_folder(Path(folder))
    information = read_information(folder)
    shown = _chosen_cameras(information, cameras, folder)
    table = _read_table(folder, information, list(shown.values()))
    chosen = _chosen_episodes(folder, table, episodes)
    rows = np.isin(table["episode_index"], chosen)
    order = np.lexsort((table["frame_index"][rows], table["episode_index"][rows]))
    columns = {key: values[rows][order] for key, values in table.items()}
    lengths = np.unique_counts(columns["episode_index"]).counts
    check_frames(folder, columns, lengths, information["fps"])
    for name in shown.values():
        kind = information["features"][name]["dtype"]
        if kind == "video":
            columns[name] = _read_videos(folder, information, name, chosen, lengths)
        else:
            columns[name] = _decoded(folder, columns, name) if kind == "image" else _colours(columns[name])
    sidecar = _read_sidecar(folder)
    if sidecar is None:
        lengths = one_task_each(folder, columns["task_index"], lengths)
    selected = sorted(set(chosen.tolist()))
    return _assemble(folder, information, columns, lengths, sidecar, selected, shown)


def read_columns(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Return further numeric columns by name, each [N] or [N, n], in the order of `read_dataset`'s steps.

    Raises DataError as `read_dataset`, and where a column is absent.
    """
    folder = recover_folder(Path(folder))
    information = read_information(folder)
    for name in names:
        feature = information["features"].get(name, {"dtype": "", "shape": []})
        if feature["dtype"] not in _NUMERIC or is_picture(feature):
            raise DataError(f"{folder} has no column '{name}' of numbers.{did_you_mean(name, information['features'])}")
    table = _read_table(folder, information, [], names)
    order = np.lexsort((table["frame_index"], table["episode_index"]))
    found = {name: torch.from_numpy(np.ascontiguousarray(table[name][order])) for name in names}
    return {name: values.squeeze(1) if values.shape[1:] == (1,) else values for name, values in found.items()}


def is_dataset(folder: Path) -> bool:
    """Whether a LeRobotDataset lies in `folder`, intact or not."""
    return (Path(folder) / "meta" / "info.json").is_file()


def read_information(folder: Path) -> dict[str, Any]:
    """Read and check `meta/info.json`: fps, features, totals. Raises DataError as `read_dataset`."""
    path = Path(folder) / "meta" / "info.json"
    if not Path(folder).is_dir():
        raise DataError(f"{folder} does not exist. Collect demonstrations into it first, or correct the path.")
    if not is_dataset(folder):
        raise DataError(f"{folder} is not a LeRobotDataset: it has no meta/info.json.")
    try:
        information = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged ({error}). Restore the dataset from a copy.") from error
    version = str(information.get("codebase_version", "unknown")) if isinstance(information, dict) else "unknown"
    if not version.startswith("v3."):
        raise DataError(
            f"{folder} has LeRobotDataset format {version}, this reads v3. Convert it with: "
            f"python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=..."
        )
    check_information(information, path)
    if not information.get("total_episodes"):
        raise DataError(f"{folder} holds no finished episode: its recording stopped early. Record it again.")
    return information


def _read_table(
    folder: Path, information: Mapping[str, Any], shown: Sequence[str], further: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Read every data file's numeric columns [N, *shape], `further` ones too, and the images of `shown` ones [N], those
    of dtype image encoded.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths = sorted((folder / "data").glob("*/*.parquet"))
    wanted = [
        key
        for key, feature in information["features"].items()
        if (
            feature["dtype"] in _NUMERIC
            and not is_picture(feature)
            and (
                key.startswith(("observation.", "next."))
                or key in (*_OWN, *WHO_ACTED, LABELS, LABEL_STEPS, "action", *further)
            )
        )
        or (feature["dtype"] != "video" and key in shown)
    ]
    if "action" not in wanted:
        raise DataError(f"{folder} has no 'action' column; it has: {', '.join(information['features'])}.")
    try:
        for path in paths:
            absent = set(wanted) - set(
                pq.read_schema(file_within(folder, str(path.relative_to(folder)), "A data file")).names
            )
            if absent:
                raise DataError(f"{path} lacks the column '{min(absent)}' that meta/info.json promises.")
        tables = [pq.read_table(path, columns=wanted) for path in paths]
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{folder} has a data file without its end ({_line(error)}): the recording was never finalised or the copy "
            f"is incomplete. Record it again, or call finalize() in the program that wrote it."
        ) from error
    table = pa.concat_tables(tables) if tables else None
    if table is None or table.num_rows != information["total_frames"]:
        found = 0 if table is None else table.num_rows
        raise DataError(
            f"{folder} promises {information['total_frames']} frames but its data files hold {found}: the recording "
            f"was never finalised or the copy is incomplete."
        )
    return {key: _column(folder, table.column(key), key, information["features"][key]) for key in wanted}


_NUMERIC = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
ACTOR, SEGMENT = "correction.actor", "correction.segment"
"""Columns that say who acted and in what kind of segment, as `core.interventions` counts."""
INTERVENTIONS = ("intervention", "complementary_info.is_intervention")
"""Columns of LeRobot's that are true where a person acted in a policy's place: its rollouts' and its learners'."""
WHO_ACTED = (ACTOR, SEGMENT, *INTERVENTIONS)
LABELS = "label.action"
"""Column that says what a teacher would have done in a step and in those after it: actions, one behind the other."""
LABEL_STEPS = "label.steps"
"""Column that says how many of these actions come before the end of the teacher's episode; all where it is missing."""
_OWN = ("episode_index", "frame_index", "timestamp", "task_index", "episode_seed")
_DEEP = (
    "has grey pixels of more than 8 bits, as depth has, which no colours hold. To leave this column out, add to its "
    'feature in meta/info.json: "info": {"is_depth_map": true}.'
)
_KNOWN = (*_OWN, "index", "action")


def _column(folder: Path, column: Any, key: str, feature: Mapping[str, Any]) -> np.ndarray:
    if feature["dtype"] == "image":
        return column.to_numpy(zero_copy_only=False)
    array, count = column.combine_chunks(), len(column)
    while hasattr(array, "storage"):
        array = array.storage
    while hasattr(array.type, "value_type"):
        array = array.flatten()
    values = array.to_numpy(zero_copy_only=False)
    shape = (count,) if key in _OWN else (count, *feature["shape"])
    if values.size != math.prod(shape):
        raise DataError(
            f"{folder}: column '{key}' holds {values.size / max(count, 1):g} numbers a frame, and meta/info.json "
            f"promises {feature['shape']}."
        )
    return values.reshape(shape)


def _chosen_episodes(folder: Path, table: Mapping[str, np.ndarray], episodes: Sequence[int] | None) -> np.ndarray:
    present = np.unique(table["episode_index"])
    if episodes is None:
        return present
    absent = sorted(set(episodes) - set(present.tolist()))
    if absent:
        raise DataError(f"{folder} has no episode {absent[:5]}; it holds {present[0]} to {present[-1]}.")
    if not len(episodes):
        raise DataError("No episode was asked for: leave `episodes` out to read them all.")
    return np.unique(np.asarray(episodes, dtype=np.int64))


def _chosen_cameras(information: Mapping[str, Any], cameras: Sequence[str] | None, folder: Path) -> dict[str, str]:
    """Return the columns of the chosen cameras, by our keys. Raises DataError where there is nothing to observe."""
    features = information["features"]
    columns = camera_columns(features, folder / "meta" / "info.json")
    if not any(name.startswith("observation.") for name in features):
        others = listed([f"{name} ({kind_in_words(what)})" for name, what in features.items() if name not in _KNOWN])
        raise DataError(
            f"{folder} has no column 'observation.*', and policies read nothing else. It has {others}: give what a "
            "policy shall read LeRobot's names, such as observation.state and observation.images.wrist."
        )
    if cameras is None:
        return columns
    names = {key.removeprefix(IMAGE_PREFIX): key for key in columns}
    for camera in cameras:
        if camera not in names:
            raise DataError(f"{folder} has no camera '{camera}'.{did_you_mean(camera, names)}")
    return {names[camera]: columns[names[camera]] for camera in cameras}


def _colours(pixels: np.ndarray) -> np.ndarray:
    """Return pictures uint8 [N, h, w, C] or [N, C, h, w], of 1, 3 or 4 channels, as [N, h, w, 3]: grey is repeated,
    opacity left out.
    """
    last = pixels if pixels.shape[-1] in (1, 3, 4) else np.moveaxis(pixels, 1, -1)
    return np.array(np.broadcast_to(last[..., :3], (*last.shape[:3], 3)))


def _decoded(folder: Path, columns: Mapping[str, np.ndarray], key: str) -> np.ndarray:
    """Decode the images of a column, uint8 [N, height, width, 3]; files are read inside of `folder` alone."""
    from PIL import Image

    images: list[np.ndarray] = []
    for row, item in enumerate(columns[key]):
        what = f"'{key}', frame {columns['frame_index'][row]} of episode {columns['episode_index'][row]},"
        data = item.get("bytes") if isinstance(item, Mapping) else None
        source = io.BytesIO(data) if data is not None else file_within(folder, str((item or {}).get("path")), what)
        try:
            with Image.open(source) as image:
                if image.mode.startswith(("I", "F")):
                    raise DataError(f"{folder}: {what} {_DEEP}")
                images.append(np.asarray(image.convert("RGB")))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{folder}: {what} is damaged ({error}). Restore the dataset from a copy.") from error
        if images[-1].shape != images[0].shape:
            raise DataError(f"{folder}: {what} is {list(images[-1].shape)}, the first is {list(images[0].shape)}.")
    return np.stack(images)


def _read_videos(
    folder: Path, information: Mapping[str, Any], key: str, chosen: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Decode the frames of the chosen episodes, uint8 [n, height, width, 3], each video file once from its start."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
    paths = sorted((folder / "meta" / "episodes").glob("*/*.parquet"))
    try:
        rows = [row for path in paths for row in pq.read_table(path, columns=["episode_index", *names]).to_pylist()]
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{folder}/meta/episodes does not say where '{key}' lies ({_line(error)}).") from error
    places = {row["episode_index"]: tuple(row[name] for name in names) for row in rows}
    absent = sorted(set(chosen.tolist()) - set(places))
    if absent:
        raise DataError(
            f"{folder}/meta/episodes does not say where the video '{key}' of episode {absent[0]} lies: the copy of the "
            "dataset is incomplete."
        )
    wanted: dict[Path, list[tuple[int, int, int]]] = {}
    offset = 0
    for episode, length in zip(chosen.tolist(), lengths.tolist(), strict=True):
        chunk, file, start = places[episode]
        try:
            name = str(information["video_path"]).format(video_key=key, chunk_index=chunk, file_index=file)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise DataError(f"{folder}/meta/info.json: video_path cannot be filled in ({error!r}).") from error
        path = file_within(folder, name, f"The video '{key}' of episode {episode}")
        wanted.setdefault(path, []).append((round(start * information["fps"]), offset, length))
        offset += length
    frames: np.ndarray | None = None
    for path, pieces in wanted.items():
        target = {first + step: position + step for first, position, length in pieces for step in range(length)}
        seen = 0
        for index, frame in enumerate(_decode_video(path, max(target))):
            if index in target:
                if frames is None:
                    frames = np.empty((offset, *frame.shape), dtype=np.uint8)
                frames[target[index]] = frame
                seen += 1
        if seen != len(target):
            raise DataError(f"{path} ends early: {len(target) - seen} frames are missing. Restore it from a copy.")
    assert frames is not None
    return frames


def _decode_video(path: Path, last: int) -> Iterator[np.ndarray]:
    import av
    from av.error import FFmpegError

    try:
        with av.open(str(path)) as container:
            for index, frame in enumerate(container.decode(video=0)):
                if len(frame.format.components) == 1 and frame.format.components[0].bits > 8:
                    raise DataError(f"{path} {_DEEP}")
                yield frame.to_ndarray(format="rgb24")
                if index >= last:
                    return
    except (FFmpegError, FileNotFoundError) as error:
        raise DataError(f"{path} is missing or damaged ({error}). Restore the dataset from a copy.") from error


def _read_sidecar(folder: Path) -> dict[str, Any] | None:
    if not (folder / SIDECAR / "episodes.json").is_file():
        return None
    try:
        return load_tree(folder / SIDECAR, "episodes")
    except CheckpointError as error:
        raise DataError(
            f"{error} Delete {folder / SIDECAR} to read the dataset without its final observations."
        ) from error


def _assemble(
    folder: Path,
    information: Mapping[str, Any],
    columns: Mapping[str, np.ndarray],
    lengths: np.ndarray,
    sidecar: Mapping[str, Any] | None,
    selected: list[int],
    shown: Mapping[str, str],
) -> Episodes:
    features, ours = information["features"], {name: key for key, name in shown.items()}
    names = [str(name) for name in features if name.startswith("observation.") and name in columns]
    read = {ours.get(name, name): name for name in names}
    count, ends = len(lengths), np.cumsum(lengths)
    final: Mapping[str, Tensor] = {}
    if sidecar is not None:
        total = information["total_episodes"]
        recorded = sidecar["lengths"]
        if len(recorded) != total or recorded[selected].tolist() != lengths.tolist():
            raise DataError(
                f"{folder} was edited by another program: {SIDECAR} describes other episodes. Delete that folder to "
                f"read the dataset without its final observations."
            )
        final = {key: value[selected] for key, value in sidecar["final"].items()}
    observation = {}
    for key, name in read.items():
        values = torch.from_numpy(np.ascontiguousarray(columns[name]))
        values = values if key in shown else values.float()
        ending = final[key] if key in final else values[ends - 1]
        observation[key] = _interleave(values, ending, torch.from_numpy(lengths))
    first = ends - lengths
    rewards = {
        key.removeprefix("next.reward."): _flat(columns[key]).float()
        for key in columns
        if key.startswith("next.reward.")
    }
    if not rewards and "next.reward" in columns:
        rewards = {"reward": _flat(columns["next.reward"]).float()}
    known = torch.zeros(count, dtype=torch.bool) if sidecar is None else sidecar["final_known"][selected]
    return Episodes(
        observation_fields={
            key: Field.from_json(sidecar["observation_fields"][key])
            if sidecar is not None and key in sidecar["observation_fields"]
            else _field(features[name], columns[name].shape[1:] if key in shown else None)
            for key, name in read.items()
        },
        action_field=_field(features["action"]) if sidecar is None else Field.from_json(sidecar["action_field"]),
        fps=float(information["fps"] if sidecar is None else sidecar["fps"]),
        observation=observation,
        actions=torch.from_numpy(np.ascontiguousarray(columns["action"])).float(),
        lengths=torch.from_numpy(lengths.astype(np.int64)),
        tasks=_tasks(folder, columns["task_index"][first]),
        rewards=rewards or None,
        step_success=_flat(columns["next.success"]).bool() if "next.success" in columns else None,
        terminated=_terminated(columns, ends),
        seeds=_flat(columns["episode_seed"])[first] if "episode_seed" in columns else None,
        final_known=known,
        labels=_labels(columns),
        label_steps=_flat(columns[LABEL_STEPS]) if LABEL_STEPS in columns else None,
        **_who_acted(columns),
    )


def _labels(columns: Mapping[str, np.ndarray]) -> Tensor | None:
    """Return what a teacher would have done [N, L, A], None where nothing says so."""
    if LABELS not in columns:
        return None
    labels, size = torch.from_numpy(np.ascontiguousarray(columns[LABELS])).float(), columns["action"].shape[1]
    if labels.shape[1] % size:
        raise DataError(f"'{LABELS}' has {labels.shape[1]} elements, which are no whole actions of {size}.")
    return labels.unflatten(1, (-1, size))


def _terminated(columns: Mapping[str, np.ndarray], ends: np.ndarray) -> Tensor | None:
    """Return which episodes ended the task [E] bool: said, or done and not truncated; None where nothing says so."""
    if "next.terminated" in columns:
        return _flat(columns["next.terminated"])[ends - 1].bool()
    if "next.done" in columns and "next.truncated" in columns:
        return (_flat(columns["next.done"]).bool() & ~_flat(columns["next.truncated"]).bool())[ends - 1]
    return None


def _who_acted(columns: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return `actor` and `segment` [N] where columns say; LeRobot's flags do not tell recoveries from corrections."""
    if ACTOR in columns and SEGMENT in columns:
        return {"actor": _flat(columns[ACTOR]).long(), "segment": _flat(columns[SEGMENT]).long()}
    for name in INTERVENTIONS:
        if name in columns and columns[name].size == len(columns[name]):
            person = _flat(columns[name]).bool()
            return {
                "actor": torch.where(person, Acted.HUMAN, Acted.POLICY),
                "segment": torch.where(person, Segment.CORRECT, Segment.AUTONOMOUS),
            }
    return {}


def _interleave(values: Tensor, ending: Tensor, lengths: Tensor) -> Tensor:
    """Put row e of `ending` [E, ...] behind episode e of `values` [N, ...]."""
    frames = torch.empty((len(values) + len(lengths), *values.shape[1:]), dtype=values.dtype)
    episode = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    frames[torch.arange(len(values)) + episode] = values
    frames[lengths.cumsum(0) + torch.arange(len(lengths))] = ending
    return frames


def _flat(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).reshape(len(values)))


def _field(feature: Mapping[str, Any], image_shape: tuple[int, ...] | None = None) -> Field:
    if image_shape is not None:
        return Field(image_shape, "uint8", 0.0, 255.0)
    shape, names = tuple(feature["shape"]), feature.get("names")
    if isinstance(names, Mapping) and len(names) == 1:
        names = next(iter(names.values()))
    if isinstance(names, list) and len(names) == shape[0] and all(isinstance(name, str) for name in names):
        return Field(shape, names=tuple(names))
    return Field(shape)


def _tasks(folder: Path, index: np.ndarray) -> tuple[str, ...]:
    import pyarrow.parquet as pq

    path = folder / "meta" / "tasks.parquet"
    if not path.is_file():
        raise DataError(f"{path} is missing: the copy of the dataset is incomplete.")
    columns = pq.read_table(path).to_pydict()
    texts = columns.get("task", columns.get("__index_level_0__"))
    if texts is None:
        raise DataError(f"{path} has no column 'task'; it has: {', '.join(columns)}.")
    names = dict(zip(columns["task_index"], texts, strict=True))
    unknown = sorted(set(index.tolist()) - set(names))
    if unknown:
        raise DataError(f"{path} does not name task {unknown[0]}, which an episode has.")
    return tuple(names[item] for item in index.tolist())


def _line(error: Exception) -> str:
    """Return the beginning of an error's text, in one line."""
    return " ".join(str(error).split())[:120]
