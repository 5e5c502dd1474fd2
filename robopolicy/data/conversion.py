"""Converting datasets of other formats into a LeRobotDataset v3, a few episodes at a time.

Sources are opened together and their declared shapes are compared before anything is written; the folder appears only
when it is complete. Axes: E episode, L step of one episode.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from robopolicy.core.episodes import Episodes, select_episode_indices
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.file_types import describe_path
from robopolicy.core.progress import progress
from robopolicy.core.spec import IMAGE_PREFIX, Field
from robopolicy.core.storage import read_errors, recover_folder, remove_leftovers
from robopolicy.data.configuration import ConvertConfig
from robopolicy.data.formats.format import FORMATS, Source, format_of
from robopolicy.data.formats.mapping import (
    ACTION,
    OUTCOMES,
    REWARD,
    SUCCESS,
    TERMINATED,
    ColumnMap,
    is_picture,
    mapped,
    names_of,
    size_of,
    table,
)
from robopolicy.data.formats.pixels import Pictures, layout, scale_of
from robopolicy.data.lerobot_format import write_parts
from robopolicy.data.lerobot_reading import is_dataset

AT_ONCE = 2**27
"""Bytes of episodes written together; while they are concatenated, memory contains them twice."""


@dataclass(frozen=True)
class _Opened:
    """A source and the mapping of its columns; pictures: conversion of each image key to upright RGB."""

    source: Source
    title: str
    columns: ColumnMap
    pictures: Mapping[str, Pictures]

    @property
    def keys(self) -> list[str]:
        """The columns that are read."""
        return list(dict.fromkeys(part.key for parts in self.columns.values() for part in parts))


class Conversion:
    """Opened sources and their chosen episodes. A context manager: `with Conversion(...) as found`.

    fps: control steps per second, None if unknown. Raises ConfigError and DataError with one sentence if a source is
    damaged or unknown, or sources do not fit together.
    """

    def __init__(self, paths: Sequence[Path], config: ConvertConfig, kind: str = ""):
        self.config = config
        self._stack = ExitStack()
        try:
            self.opened = [self._open(path, kind) for given_path in paths for path in sources_in(given_path, kind)]
            self.fps = self._rate()
            self._require_alike()
            self.chosen = self._chosen()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "Conversion":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._stack.close()

    def require_rate(self) -> float:
        """Return the control steps per second; raises ConfigError if they are unknown."""
        if self.fps is None:
            source = self.opened[0].source
            raise ConfigError(
                f"{source.path} does not record its frame rate (control steps per second): add "
                f"convert.fps={source.usual_fps:g}, or the rate at which it was recorded."
            )
        return self.fps

    @property
    def notes(self) -> list[str]:
        """Messages for the user, one sentence each."""
        texts = [note for each in self.opened for note in each.source.notes]
        actions = [each.source.columns[part.key].dtype for each in self.opened for part in each.columns[ACTION]]
        if any(dtype.startswith(("int", "uint", "bool")) for dtype in actions):
            texts.append("Actions are integers and are treated as continuous values: the policies here are continuous.")
        return list(dict.fromkeys(texts))

    @property
    def title(self) -> str:
        """Names of the sources' formats."""
        return ", ".join(dict.fromkeys(each.title for each in self.opened))

    @property
    def table(self) -> list[list[str]]:
        """A line for every column: its key, its content, and its new name."""
        first = self.opened[0]
        return table(first.source.columns, first.columns)

    def write(self, target: Path) -> tuple[int, int]:
        """Write the chosen episodes to `target`, replacing an existing dataset; return their number and their steps.

        Raises DataError if files do not contain what they declare, StorageError if `target` cannot be written.
        """
        self.require_rate()
        self._check()
        recover_folder(target)
        if target.parent.is_dir():
            remove_leftovers(target.parent, target.name)
        cameras = sum(name.startswith(IMAGE_PREFIX) for name in self.opened[0].columns)
        videos = cameras if self.config.images == "video" else 0
        with progress("converting", len(self.chosen) * (1 + videos)) as advance:
            return write_parts(self._parts(), target, images=self.config.images, advance=advance)

    # -- opening ---------------------------------------------------------------------------------------------------

    def _open(self, path: Path, kind: str) -> _Opened:
        dataset_format = format_of(path, kind)
        if dataset_format is None:
            raise DataError(_unknown(path))
        with read_errors(path):
            source = self._stack.enter_context(dataset_format.open(path))
            columns = mapped(source.columns, self.config.map, path)
            return _Opened(source, dataset_format.title, columns, self._pictures(source, columns))

    def _pictures(self, source: Source, columns: ColumnMap) -> dict[str, Pictures]:
        cameras = [name.removeprefix(IMAGE_PREFIX) for name in columns if name.startswith(IMAGE_PREFIX)]
        for setting in ("flip", "bgr"):
            for name in getattr(self.config, setting):
                if name not in cameras:
                    raise ConfigError(
                        f"convert.{setting} contains '{name}', which is not a camera; the cameras are "
                        f"{', '.join(cameras) or 'none'}."
                    )
        pictures: dict[str, Pictures] = {}
        for target, (part, *_) in columns.items():
            column, name = source.columns[part.key], target.removeprefix(IMAGE_PREFIX)
            if not is_picture(column):
                continue
            scale = 1.0
            if column.dtype.startswith("float"):
                samples = sorted({0, len(source.lengths) // 2, len(source.lengths) - 1})
                arrays = [source.read(episode, [part.key])[part.key] for episode in samples]
                scale = scale_of(arrays, f"{source.path}: '{part.key}'")
            axes = layout(column.shape, column.dtype) or "hwc"  # encoded pictures are decoded so
            pictures[part.key] = Pictures(
                axes, scale, column.upside_down != (name in self.config.flip), name in self.config.bgr
            )
        return pictures

    def _rate(self) -> float | None:
        """Return the control steps per second that are set, or on which all sources agree; None if one does not contain
        them.
        """
        if self.config.fps is not None:
            return self.config.fps
        rates = {each.source.fps: each.source for each in self.opened}
        if len(rates) > 1:
            rates_text = ", ".join(f"{source.path} {rate or 'unknown'}" for rate, source in rates.items())
            raise DataError(
                f"The sources have different frame rates (steps per second: {rates_text}): convert them separately, "
                "or set convert.fps if they are the same."
            )
        return next(iter(rates))

    def _require_alike(self) -> None:
        """Raise DataError unless all sources give the same columns, in the same shapes."""
        first, *other_shapes = [
            {name: field.shape for name, field in self._fields(each).items()} for each in self.opened
        ]
        for each, fields in zip(self.opened[1:], other_shapes, strict=True):
            for name in sorted({*first, *fields}):
                if first.get(name) != fields.get(name):
                    first_shape, other_shape = (
                        list(shapes[name]) if name in shapes else "none" for shapes in (first, fields)
                    )
                    raise DataError(
                        f"'{name}' is {first_shape} in {self.opened[0].source.path} and {other_shape} in "
                        f"{each.source.path}: set convert.map so that both give the same columns, or convert them "
                        "separately."
                    )

    def _fields(self, opened: _Opened) -> dict[str, Field]:
        """Return a field for every written column except outcomes."""
        columns = opened.source.columns
        fields: dict[str, Field] = {}
        for target, parts in opened.columns.items():
            if target.startswith(IMAGE_PREFIX):
                axes, shape = opened.pictures[parts[0].key].layout, columns[parts[0].key].shape
                size = shape[1:] if axes == "chw" else shape[:2]
                fields[target] = Field((*size, 3), "uint8", 0.0, 255.0)
            elif target in OUTCOMES:
                fields[target] = Field((1,))
            else:
                count = sum(size_of(part, columns) for part in parts)
                fields[target] = Field((count,), names=names_of(parts, columns))
        return fields

    def _chosen(self) -> list[tuple[_Opened, int]]:
        all_episodes = [(each, episode) for each in self.opened for episode in range(len(each.source.lengths))]
        paths = ", ".join(str(each.source.path) for each in self.opened[:3])
        numbers = select_episode_indices(
            len(all_episodes), paths, "convert", self.config.episodes, self.config.exclude_episodes
        )
        return [all_episodes[number] for number in numbers]

    # -- reading ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise DataError unless every chosen episode has the rows and shapes that its source declares."""
        trimmed = self.config.trim_start + self.config.trim_end
        with progress("checking", len(self.chosen)) as advance:
            for entry, episode in self.chosen:
                source, length = entry.source, entry.source.lengths[episode]
                place = f"{source.path}: episode {episode}"
                if length <= trimmed:
                    raise DataError(
                        f"{place} has {length} steps, of which none remain after convert.trim_start and "
                        "convert.trim_end."
                    )
                with read_errors(source.path):
                    shapes = source.shapes(episode, entry.keys)
                observed = {
                    part.key for name, parts in entry.columns.items() for part in parts if name[:12] == "observation."
                }
                for key, (rows, *shape) in shapes.items():
                    if rows != length and not (key in observed and rows == length + 1):
                        raise DataError(
                            f"{place} has {length} actions but {rows} rows of '{key}': exclude this episode, or "
                            "record it again."
                        )
                    if tuple(shape) != source.columns[key].shape:
                        raise DataError(
                            f"{place} has '{key}' with shape {shape}, but the first episode has shape "
                            f"{list(source.columns[key].shape)}: exclude this episode."
                        )
                advance()

    def _parts(self) -> Iterator[Episodes]:
        """Yield the chosen episodes in groups of at most `AT_ONCE` bytes."""
        waiting: list[dict[str, Any]] = []
        size = 0
        for entry, episode in self.chosen:
            with read_errors(entry.source.path, f"Exclude episode {episode}, or restore it from a copy"):
                waiting.append(self._read(entry, episode))
            size += sum(values.nbytes for values in waiting[-1]["observation"].values())
            if size >= AT_ONCE:
                yield self._joined(waiting)
                waiting, size = [], 0
        if waiting:
            yield self._joined(waiting)

    def _read(self, opened: _Opened, episode: int) -> dict[str, Any]:
        """Return one episode after trimming: observation: key -> [L + 1, *shape], action [L, A] and outcomes [L] by
        name.
        """
        source = opened.source
        values = source.read(episode, opened.keys)
        length, start = source.lengths[episode], self.config.trim_start
        end = length - self.config.trim_end
        for key, each in values.items():
            if len(each) not in (length, length + 1):
                raise DataError(
                    f"{source.path}: episode {episode} has {length} actions but {len(each)} rows of '{key}'."
                )
        columns = {name: self._column(opened, name, values, episode) for name in opened.columns}
        observed = {name: each for name, each in columns.items() if name.startswith("observation.")}
        final_known = end < length or all(len(each) > length for each in observed.values())
        frames = np.arange(start, end + 1) if final_known else np.append(np.arange(start, end), end - 1)
        task = self.config.task or source.tasks[episode]
        result: dict[str, Any] = {
            "observation": {name: each[frames] for name, each in observed.items()},
            ACTION: columns[ACTION][start:end],
            "task": task,
            "known": final_known,
            "seed": None if source.seeds is None else source.seeds[episode],
        }
        for name in OUTCOMES:
            if name in columns:
                result[name] = columns[name][start:end].reshape(-1)
        return result

    def _column(self, opened: _Opened, name: str, values: Mapping[str, np.ndarray], episode: int) -> np.ndarray:
        parts = opened.columns[name]
        if parts[0].key in opened.pictures:
            return opened.pictures[parts[0].key](
                values[parts[0].key], f"{opened.source.path}: '{parts[0].key}' of episode {episode}"
            )
        rows = min(len(values[part.key]) for part in parts)
        vectors = [values[part.key][:rows].reshape(rows, -1)[:, part.first : part.last] for part in parts]
        return np.concatenate(vectors, axis=1).astype(np.float32)

    def _joined(self, waiting: Sequence[Mapping[str, Any]]) -> Episodes:
        fields = self._fields(self.opened[0])

        def steps(name: str) -> torch.Tensor | None:
            return torch.from_numpy(np.concatenate([each[name] for each in waiting])) if name in waiting[0] else None

        reward = steps(REWARD)
        success = [np.logical_or.accumulate(each[SUCCESS] > 0) for each in waiting if SUCCESS in each]
        terminated = [bool(each[TERMINATED][-1] > 0) for each in waiting if TERMINATED in each]
        seeds = [each["seed"] for each in waiting if each["seed"] is not None]
        action = steps(ACTION)
        assert action is not None
        return Episodes(
            observation_fields={name: field for name, field in fields.items() if name.startswith("observation.")},
            action_field=fields[ACTION],
            fps=self.require_rate(),
            observation={
                name: torch.from_numpy(np.concatenate([each["observation"][name] for each in waiting]))
                for name in waiting[0]["observation"]
            },
            actions=action,
            lengths=torch.tensor([len(each[ACTION]) for each in waiting]),
            tasks=tuple(each["task"] for each in waiting),
            rewards=None if reward is None else {"reward": reward},
            step_success=torch.from_numpy(np.concatenate(success)) if success else None,
            terminated=torch.tensor(terminated) if terminated else None,
            seeds=torch.tensor(seeds) if len(seeds) == len(waiting) and not self.config.trim_start else None,
            final_known=torch.tensor([each["known"] for each in waiting]),
        )


def sources_in(path: Path, kind: str = "") -> list[Path]:
    """Return `path`, or the files in a folder that is not a dataset itself; raises DataError if it does not exist."""
    if not path.exists():
        raise DataError(f"{path} does not exist: check the path of the source.")
    if kind or not path.is_dir() or format_of(path) is not None:
        return [path]
    dataset_files = sorted(item for item in path.iterdir() if item.suffix in (".hdf5", ".h5", ".npz", ".zarr", ".zip"))
    return dataset_files or [path]


def require_target(target: Path, sources: Sequence[Path], overwrite: bool) -> None:
    """Raise DataError if `target` contains files that must not be replaced, or is inside a source."""
    for source in sources:
        if target.resolve() == source.resolve() or (
            source.is_dir() and target.resolve().is_relative_to(source.resolve())
        ):
            raise DataError(f"{target} is inside the source {source}: choose a folder outside it.")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not is_dataset(target):
        raise DataError(
            f"{target} contains files that do not belong to a LeRobotDataset and are not removed: choose another "
            "folder."
        )
    if not overwrite:
        raise DataError(
            f"{target} already contains a LeRobotDataset: choose another folder, or replace it with run.overwrite=true."
        )


def _unknown(path: Path) -> str:
    """Return why a source cannot be converted, and the remedy."""
    if is_dataset(path):
        return (
            f"{path} is already a LeRobotDataset v3, which every verb reads; lerobot-edit-dataset splits and merges it."
        )
    if path.is_dir() and (path / "dataset_info.json").is_file() and (path / "features.json").is_file():
        return (
            f"{path} is RLDS (TensorFlow Datasets), which is not supported: LeRobot and openpi have scripts that "
            "convert it to a LeRobotDataset."
        )
    return (
        f"{path} is {describe_path(path)} and has no known format ({', '.join(FORMATS.names())}). Save its arrays as "
        ".npz (docs/guides/recorded_data.md lists the names), or add a format: convert.format=package.module:Class."
    )
