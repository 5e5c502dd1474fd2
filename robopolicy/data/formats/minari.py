"""Minari's HDF5: DATASET/data/main_data.hdf5 with episode_0/{observations,actions,rewards,terminations,infos,...}.

Observations have one row more than actions, so the observation after the last action is known. Dictionary spaces are
groups, tuples have the keys _index_0, ... The files do not contain the frame rate. Source: Farama-Foundation/Minari,
minari/dataset/_storages/hdf5_storage.py.
"""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.core.errors import DataError
from robopolicy.core.storage import read_object
from robopolicy.data.formats.format import Column, DatasetFormat
from robopolicy.data.formats.hdf5 import (
    Hdf5Source,
    children,
    described,
    has,
    is_hdf5,
    lengths_of,
    member,
    numbered,
    opened,
)

MAIN, METADATA = "main_data.hdf5", "metadata.json"
USUAL_FPS = 20.0
_TARGETS = {"rewards": ("next.reward",), "terminations": ("next.terminated",), "truncations": ()}


class Minari(DatasetFormat):
    """HDF5 files of Minari."""

    title = "Minari's HDF5"

    def recognises(self, path: Path) -> bool:
        """Implement `DatasetFormat.recognises`."""
        file_path = _main_file(path)
        if file_path is None:
            return _of_arrow(path)
        with opened(file_path) as file:
            return any(has(file, f"{name}/actions", f"{name}/terminations") for name in list(file)[:1])

    @contextmanager
    def open(self, path: Path) -> Generator[Hdf5Source]:
        """Implement `DatasetFormat.open`."""
        file_path = _main_file(path)
        if file_path is None:
            raise DataError(
                f"{path} stores its episodes as arrow, which is not supported: let Minari write them as HDF5 "
                '(data_format="hdf5").'
            )
        with opened(file_path) as file:
            names = numbered(file, r"episode_(\d+)")
            if not names:
                raise DataError(f"{file_path} contains no episode: it has no group 'episode_0'.")
            _require_all(path, len(names))
            lengths = lengths_of(file, names, "rewards", "total_steps", file_path)
            columns = _columns(member(file, names[0], file_path), file_path)
            source = _MinariSource(path, [(file_path, name) for name in names], columns, lengths, file)
            source.usual_fps = USUAL_FPS
            seeds = [file[name].attrs.get("seed") for name in names]
            if all(isinstance(seed, int | np.integer) and 0 <= seed < 2**63 for seed in seeds):
                source.seeds = tuple(int(seed) for seed in seeds)
            yield source


class _MinariSource(Hdf5Source):
    """Minari's episodes; the first row of `infos`, which belongs to the reset, is dropped."""

    def shapes(self, episode: int, keys: Collection[str]) -> Mapping[str, tuple[int, ...]]:
        """Implement `Source.shapes`."""
        length = self.lengths[episode]
        shapes = super().shapes(episode, keys)
        return {
            key: (length, *shape[1:]) if key.startswith("infos/") and shape[0] == length + 1 else shape
            for key, shape in shapes.items()
        }

    def read(self, episode: int, keys: Collection[str]) -> Mapping[str, np.ndarray]:
        """Implement `Source.read`."""
        length = self.lengths[episode]
        arrays = super().read(episode, keys)
        return {
            key: values[1:] if key.startswith("infos/") and len(values) == length + 1 else values
            for key, values in arrays.items()
        }


def _main_file(path: Path) -> Path | None:
    """Return the HDF5 file of a dataset's folder, the folder `data` in it, or the file itself."""
    for candidate in (path, path / MAIN, path / "data" / MAIN):
        if is_hdf5(candidate):
            return candidate
    return None


def _of_arrow(path: Path) -> bool:
    files = [path / METADATA, path / "data" / METADATA]
    return any(file.is_file() and read_object(file, DataError).get("data_format") == "arrow" for file in files)


def _require_all(path: Path, count: int) -> None:
    """Raise DataError if the number of episodes differs from the one in metadata.json."""
    for file in (path / METADATA, path / "data" / METADATA):
        if file.is_file():
            total = read_object(file, DataError).get("total_episodes", count)
            if total != count:
                raise DataError(f"{file} declares {total} episodes but there are {count}: the copy is incomplete.")


def _columns(group: Any, path: Path) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for key, dataset in children(group, path).items():
        column = described(dataset, path, key)
        if column is None:
            continue
        targets = _TARGETS.get(key)
        if key.startswith("actions"):
            targets = ("action",)
        elif key.startswith("infos/"):
            targets = ("next.success",) if key in ("infos/success", "infos/is_success") else ()
        columns[key] = replace(column, targets=targets)
    return columns
