"""Read LeRobotDataset v3 folders into memory directly from parquet and mp4, without importing lerobot and without row
loops.

Reads datasets of `lerobot_format.write_dataset` and of LeRobot itself: success, reward, seed and the final observation
may be missing (None, or `final_known` False). Only numeric and image columns `observation.*`, `action` and the actor
columns are read; images are returned as uint8, height x width x 3. Every image column is a camera: `observation.image`
is read as `observation.images.image`.

Datasets of other projects may name their columns `image`, `state` and `actions`, and their elements `motor_0`; policies
read `observation.*` and `action`. A mapping {dataset's name: policy's name} renames columns on reading, without
changing the files.
"""

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.client.executed import ActingAgent, Segment
from robopolicy.core.arrays import is_mapping, is_sequence
from robopolicy.core.checkpoints import invalid_field_entry
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import CheckpointError, DataError, RobopolicyWarning, as_setting, did_you_mean, in_one_line
from robopolicy.core.file_types import describe_path
from robopolicy.core.finite_values import join_names
from robopolicy.core.spec import IMAGE_PREFIX, STATE, Field
from robopolicy.core.storage import read_errors, read_json, recover_folder
from robopolicy.core.tensors import load_tree
from robopolicy.data.formats.format import what_it_is
from robopolicy.data.lerobot_checks import (
    camera_columns,
    check_columns,
    check_frames,
    check_information,
    file_within,
    is_picture,
    kind_in_words,
    one_task_each,
    require_room,
    table_within,
)
from robopolicy.data.lerobot_media import read_images, read_videos

_STATES = ("state", "qpos", "proprio", "robot_state", "joint_positions")
_BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")


def renamed_features(
    features: Mapping[str, Mapping[str, Any]], rename: Mapping[str, str], folder: Path
) -> dict[str, dict[str, Any]]:
    """Return the features of meta/info.json under their new names; names without a feature are ignored.

    Raises DataError if two columns would get the same name.
    """
    result: dict[str, dict[str, Any]] = {}
    for column, feature in features.items():
        name = rename.get(column, column)
        if name in result or (name != column and name in features and rename.get(name, name) == name):
            raise DataError(f"{folder} has two columns '{name}' after '{column}' is renamed to it: rename one of them.")
        result[name] = {**feature, "names": _renamed_names(feature.get("names"), rename)} if rename else dict(feature)
    return result


def _renamed_names(names: Any, rename: Mapping[str, str]) -> Any:
    if isinstance(names, str):
        return rename.get(names, names)
    if is_sequence(names):
        return [_renamed_names(name, rename) for name in names]
    if is_mapping(names):
        return {_renamed_names(key, rename): _renamed_names(value, rename) for key, value in names.items()}
    return names


def with_names(episodes: Episodes, rename: Mapping[str, str]) -> Episodes:
    """Return `episodes` with elements renamed according to `rename`."""
    if not rename:
        return episodes

    def named(field: Field) -> Field:
        names = tuple(rename.get(name, name) for name in field.names)
        if duplicates := [name for name in names if names.count(name) > 1 and name in rename.values()]:
            raise DataError(f"Two elements would be named '{duplicates[0]}' after renaming: rename both, or neither.")
        return replace(field, names=names)

    fields = {key: named(field) for key, field in episodes.observation_fields.items()}
    return replace(episodes, observation_fields=fields, action_field=named(episodes.action_field))


def names_in(features: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the names of the columns and their elements."""
    return {*features, *(name for feature in features.values() for name in _texts(feature.get("names")))}


def _texts(names: Any) -> Iterable[str]:
    if isinstance(names, str):
        yield names
    elif is_sequence(names) or is_mapping(names):
        for inner in (*names, *(names.values() if is_mapping(names) else ())):
            yield from _texts(inner)


def advice(features: Mapping[str, Mapping[str, Any]], stored: Mapping[str, str] | None = None) -> str:
    """Return the setting that gives columns the names that policies read, " rename={...}", "" if none is needed.

    stored: name in the files of a renamed column.
    """
    new_names: dict[str, str] = {}
    for name, feature in features.items():
        kind, shape = str(feature.get("dtype")), feature.get("shape") or ()
        if name in _BOOKKEEPING or name.startswith(("observation.", "next.")):
            continue
        if kind in ("image", "video"):
            new_names[name] = IMAGE_PREFIX + name.removeprefix("observation/").replace("/", "_").replace(".", "_")
        elif name in ("actions", "a") and "action" not in features:
            new_names[name] = "action"
        elif kind.startswith("float") and len(shape) == 1 and name in _STATES and STATE not in features:
            new_names[name] = STATE
    new_names = {(stored or {}).get(name, name): new_name for name, new_name in new_names.items()}
    if unchanged := [name for name, new_name in new_names.items() if name == new_name]:
        return f" train.rename renames '{unchanged[0]}', which policies read under this name: remove that entry."
    return (
        f" Rename the columns to the names that policies read: {as_setting('train.rename', new_names)}."
        if new_names
        else ""
    )


NO_OTHER_NAMES: Mapping[str, str] = {}
SIDECAR = "meta/robopolicy"
"""Folder inside a dataset for data that LeRobot's format cannot store."""


def read_dataset(
    folder: Path,
    episodes: Sequence[int] | None = None,
    cameras: Sequence[str] | None = None,
    rename: Mapping[str, str] = NO_OTHER_NAMES,
) -> Episodes:
    """Read `folder` into memory: the chosen `episodes` (None: all) and `cameras` (None: all, (): no images).

    rename: new names for columns and elements, {dataset name: robopolicy name}; see `renaming`. Raises DataError:
    folder missing, not a dataset, written by an older LeRobot, never finalised, episode or camera absent, damaged file.
    An episode whose task changes is split into several, each with its own task.
    """
    folder = recover_folder(Path(folder))
    with read_errors(folder):
        return with_names(_read(folder, episodes, cameras, rename), rename)


def _read(
    folder: Path, episodes: Sequence[int] | None, cameras: Sequence[str] | None, rename: Mapping[str, str]
) -> Episodes:
    on_disk = read_information(folder)
    stored_names = {rename.get(column, column): column for column in on_disk["features"]}
    information = {**on_disk, "features": renamed_features(on_disk["features"], rename, folder)}
    columns_of_cameras = _chosen_cameras(information, cameras, folder, stored_names)
    paths = _data_files(folder)
    table = _read_table(folder, information, paths, list(columns_of_cameras.values()), stored_names)
    episode_numbers = _chosen_episodes(folder, table, episodes)
    rows = np.flatnonzero(np.isin(table["episode_index"], episode_numbers))
    rows = rows[np.lexsort((table["frame_index"][rows], table["episode_index"][rows]))]
    columns = {key: values[rows] for key, values in table.items()}
    lengths = np.unique_counts(columns["episode_index"]).counts
    check_frames(folder, columns, lengths, information["fps"])
    positions = np.full(len(table["episode_index"]), -1)
    positions[rows] = np.arange(len(rows))
    for name in columns_of_cameras.values():
        feature = information["features"][name]
        if feature["dtype"] == "video":
            columns[name] = read_videos(folder, on_disk, stored_names[name], episode_numbers, lengths)
        elif feature["dtype"] == "image":
            columns[name] = read_images(folder, paths, stored_names[name], feature, positions, columns)
        else:
            columns[name] = _colours(columns[name])
    key_of_column = {name: key for key, name in columns_of_cameras.items()}
    columns = {key_of_column.get(name, name): values for name, values in columns.items()}
    features = {key_of_column.get(name, name): feature for name, feature in information["features"].items()}
    selected = sorted(set(episode_numbers.tolist()))
    shapes = {key: values.shape[1:] for key, values in columns.items() if key.startswith(("observation.", "action"))}
    sidecar = _read_sidecar(folder, information["total_episodes"], selected, lengths, shapes, rename)
    if sidecar is None:
        lengths = one_task_each(folder, columns["task_index"], lengths)
    return _assemble(
        folder, {**information, "features": features}, columns, lengths, sidecar, tuple(columns_of_cameras)
    )


def read_columns(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Return additional numeric columns by name, each [N] or [N, n], in the order of `read_dataset`'s steps.

    Raises DataError as `read_dataset`, and when a column is absent.
    """
    folder = recover_folder(Path(folder))
    information = read_information(folder)
    for name in names:
        feature = information["features"].get(name, {"dtype": "", "shape": []})
        if feature["dtype"] not in _NUMERIC or is_picture(feature):
            raise DataError(f"{folder} has no numeric column '{name}'.{did_you_mean(name, information['features'])}")
    with read_errors(folder):
        table = _read_table(folder, information, _data_files(folder), [], {}, names)
    order = np.lexsort((table["frame_index"], table["episode_index"]))
    arrays = {name: torch.from_numpy(np.ascontiguousarray(table[name][order])) for name in names}
    return {name: values.squeeze(1) if values.shape[1:] == (1,) else values for name, values in arrays.items()}


def require_known(rename: Mapping[str, str], folders: Sequence[Path]) -> None:
    """Raise DataError if a name to be changed is not a column or element of any of the datasets."""
    if not rename:
        return
    known_names = set[str]().union(*(names_in(read_information(folder)["features"]) for folder in folders))
    for name in rename:
        if name not in known_names:
            places = ", ".join(map(str, folders))
            raise DataError(f"{places} has no column or element '{name}' to rename.{did_you_mean(name, known_names)}")


def is_dataset(folder: Path) -> bool:
    """Whether `folder` contains a LeRobotDataset, intact or not."""
    return (Path(folder) / "meta" / "info.json").is_file()


def read_information(folder: Path, rename: Mapping[str, str] = NO_OTHER_NAMES) -> dict[str, Any]:
    """Read and check `meta/info.json`: fps, features, totals. Raises DataError as `read_dataset`."""
    path = Path(folder) / "meta" / "info.json"
    if not Path(folder).exists():
        raise DataError(f"{folder} does not exist. Collect demonstrations into it first, or correct the path.")
    if not is_dataset(folder):
        no_dataset = f"{folder} is {describe_path(Path(folder))}. A LeRobotDataset is a folder with meta/info.json. "
        raise DataError(what_it_is(Path(folder)) or no_dataset + OTHER_FORMATS)
    information = read_json(file_within(Path(folder), "meta/info.json", "meta/info.json"), DataError)
    version = str(information.get("codebase_version", "unknown"))[:20] if isinstance(information, dict) else "unknown"
    if not version.startswith("v3."):
        newer = (
            f"{folder} has LeRobotDataset format {version}, but this version reads v3. The format is newer: update "
            "robopolicy."
        )
        raise DataError(what_it_is(Path(folder)) or newer)
    check_information(information, path)
    if not information.get("total_episodes") or not information.get("total_frames"):
        raise DataError(f"{folder} contains no complete episode: its recording stopped early. Record it again.")
    return {**information, "features": renamed_features(information["features"], rename, Path(folder))}


OTHER_FORMATS = (
    "For other formats, 'robopolicy convert' reads robomimic's, ALOHA's and Minari's HDF5, diffusion_policy's zarr, "
    "LeRobotDatasets v2 and .npz files."
)


def _data_files(folder: Path) -> list[Path]:
    """Return the data files in order, all inside `folder`."""
    paths = sorted((folder / "data").glob("*/*.parquet"))
    return [file_within(folder, str(path.relative_to(folder)), "A data file") for path in paths]


def _read_table(
    folder: Path,
    information: Mapping[str, Any],
    paths: Sequence[Path],
    shown: Sequence[str],
    stored: Mapping[str, str],
    further: Sequence[str] = (),
) -> dict[str, np.ndarray]:
    """Read the numeric columns [N, *shape] of every data file, including `further` ones; `shown` are the image columns.

    stored: name in the files of a renamed column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    features = information["features"]
    numbers = [
        key
        for key, feature in features.items()
        if feature["dtype"] in _NUMERIC
        and (key in shown or not is_picture(feature))
        and (
            key.startswith(("observation.", "next."))
            or key in (*_OWN, *WHO_ACTED, LABELS, LABEL_STEPS, "action", *further)
        )
    ]
    needed_columns = {*numbers, *(key for key in shown if features[key]["dtype"] == "image")}
    if "action" not in needed_columns:
        raise DataError(f"{folder} has no 'action' column; it has: {', '.join(features)}.{advice(features, stored)}")
    in_file = {key: stored.get(key, key) for key in needed_columns}
    try:
        row_count = 0
        for path in paths:
            with pq.ParquetFile(path) as file:
                missing_columns = set(in_file.values()) - set(file.schema_arrow.names)
                if missing_columns:
                    raise DataError(f"{path} lacks the column '{min(missing_columns)}', which meta/info.json declares.")
                check_columns(file, path, {in_file[key]: features[key] for key in needed_columns})
                row_count += file.metadata.num_rows
        if row_count != information["total_frames"]:
            raise DataError(
                f"{folder} declares {information['total_frames']} frames but its data files contain {row_count}: the "
                "recording was never finalised or the copy is incomplete."
            )
        elements = sum(math.prod(features[key]["shape"]) for key in numbers)
        require_room(folder, "the numeric columns", 8 * row_count * elements)
        table = pa.concat_tables([pq.read_table(path, columns=[in_file[key] for key in numbers]) for path in paths])
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{folder} has an incomplete data file ({in_one_line(error, 120)}): the recording was never finalised or "
            "the copy is incomplete. Record it again, or call finalize() in the program that wrote it."
        ) from error
    return {key: _column(folder, table.column(in_file[key]), key, features[key]) for key in numbers}


_SPARE_TASKS = 10_000
"""Number by which tasks may exceed frames, as in a dataset extracted from another."""
_UNSIGNED = ("uint16", "uint32", "uint64")
_NUMERIC = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", *_UNSIGNED, "bool")
ACTOR, SEGMENT = "correction.actor", "correction.segment"
"""Columns with the agent that acted and the kind of segment, encoded as in `core.interventions`."""
INTERVENTIONS = ("intervention", "complementary_info.is_intervention")
"""LeRobot columns that are True when a human acted in place of the policy, in rollouts and in learners."""
WHO_ACTED = (ACTOR, SEGMENT, *INTERVENTIONS)
LABELS = "label.action"
"""Column of a teacher's actions for a step and the following ones, concatenated."""
LABEL_STEPS = "label.steps"
"""Column with the number of these actions before the end of the teacher's episode; all if missing."""
_OWN = ("episode_index", "frame_index", "timestamp", "task_index", "episode_seed")
_KNOWN = (*_OWN, "index", "action")


def _column(folder: Path, column: Any, key: str, feature: Mapping[str, Any]) -> np.ndarray:
    if column.null_count and not feature["dtype"].startswith("float"):
        raise DataError(f"{folder}: column '{key}' is empty in {column.null_count} of {len(column)} frames.")
    array, count = column.combine_chunks(), len(column)
    while hasattr(array, "storage"):
        array = array.storage
    while hasattr(array.type, "value_type"):
        array = array.flatten()
    values = array.to_numpy(zero_copy_only=False)
    shape = (count,) if key in _OWN else (count, *(feature["shape"] or (1,)))
    if values.size != math.prod(shape):
        raise DataError(
            f"{folder}: column '{key}' contains {values.size / max(count, 1):g} numbers per frame, but "
            f"meta/info.json declares {feature['shape']}."
        )
    if values.dtype in _UNSIGNED:  # torch has few operations for these
        values = values.astype(np.int64 if values.dtype != "uint64" else np.float64)
    return values.reshape(shape)


def _chosen_episodes(folder: Path, table: Mapping[str, np.ndarray], episodes: Sequence[int] | None) -> np.ndarray:
    present = np.unique(table["episode_index"])
    if episodes is None:
        return present
    missing_episodes = sorted(set(episodes) - set(present.tolist()))
    if missing_episodes:
        raise DataError(
            f"{folder} has no episode {missing_episodes[:5]}; it has episodes {present[0]} to {present[-1]}."
        )
    if not len(episodes):
        raise DataError("episodes is empty: omit `episodes` to read all of them.")
    return np.unique(np.asarray(episodes, dtype=np.int64))


def _chosen_cameras(
    information: Mapping[str, Any], cameras: Sequence[str] | None, folder: Path, stored: Mapping[str, str]
) -> dict[str, str]:
    """Return the columns of the chosen cameras by robopolicy's key; stored: name in the files of a renamed column.

    Raises DataError if no observation is left.
    """
    features = information["features"]
    columns = camera_columns(features, folder / "meta" / "info.json")
    other_features = {
        name: feature for name, feature in features.items() if name not in _KNOWN and not name.startswith("next.")
    }
    if other_features and not any(name.startswith("observation.") for name in other_features):
        listing = join_names([f"{name} ({kind_in_words(feature)})" for name, feature in other_features.items()], 8)
        names = (
            " Rename the columns that the policy should read to LeRobot's names, such as observation.state and "
            "observation.images.wrist: train.rename={COLUMN: observation.state}."
        )
        raise DataError(
            f"{folder} has no column 'observation.*', which policies need. It has "
            f"{listing}.{advice(features, stored) or names}"
        )
    if cameras is None:
        return columns
    names = {key.removeprefix(IMAGE_PREFIX): key for key in columns}
    for camera in cameras:
        if camera not in names:
            raise DataError(f"{folder} has no camera '{camera}'.{did_you_mean(camera, names)}")
    return {names[camera]: columns[names[camera]] for camera in cameras}


def _colours(pixels: np.ndarray) -> np.ndarray:
    """Convert images uint8 [N, h, w, C] or [N, C, h, w] with 1, 3 or 4 channels to [N, h, w, 3]: grey is repeated,
    alpha dropped.
    """
    last = pixels if pixels.shape[-1] in (1, 3, 4) else np.moveaxis(pixels, 1, -1)
    return np.array(np.broadcast_to(last[..., :3], (*last.shape[:3], 3)))


@dataclass(frozen=True)
class _Sidecar:
    """Side table of the chosen episodes [E]; final: key -> [E, *shape], their last observations."""

    final: Mapping[str, Tensor]
    known: Tensor
    fields: Mapping[str, Field]
    action: Field
    fps: float


def _read_sidecar(
    folder: Path,
    total: int,
    selected: Sequence[int],
    lengths: np.ndarray,
    shapes: Mapping[str, tuple[int, ...]],
    rename: Mapping[str, str],
) -> _Sidecar | None:
    """Return the side table of `folder` for the selected ones of `total` episodes, None if there is none.

    shapes: of one frame of each observation and of an action. Raises DataError if the side table contradicts them.
    """
    if not os.path.lexists(folder / SIDECAR / "episodes.json"):
        return None
    way_out = f"Delete {folder / SIDECAR} to read the dataset without its final observations"
    for name in ("episodes.json", "episodes.safetensors"):
        file_within(folder, f"{SIDECAR}/{name}", "The side table")
    try:
        tree = load_tree(folder / SIDECAR, "episodes")
    except CheckpointError as error:
        raise DataError(f"{error} {way_out}.") from error
    with read_errors(folder / SIDECAR, way_out):
        stored_lengths: Tensor = tree["lengths"]
        if len(stored_lengths) != total or stored_lengths[selected].tolist() != lengths.tolist():
            raise DataError(f"{folder} was edited by another program: {SIDECAR} describes other episodes. {way_out}.")
        last, described = (
            {rename.get(key, key): each for key, each in tree[part].items()} for part in ("final", "observation_fields")
        )
        final = {key: value[selected] for key, value in last.items() if key in shapes}
        fields = {key: field for key, field in described.items() if key in shapes}
        for key, field in {**fields, "action": tree["action_field"]}.items():
            problem = invalid_field_entry(field) or (
                "" if math.prod(field["shape"]) == math.prod(shapes[key]) else "a shape"
            )
            problem = problem or ("names" if len(field["names"]) not in (0, math.prod(shapes[key])) else "")
            if problem:
                raise DataError(
                    f"{folder / SIDECAR} describes '{key}' with {problem} that its data does not have. {way_out}."
                )
        for key, value in final.items():
            if value.shape[1:] != shapes[key]:
                raise DataError(
                    f"{folder / SIDECAR} stores final observations of '{key}' with shape "
                    f"{list(value.shape[1:])}, unlike the data. {way_out}."
                )
        fps = tree["fps"]
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
            raise DataError(f"{folder / SIDECAR}: fps is {in_one_line(fps, 60)}, which is invalid. {way_out}.")
        final_known = tree["final_known"][selected]
        if final_known.shape != (len(selected),) or final_known.dtype != torch.bool:
            raise DataError(f"{folder / SIDECAR} does not record how every episode ended. {way_out}.")
        parsed_fields = {key: Field.from_json(field) for key, field in fields.items()}
        return _Sidecar(final, final_known, parsed_fields, Field.from_json(tree["action_field"]), float(fps))


def _assemble(
    folder: Path,
    information: Mapping[str, Any],
    columns: Mapping[str, np.ndarray],
    lengths: np.ndarray,
    sidecar: _Sidecar | None,
    shown: Sequence[str],
) -> Episodes:
    features = information["features"]
    keys = [key for key in features if key.startswith("observation.") and key in columns]
    unread = {key: feature for key, feature in features.items() if key.startswith("observation.") and key not in keys}
    if unread and not keys and not any(map(is_picture, unread.values())):
        listing = join_names([f"{name} ({kind_in_words(feature)})" for name, feature in unread.items()], 8)
        raise DataError(f"{folder} has no numeric or image observations. It has {listing}.")
    count, ends = len(lengths), np.cumsum(lengths)
    final: Mapping[str, Tensor] = {} if sidecar is None else sidecar.final
    fields: Mapping[str, Field] = {} if sidecar is None else sidecar.fields
    observation = {}
    for key in keys:
        values = torch.from_numpy(np.ascontiguousarray(columns[key]))
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
    return Episodes(
        observation_fields={
            key: fields[key]
            if key in fields
            else _field(folder, key, features[key], columns[key].shape[1:] if key in shown else None)
            for key in keys
        },
        action_field=_field(folder, "action", features["action"]) if sidecar is None else sidecar.action,
        fps=float(information["fps"]) if sidecar is None else sidecar.fps,
        observation=observation,
        actions=torch.from_numpy(np.ascontiguousarray(columns["action"])).float(),
        lengths=torch.from_numpy(lengths.astype(np.int64)),
        tasks=_tasks(folder, columns["task_index"][first], information["total_frames"] + _SPARE_TASKS),
        rewards=rewards or None,
        step_success=_success(folder, columns),
        terminated=_terminated(columns, ends),
        seeds=_flat(columns["episode_seed"])[first] if "episode_seed" in columns else None,
        final_known=torch.zeros(count, dtype=torch.bool) if sidecar is None else sidecar.known,
        labels=_labels(columns),
        label_steps=_flat(columns[LABEL_STEPS]) if LABEL_STEPS in columns else None,
        **_who_acted(columns),
    )


def _labels(columns: Mapping[str, np.ndarray]) -> Tensor | None:
    """Return the teacher's actions [N, L, A], None if there are none."""
    if LABELS not in columns:
        return None
    labels, size = torch.from_numpy(np.ascontiguousarray(columns[LABELS])).float(), columns["action"].shape[1]
    if labels.shape[1] % size:
        raise DataError(
            f"'{LABELS}' has {labels.shape[1]} elements, which is not a multiple of the action size {size}."
        )
    return labels.unflatten(1, (-1, size))


def _success(folder: Path, columns: Mapping[str, np.ndarray]) -> Tensor | None:
    """Return the mask [N] bool of steps in which the task was done; None if no boolean column records it."""
    if "next.success" not in columns:
        return None
    values = _flat(columns["next.success"])
    other = values[(values != 0) & (values != 1)]
    if len(other):
        warnings.warn(
            f"{folder}: next.success is {other[0].item():g} in a step, but true or false (1 or 0) elsewhere, so "
            "success is undefined. Write only true or false.",
            RobopolicyWarning,
            stacklevel=4,
        )
        return None
    return values.bool()


def _terminated(columns: Mapping[str, np.ndarray], ends: np.ndarray) -> Tensor | None:
    """Return the mask [E] bool of episodes that ended the task: recorded, or done and not truncated; None if not
    recorded.
    """
    if "next.terminated" in columns:
        return _flat(columns["next.terminated"])[ends - 1].bool()
    if "next.done" in columns and "next.truncated" in columns:
        return (_flat(columns["next.done"]).bool() & ~_flat(columns["next.truncated"]).bool())[ends - 1]
    return None


def _who_acted(columns: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return `actor` and `segment` [N] from the columns, if present; LeRobot's flags do not distinguish recoveries from
    corrections.
    """
    if ACTOR in columns and SEGMENT in columns:
        return {"actor": _flat(columns[ACTOR]).long(), "segment": _flat(columns[SEGMENT]).long()}
    for name in INTERVENTIONS:
        if name in columns and columns[name].size == len(columns[name]):
            person = _flat(columns[name]).bool()
            return {
                "actor": torch.where(person, ActingAgent.HUMAN, ActingAgent.POLICY),
                "segment": torch.where(person, Segment.CORRECT, Segment.AUTONOMOUS),
            }
    return {}


def _interleave(values: Tensor, ending: Tensor, lengths: Tensor) -> Tensor:
    """Insert row e of `ending` [E, ...] after episode e of `values` [N, ...]."""
    frames = torch.empty((len(values) + len(lengths), *values.shape[1:]), dtype=values.dtype)
    episode = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    frames[torch.arange(len(values)) + episode] = values
    frames[lengths.cumsum(0) + torch.arange(len(lengths))] = ending
    return frames


def _flat(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).reshape(len(values)))


def _field(folder: Path, key: str, feature: Mapping[str, Any], image_shape: tuple[int, ...] | None = None) -> Field:
    if image_shape is not None:
        return Field(image_shape, "uint8", 0.0, 255.0)
    shape, names = tuple(feature["shape"]) or (1,), feature.get("names")
    if isinstance(names, Mapping) and all(isinstance(place, int) for place in names.values()):
        names = [name for name, _ in sorted(names.items(), key=lambda pair: pair[1])]  # {"delta_x": 0, "delta_y": 1}
    elif isinstance(names, Mapping) and all(isinstance(part, list) for part in names.values()):
        parts = [(arm, name) for arm, part in names.items() for name in part]  # {"motors": [...]}
        names = [name for _, name in parts]
        if len(set(map(str, names))) < len(names):  # {"left": ["x"], "right": ["x"]}
            names = [f"{arm}.{name}" for arm, name in parts]
    if not (
        isinstance(names, list) and len(names) == math.prod(shape) and all(isinstance(each, str) for each in names)
    ):
        return Field(shape)
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        warnings.warn(
            f"{folder}/meta/info.json (or rename) gives the name {join_names([f"'{name}'" for name in duplicates], 5)} "
            f"to more than one element of '{key}', so its names are ignored: give each element a unique name there.",
            RobopolicyWarning,
            stacklevel=4,
        )
        return Field(shape)
    return Field(shape, names=tuple(names))


def _tasks(folder: Path, index: np.ndarray, most: int) -> tuple[str, ...]:
    """Return the instructions for task numbers [E], with a limit on the size of the table."""
    path = folder / "meta" / "tasks.parquet"
    if not path.is_file():
        raise DataError(f"{path} is missing: the copy of the dataset is incomplete.")
    columns = table_within(folder, path, most).to_pydict()
    texts = columns.get("task", columns.get("__index_level_0__"))
    if texts is None:
        raise DataError(f"{path} has no column 'task'; it has: {', '.join(columns)}.")
    names = dict(zip(columns["task_index"], map(str, texts), strict=True))
    unnamed = sorted(set(index.tolist()) - set(names))
    if unnamed:
        raise DataError(f"{path} has no name for task {unnamed[0]}, which an episode has.")
    return tuple(names[item] for item in index.tolist())
