"""`DatasetFormat`: interface to open recordings in another project's files, and the registry of these formats.

A format recognises its own files and opens them as a `Source`: columns by key, episode by episode, so that a dataset
need not fit into memory. `robopolicy.data.conversion` writes them as a LeRobotDataset v3. Register a custom format as
an entry point of the group `robopolicy.dataset_formats`, or pass its import path: convert.format=package.module:Class.
"""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.registry import Registry
from robopolicy.core.storage import read_errors

FORMATS = Registry(
    "dataset format",
    "robopolicy.dataset_formats",
    {
        "robomimic": "robopolicy.data.formats.robomimic:Robomimic",
        "aloha": "robopolicy.data.formats.aloha:Aloha",
        "minari": "robopolicy.data.formats.minari:Minari",
        "zarr": "robopolicy.data.formats.replay_buffer:ReplayBuffer",
        "lerobot_v2": "robopolicy.data.formats.older_lerobot:OlderLeRobot",
        "npz": "robopolicy.data.formats.npz:Npz",
        "masked": "robopolicy.data.formats.masked:Masked",
    },
)
"""Registry of `DatasetFormat` classes by name; those of other packages are tried first."""


@dataclass(frozen=True)
class Column:
    """One array with a row for every step of an episode.

    shape: of one row; dtype: numpy's name of the type that `Source.read` returns; targets: its names in the
    LeRobotDataset, if the format defines them; () to drop it, None to guess from its key. A slice of a row may have its
    own name: "0:2" in `slices`, which then replaces targets. names: of the elements of a vector; upside_down: the first
    row of the images is the lowest.
    """

    shape: tuple[int, ...]
    dtype: str
    targets: tuple[str, ...] | None = None
    slices: Mapping[str, str] | None = None
    names: tuple[str, ...] = ()
    upside_down: bool = False


class Source(ABC):
    """An opened dataset of another format. E episodes, L actions per episode.

    path: of the dataset; columns: by key; lengths: L of every episode [E]; tasks: instructions [E], "" if the files
    have none; fps: steps per second, None if the files do not contain it; usual_fps: typical value of this format, for
    advice only; seeds: of the episodes [E], None if unknown; notes: messages for the user.
    """

    path: Path
    columns: Mapping[str, Column]
    lengths: tuple[int, ...]
    tasks: tuple[str, ...]
    fps: float | None = None
    usual_fps: float = 10.0
    seeds: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()

    @abstractmethod
    def shapes(self, episode: int, keys: Collection[str]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes [rows, *shape] that the files declare for these columns, without reading the arrays.

        An observation may have L + 1 rows: the last is the observation after the last action. Raises DataError.
        """

    @abstractmethod
    def read(self, episode: int, keys: Collection[str]) -> Mapping[str, np.ndarray]:
        """Return these columns of one episode, each [rows, *shape]. Raises DataError if they are damaged."""


class DatasetFormat(ABC):
    """A file format of another project; a subclass overrides `title`, `recognises` and `open`.

    title: name of the format in messages.
    """

    title = ""

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Whether `path`, a file or a folder, is of this format.

        Raises DataError if it is, but damaged; ConfigError if a package is missing that recognising it needs.
        """

    @abstractmethod
    def open(self, path: Path) -> AbstractContextManager[Source]:
        """Open `path`. Raises DataError if it is damaged or violates the format."""


def format_of(path: Path, name: str = "") -> DatasetFormat | None:
    """Return the format of `path`, or the format `name` if given; None if no format recognises it.

    Raises DataError and ConfigError as `DatasetFormat.recognises`.
    """
    if name:
        return FORMATS.load(name)()
    formats = (FORMATS.load(each)() for each in reversed(FORMATS.names()))
    with read_errors(path):
        return next((each for each in formats if each.recognises(path)), None)


def what_it_is(path: Path) -> str:
    """Return a sentence on the format of an existing `path` that is not a LeRobotDataset v3, with the command that
    converts it; "" if no format recognises it. Raises DataError if it is damaged.
    """
    try:
        dataset_format = format_of(path)
    except ConfigError as error:  # a package is missing
        return f"{path}: {error} Then convert the dataset: {command(path)}"
    if dataset_format is None:
        return ""
    prefix = f"{path} is a dataset in another format, {dataset_format.title}"
    try:
        with read_errors(path), dataset_format.open(path) as source:
            rate = "" if source.fps else " (convert.fps: the rate at which it was recorded)"
            return f"{prefix}. Convert it{rate}: {command(path, source)}"
    except DataError as error:
        raise DataError(f"{prefix}, and it cannot be converted as it is: {error}") from error


def command(path: Path, source: Source | None = None) -> str:
    """Return the command that converts `path` to a new folder next to it."""
    stem = path.name.removesuffix(".zip").removesuffix(path.suffix if path.suffix != ".zip" else "")
    name = stem.rsplit(".", 1)[0] if stem.endswith((".zarr", ".hdf5", ".h5", ".npz")) else stem
    target = path.with_name(f"{name}_v3")
    rate = "" if source is None or source.fps else f" convert.fps={source.usual_fps:g}"
    return f"robopolicy convert {shlex.quote(str(path))} {shlex.quote(str(target))}{rate}"
