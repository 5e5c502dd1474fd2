"""Untrusted HDF5 files: only data inside the file itself is read, and declared sizes are checked.

An HDF5 file can refer to other files (external links, virtual datasets, raw files), and can declare any size without
containing data: both are rejected before an array is allocated.
"""

import json
import math
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.core.errors import DataError, in_one_line, require_extra
from robopolicy.core.storage import read_errors
from robopolicy.data.formats.format import Column, Source
from robopolicy.data.formats.pixels import decoded
from robopolicy.data.lerobot_checks import require_room

EXTRA = "convert"
type Group = Any
"""h5py.Group, like h5py.Dataset below: h5py is imported only when a file is opened."""
type Dataset = Any
SIGNATURE = b"\x89HDF\r\n\x1a\n"
SUFFIXES = (".hdf5", ".h5", ".hdf")
ENCODED = "encoded images"
"""Type of a column whose rows are JPEG or PNG files."""
LARGEST_TEXT = 2**24


def is_hdf5(path: Path) -> bool:
    """Whether `path` is a file that starts like HDF5 or has its extension."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(SIGNATURE)) == SIGNATURE or path.suffix in SUFFIXES


@contextmanager
def opened(path: Path) -> Generator[Group]:
    """Open an HDF5 file for reading. Raises DataError if it is truncated or not HDF5, ConfigError without h5py."""
    h5py = require_extra("h5py", EXTRA)
    try:
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        raise DataError(
            f"{path} is a damaged or truncated HDF5 file ({in_one_line(error, 160)}): copy it again, or record again."
        ) from error
    with file:
        yield file


def member(group: Group, key: str, path: Path) -> Any:
    """Return the group or dataset at `key`, inside the file itself; raises DataError if it is not."""
    h5py = require_extra("h5py", EXTRA)

    node: Any = group
    for name in key.split("/"):
        link = node.get(name, getlink=True) if isinstance(node, h5py.Group) and name in node.keys() else None  # noqa: SIM118
        if link is None:
            raise DataError(f"{path} has no '{group.name.rstrip('/')}/{key}', which its other episodes have.")
        if not isinstance(link, h5py.HardLink):
            raise DataError(
                f"{path}: '{group.name.rstrip('/')}/{key}' is a link ({type(link).__name__}) that may point outside "
                "the file: it is not read. Copy the data into the file."
            )
        node = node[name]
    return node


def has(group: Group, *keys: str) -> bool:
    """Whether all of these keys are inside the file itself, without following links to other files."""
    h5py = require_extra("h5py", EXTRA)

    for key in keys:
        node: Any = group
        for name in key.split("/"):
            is_member = isinstance(node, h5py.Group) and name in node.keys()  # noqa: SIM118 (`in` alone follows links)
            if not is_member or not isinstance(node.get(name, getlink=True), h5py.HardLink):
                return False
            node = node[name]
    return True


def array(group: Group, key: str, path: Path) -> Dataset:
    """Return the dataset at `key`, completely written; raises DataError if it is not."""
    h5py = require_extra("h5py", EXTRA)

    dataset = member(group, key, path)
    if not isinstance(dataset, h5py.Dataset):
        raise DataError(f"{path}: '{dataset.name}' is a group, but an array is expected.")
    if dataset.is_virtual or dataset.external:
        raise DataError(
            f"{path}: '{dataset.name}' is stored in other files: it is not read. Copy the data into the file."
        )
    if dataset.shape is None or not dataset.size:
        return dataset
    size, chunk = dataset.dtype.itemsize, dataset.chunks
    if chunk is None:
        stored_size, full_size = dataset.id.get_storage_size(), dataset.size * size
    else:
        require_room(path, f"a chunk of '{dataset.name}'", math.prod(chunk) * size)
        full_size = math.prod(-(-rows // part) for rows, part in zip(dataset.shape, chunk, strict=True))
        stored_size = dataset.id.get_num_chunks()
    if stored_size < full_size:
        raise DataError(
            f"{path}: '{dataset.name}' is declared with shape {list(dataset.shape)}, but only "
            f"{stored_size / full_size:.0%} of it was written: the recording was interrupted. Exclude that episode, "
            "or restore the file from a copy."
        )
    return dataset


def children(group: Group, path: Path, prefix: str = "") -> dict[str, Any]:
    """Return every dataset below `group` by its key; raises DataError on links to other files."""
    h5py = require_extra("h5py", EXTRA)

    datasets: dict[str, Any] = {}
    for name in group:
        item = member(group, name, path)
        if isinstance(item, h5py.Group):
            datasets |= children(item, path, f"{prefix}{name}/")
        elif isinstance(item, h5py.Dataset):
            datasets[f"{prefix}{name}"] = item
    return datasets


def numbered(group: Group, pattern: str) -> list[str]:
    """Return the names in `group` that fully match `pattern`, sorted by the number in its first group."""
    matches = ((re.fullmatch(pattern, name), name) for name in group)
    return [name for _, name in sorted((int(match[1]), name) for match, name in matches if match)]


def lengths_of(group: Group, names: Sequence[str], key: str, promise: str, path: Path) -> list[int]:
    """Return the number of rows of `key` in each of the groups `names`; raises DataError if the attribute `promise`
    differs.
    """
    lengths = [int(array(group, f"{name}/{key}", path).shape[0]) for name in names]
    for name, length in zip(names, lengths, strict=True):
        expected = group[name].attrs.get(promise, length)
        if int(expected) != length:
            place = f"{group.name}/{name}".lstrip("/")
            raise DataError(f"{path}: '{place}' declares {expected} steps but contains {length} {key}.")
    return lengths


def described(dataset: Dataset, path: Path, key: str) -> Column | None:
    """Return the column for a dataset with one row per step, None for texts, objects and single values.

    Encoded images (rows of bytes, or of numbers that start like a JPEG or PNG file) are recognised by their first row.
    """
    if dataset.shape is None or not dataset.shape or not dataset.shape[0]:
        return None
    kind = dataset.dtype
    if kind.kind in "biuf" and kind.names is None:
        if kind != np.uint8 or len(dataset.shape) != 2 or not _is_encoded(_row(array_of(dataset, path), 0)):
            return Column(tuple(dataset.shape[1:]), kind.newbyteorder("=").name)
    elif not _holds_bytes(dataset) or not _is_encoded(_row(array_of(dataset, path), 0)):
        return None
    picture = decoded(_row(dataset, 0), path, f"'{key}', frame 0,")
    return Column(picture.shape, ENCODED)


def array_of(dataset: Dataset, path: Path) -> Dataset:
    """Return `dataset` after the checks of `array`; raises DataError as `array` does."""
    return array(dataset.parent, str(dataset.name).rsplit("/", 1)[-1], path)


def _holds_bytes(dataset: Dataset) -> bool:
    h5py = require_extra("h5py", EXTRA)

    return len(dataset.shape) == 1 and (dataset.dtype.kind == "S" or h5py.check_vlen_dtype(dataset.dtype) == np.uint8)


def _row(dataset: Dataset, row: int) -> bytes:
    value = dataset[row]
    return value.tobytes() if isinstance(value, np.ndarray | np.generic) else bytes(value)


def _is_encoded(data: bytes) -> bool:
    return data.startswith((b"\xff\xd8\xff", b"\x89PNG"))


class Hdf5Source(Source):
    """Episodes stored as groups of one HDF5 file, or as one file each.

    places: (file, group in it) of every episode; `file`, if given, is open and contains all of them. final: prefix of
    keys -> prefix of the rows after the last action, "obs/" -> "next_obs/".
    """

    def __init__(
        self,
        path: Path,
        places: Sequence[tuple[Path, str]],
        columns: Mapping[str, Column],
        lengths: Sequence[int],
        file: Group | None = None,
    ):
        self.path = path
        self.places = tuple(places)
        self.columns = columns
        self.lengths = tuple(lengths)
        self.tasks = ("",) * len(self.places)
        self.file = file
        self.final: Mapping[str, str] = {}

    @contextmanager
    def group(self, episode: int) -> Generator[Group]:
        """Open the group of an episode."""
        path, name = self.places[episode]
        if self.file is not None:
            yield member(self.file, name, path) if name else self.file
            return
        with opened(path) as file:
            yield member(file, name, path) if name else file

    def shapes(self, episode: int, keys: Collection[str]) -> Mapping[str, tuple[int, ...]]:
        """Implement `Source.shapes`."""
        shapes: dict[str, tuple[int, ...]] = {}
        path = self.places[episode][0]
        with self.group(episode) as group:
            for key in keys:
                dataset = array(group, key, path)
                rows = dataset.shape[0] + int(self._ending(group, key) is not None)
                column = self.columns[key]
                shapes[key] = (rows, *(column.shape if column.dtype == ENCODED else dataset.shape[1:]))
        return shapes

    def read(self, episode: int, keys: Collection[str]) -> Mapping[str, np.ndarray]:
        """Implement `Source.read`."""
        arrays: dict[str, np.ndarray] = {}
        path, name = self.places[episode]
        with self.group(episode) as group, read_errors(path, f"Exclude {name or 'that episode'}"):
            for key in keys:
                dataset = array(group, key, path)
                size = math.prod((*dataset.shape[:1], *self.columns[key].shape))
                require_room(path, f"'{dataset.name}'", 2 * size * max(1, dataset.dtype.itemsize))
                ending = self._ending(group, key)
                if self.columns[key].dtype == ENCODED:
                    rows = [decoded(_row(dataset, row), path, f"'{key}', frame {row},") for row in range(len(dataset))]
                    if len({row.shape for row in rows}) > 1:
                        raise DataError(f"{path}: '{dataset.name}' contains images of several sizes.")
                    arrays[key] = np.stack(rows)
                    continue
                values = dataset[()]
                arrays[key] = values if ending is None else np.concatenate([values, array(group, ending, path)[-1:]])
        return arrays

    def _ending(self, group: Group, key: str) -> str | None:
        """Return the key of the row after the last action of `key`, None if there is none."""
        for prefix, other in self.final.items():
            if key.startswith(prefix):
                ending = other + key.removeprefix(prefix)
                return ending if self.columns[key].dtype != ENCODED and has(group, ending) else None
        return None


def text_of(value: Any) -> str:
    """Return an attribute's text, "" if it is not a text."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return value if isinstance(value, str) else ""


def object_of(value: Any, path: Path, what: str) -> dict[str, Any]:
    """Return an attribute's JSON object, {} if it is absent; raises DataError if it is not a JSON object."""
    text = text_of(value)
    if not text:
        return {}
    try:
        content = json.loads(text[:LARGEST_TEXT])
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the attribute {what} is not JSON ({in_one_line(error, 80)}).") from error
    return content if isinstance(content, dict) else {}
