"""diffusion_policy's replay buffer, a zarr with all episodes concatenated: data/{action,state,img,...}.

meta/episode_ends [E] defines where each episode ends. A folder NAME.zarr or one file NAME.zarr.zip, in zarr's format 2
or 3. Push-T's `state` is the agent's position [0:2] and the block's pose [2:5]. The files do not contain the frame
rate: Push-T's was 10 Hz. Source: real-stanford/diffusion_policy, common/replay_buffer.py; UMI adds JPEG XL.
"""

import json
import math
import zipfile
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.core.errors import DataError, in_one_line, require_extra
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.data.formats.format import Column, DatasetFormat, Source
from robopolicy.data.lerobot_checks import require_room

USUAL_FPS = 10.0
"""Frame rate of Push-T, assumed in advice."""
ENDS = "meta/episode_ends"
_MARKS = (".zgroup", ".zattrs", "zarr.json")
_PICKLED = ("pickle", "json2", "msgpack2")
"""Codecs of Python objects; the first can run any code when reading."""
MOST_EPISODES = 2**24


class ReplayBuffer(DatasetFormat):
    """Zarr replay buffers of diffusion_policy."""

    title = "diffusion_policy's zarr"

    def recognises(self, path: Path) -> bool:
        """Implement `DatasetFormat.recognises`."""
        if path.is_dir():
            return any((path / mark).is_file() for mark in _MARKS)
        if not path.is_file() or not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            return any(Path(name).name in _MARKS for name in archive.namelist()[:1000])

    @contextmanager
    def open(self, path: Path) -> Generator[Source]:
        """Implement `DatasetFormat.open`."""
        zarr = require_extra("zarr", "convert")
        _require_inside(path)
        kinds = zarr.storage
        store = kinds.ZipStore(path, mode="r") if path.is_file() else kinds.LocalStore(path, read_only=True)
        try:
            yield _ReplayBufferSource(path, zarr.open_group(store, mode="r"))
        finally:
            store.close()


class _ReplayBufferSource(Source):
    """An opened replay buffer."""

    usual_fps = USUAL_FPS

    def __init__(self, path: Path, root: Any):
        self.path = path
        self.ends = _episode_ends(path, root)
        starts = np.concatenate([[0], self.ends[:-1]])
        self.lengths = tuple(int(length) for length in self.ends - starts)
        self.tasks = ("",) * len(self.lengths)
        self.arrays = _arrays(path, root)
        self.columns = {key: _column(key, each, self.arrays) for key, each in self.arrays.items()}
        self.fps = next((float(root.attrs[name]) for name in ("fps", "frequency") if name in root.attrs), None)
        short = {key: each.shape[0] for key, each in self.arrays.items() if each.shape[0] != self.ends[-1]}
        if short:
            key, rows = next(iter(short.items()))
            raise DataError(f"{path}: '{key}' has {rows} rows, but {ENDS} ends at {self.ends[-1]}: they do not match.")
        self.notes = _missing(path, self.arrays)

    def shapes(self, episode: int, keys: Collection[str]) -> Mapping[str, tuple[int, ...]]:
        """Implement `Source.shapes`."""
        return {key: (self.lengths[episode], *self.arrays[key].shape[1:]) for key in keys}

    def read(self, episode: int, keys: Collection[str]) -> Mapping[str, np.ndarray]:
        """Implement `Source.read`."""
        last, length = int(self.ends[episode]), self.lengths[episode]
        arrays: dict[str, np.ndarray] = {}
        for key in keys:
            array = self.arrays[key]
            row = math.prod(array.shape[1:]) * array.dtype.itemsize
            require_room(self.path, f"'{key}' of an episode", 2 * row * (length + array.chunks[0]))
            arrays[key] = np.asarray(array[last - length : last])
        return arrays


def _episode_ends(path: Path, root: Any) -> np.ndarray:
    if ENDS not in root:
        raise DataError(
            f"{path} is a zarr without '{ENDS}' [E], which defines where each episode ends, so it cannot be split "
            "into episodes: let diffusion_policy's ReplayBuffer write it."
        )
    array = root[ENDS]
    if array.ndim != 1 or array.dtype.kind not in "iu" or not 0 < array.shape[0] <= MOST_EPISODES:
        raise DataError(f"{path}: '{ENDS}' is {array.dtype} {list(array.shape)}, not one integer per episode.")
    _require_plain(path, ENDS, array)
    ends = np.asarray(array[:]).astype(np.int64)
    if (np.diff(ends, prepend=0) < 1).any():
        raise DataError(f"{path}: '{ENDS}' does not increase from episode to episode.")
    return ends


def _arrays(path: Path, root: Any) -> dict[str, Any]:
    """Return the arrays below `data` by key, "data/obs/state" for nested ones."""
    if "data" not in root:
        raise DataError(
            f"{path} is a zarr without a group 'data', in which diffusion_policy stores action, state and img."
        )
    arrays: dict[str, Any] = {}
    waiting = [("data", root["data"])]
    while waiting:
        key, item = waiting.pop()
        if hasattr(item, "shape"):
            _require_plain(path, key, item)
            if item.ndim and item.dtype.kind in "biuf":
                arrays[key] = item
        else:
            waiting += [(f"{key}/{name}", item[name]) for name in item]
    return dict(sorted(arrays.items()))


def _require_plain(path: Path, key: str, array: Any) -> None:
    """Raise DataError on an array of objects, and on a chunk that exceeds the free memory."""
    if array.dtype.hasobject:
        raise DataError(
            f"{path}: '{key}' contains Python objects, which are never read, because they can run any code."
        )
    if array.ndim:
        require_room(path, f"a chunk of '{key}'", math.prod(array.chunks) * array.dtype.itemsize)


def _column(key: str, array: Any, arrays: Mapping[str, Any]) -> Column:
    shape, dtype = tuple(array.shape[1:]), array.dtype.name
    push_t = "data/keypoint" in arrays or "data/n_contacts" in arrays
    if key == "data/state" and shape == (5,) and push_t:
        slices = {"0:2": STATE} | ({} if "data/keypoint" in arrays else {"2:5": ENVIRONMENT_STATE})
        return Column(shape, dtype, slices=slices)
    if key == "data/keypoint" and push_t:
        return Column(shape, dtype, targets=(ENVIRONMENT_STATE,))
    return Column(shape, dtype, targets=() if key == "data/n_contacts" else None)


def _missing(path: Path, arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a message on chunks that are not stored: zarr omits those that contain only its fill value."""
    warnings: list[str] = []
    for key, array in arrays.items():
        chunk_count = int(array.nchunks_initialized)
        if not chunk_count:
            raise DataError(f"{path}: all chunks of '{key}' are missing: the copy is incomplete.")
        if chunk_count < array.nchunks:
            warnings.append(
                f"{array.nchunks - chunk_count} of {array.nchunks} chunks of '{key}' are not stored and are read as "
                f"{array.fill_value}: either zarr omitted them on purpose because they contain only this value, or "
                "they were lost in a copy."
            )
    return tuple(warnings)


def _require_inside(path: Path) -> None:
    """Raise DataError if a link points outside the folder, or an array needs an unsupported codec."""
    if path.is_dir():
        for item in path.rglob("*"):
            if item.is_symlink() and not item.resolve().is_relative_to(path.resolve()):
                raise DataError(
                    f"{path}: {item.relative_to(path)} is a link to a place outside the folder: it is not read."
                )
        described = [item.read_bytes()[: 2**20] for item in path.rglob("*") if item.name in (".zarray", "zarr.json")]
    else:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if Path(name).name in (".zarray", "zarr.json")]
            described = [archive.open(name).read(2**20) for name in names]
    for text in described:
        codecs = _codecs(text, path)
        if pickled_codecs := sorted(set(_PICKLED) & codecs):
            raise DataError(
                f"{path} contains Python objects (codec {pickled_codecs[0]}), which are never read, because they "
                "can run any code."
            )
        if any(name.startswith("imagecodecs_") for name in codecs):
            require_extra("imagecodecs", "convert")
            from imagecodecs.numcodecs import register_codecs

            register_codecs(verbose=False)


def _codecs(text: bytes, path: Path) -> set[str]:
    """Return the names of the codecs in the description of an array."""
    try:
        waiting: list[Any] = [json.loads(text)]
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the description of an array is not JSON ({in_one_line(error, 80)}).") from error
    names: set[str] = set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            names |= {value for key, value in item.items() if key in ("id", "name") and isinstance(value, str)}
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return names
