"""Episodes concatenated in the arrays of one .npz file, with the names of DPPO, OGBench and D4RL, or LeRobot's.

Every array has a row for each step: `actions` (or `action`) [N, A], `states`, `observations`, `images` [N, H, W, 3] or
[N, 3, H, W], `rewards`, `success`, `terminals`. The ends of episodes are given by one of `episode_ends` [E] (cumulative
steps), `episode_lengths` or `traj_lengths` [E], `episode_index` [N], or `terminals` and `timeouts` [N]. `fps` is a
number, `task` a text (or one text per episode). Arrays are read in slices, never completely.
"""

import zipfile
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.core.errors import DataError, in_one_line
from robopolicy.data.formats.format import Column, DatasetFormat, Source
from robopolicy.data.lerobot_checks import require_room

ACTIONS = ("action", "actions")
ENDS = ("episode_ends",)
LENGTHS = ("episode_lengths", "traj_lengths", "traj_length", "lengths")
ENDINGS = (*("terminals", "timeouts", "dones", "terminations", "truncations"), "truncateds", "terminateds")
_AT_ONCE = 2**20


class Npz(DatasetFormat):
    """Arrays in one .npz file."""

    title = "arrays in an .npz file"

    def recognises(self, path: Path) -> bool:
        """Implement `DatasetFormat.recognises`."""
        if path.suffix == ".npz" and path.is_file() and not zipfile.is_zipfile(path):
            raise DataError(f"{path} is a damaged or truncated .npz file: copy it again.")
        if not path.is_file() or not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".npy") for name in archive.namelist())

    @contextmanager
    def open(self, path: Path) -> Generator[Source]:
        """Implement `DatasetFormat.open`."""
        with opened_members(path) as members:
            yield _NpzSource(path, members)


class ArrayMember:
    """One array of the file, whose rows are read in order."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, name: str):
        self.path = path
        self.archive = archive
        self.name = name
        self.file: Any = None
        self.at = 0
        with archive.open(name) as file:
            version = np.lib.format.read_magic(file)
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            shape, fortran, self.dtype = read_header(file)
            self.head = file.tell()
        self.shape: tuple[int, ...] = shape
        key = name.removesuffix(".npy")
        if self.dtype.hasobject:
            raise DataError(
                f"{path}: '{key}' contains Python objects, which are never read, because they can run any code."
            )
        if fortran and len(shape) > 1:
            raise DataError(f"{path}: '{key}' is stored in Fortran order: save np.ascontiguousarray of it.")
        self.row = int(np.prod(shape[1:], dtype=object)) * self.dtype.itemsize
        full_size = self.head + self.row * (shape[0] if shape else 1)
        if full_size != archive.getinfo(name).file_size:
            raise DataError(
                f"{path}: '{key}' declares {list(shape)} {self.dtype} but contains another number of bytes."
            )

    def rows(self, first: int, last: int) -> np.ndarray:
        """Return rows [last - first, *shape]."""
        require_room(self.path, f"'{self.name.removesuffix('.npy')}' of an episode", 2 * self.row * (last - first))
        start = self.head + self.row * first
        if self.file is None or self.at > start:
            self.close()
            self.file, self.at = self.archive.open(self.name), 0
        while self.at < start:
            self.at += len(self._taken(min(_AT_ONCE, start - self.at)))
        data = self._taken(self.row * (last - first))
        self.at += len(data)
        return np.frombuffer(data, self.dtype).reshape(last - first, *self.shape[1:])

    def whole(self) -> np.ndarray:
        """Return the whole array, of a row of numbers or a single one."""
        return self.rows(0, self.shape[0]) if self.shape else self.rows(0, 1).reshape(())

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def _taken(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) != count:
            raise DataError(f"{self.path}: '{self.name.removesuffix('.npy')}' ends early: copy the file again.")
        return data


@contextmanager
def opened_members(path: Path) -> Generator[dict[str, ArrayMember]]:
    """Open the arrays of an .npz file, by name."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".npy")]
        members = {name.removesuffix(".npy"): ArrayMember(path, archive, name) for name in names}
        try:
            yield members
        finally:
            for each in members.values():
                each.close()


class _NpzSource(Source):
    """An opened .npz file."""

    def __init__(self, path: Path, members: Mapping[str, ArrayMember]):
        self.path = path
        action = next((members[name] for name in ACTIONS if name in members), None)
        steps = action.shape[0] if action is not None and action.shape else 0
        if not steps:
            raise DataError(f"{path} has no array 'actions' [N, A]; it has {', '.join(members)}.")
        self.ends = _ends(path, members, steps)
        self.lengths = tuple(np.diff(self.ends, prepend=0).tolist())
        self.members = {key: each for key, each in members.items() if each.shape and each.shape[0] == steps}
        bookkeeping = (*ENDS, *LENGTHS, "episode_index")
        self.columns = {
            key: Column(
                tuple(each.shape[1:]), each.dtype.name, targets=() if key in bookkeeping or key == "timeouts" else None
            )
            for key, each in self.members.items()
            if each.dtype.kind in "biuf" and key not in bookkeeping
        }
        self.fps = fps_of(members)
        self.tasks = texts_of(members.get("task"), len(self.lengths), path)
        other = [
            f"{key} {list(each.shape)}"
            for key, each in members.items()
            if key not in (*self.members, *bookkeeping, "fps", "task") and each.shape
        ]
        if other:
            self.notes = (
                f"These arrays do not have one row for each of {steps} steps and are ignored: {', '.join(other)}.",
            )

    def shapes(self, episode: int, keys: Collection[str]) -> Mapping[str, tuple[int, ...]]:
        """Implement `Source.shapes`."""
        return {key: (self.lengths[episode], *self.members[key].shape[1:]) for key in keys}

    def read(self, episode: int, keys: Collection[str]) -> Mapping[str, np.ndarray]:
        """Implement `Source.read`."""
        last = int(self.ends[episode])
        return {key: self.members[key].rows(last - self.lengths[episode], last) for key in keys}


def _ends(path: Path, members: Mapping[str, ArrayMember], steps: int) -> np.ndarray:
    """Return the step after which each episode ends, [E]; raises DataError if no array defines it."""

    def numbers(name: str) -> np.ndarray:
        each = members[name]
        if len(each.shape) > 2 or each.dtype.kind not in "biuf" or each.row > 8:
            raise DataError(f"{path}: '{name}' is {each.dtype} {list(each.shape)}, not one number per episode or step.")
        return each.whole().reshape(-1)

    ends: np.ndarray | None = None
    for name in (*ENDS, *LENGTHS, "episode_index"):
        if name in members:
            ends = numbers(name).astype(np.int64)
            ends = ends if name in ENDS else ends.cumsum() if name in LENGTHS else _changes(ends)
            break
    else:
        marks = [
            numbers(name).astype(bool) for name in ENDINGS if name in members and members[name].shape[:1] == (steps,)
        ]
        if marks:
            ending = np.logical_or.reduce(marks)
            ending[-1] = True
            ends = np.flatnonzero(ending) + 1
    if ends is None:
        raise DataError(
            f"{path} does not define where its episodes end: add an array 'episode_ends' [E], the number of steps up "
            f"to the end of each episode. The file contains {', '.join(members)}."
        )
    if not len(ends) or ends[-1] != steps or (np.diff(ends, prepend=0) < 1).any():
        raise DataError(f"{path}: its episodes end after {ends[-3:].tolist()} of {steps} steps, which is invalid.")
    return ends


def _changes(index: np.ndarray) -> np.ndarray:
    return np.append(np.flatnonzero(np.diff(index)) + 1, len(index))


def fps_of(members: Mapping[str, ArrayMember]) -> float | None:
    """Return the control frequency in Hz in the array `fps`, None without one."""
    member = members.get("fps")
    return None if member is None else float(member.whole().reshape(-1)[0])


def texts_of(member: ArrayMember | None, count: int, path: Path) -> tuple[str, ...]:
    """Return the instructions [count] in an array of one text or of one for each; raises DataError for other arrays."""
    if member is None:
        return ("",) * count
    if member.dtype.kind not in "US":
        raise DataError(f"{path}: 'task' is {member.dtype}, not a text.")
    try:
        texts = [
            str(text.decode() if isinstance(text, bytes) else text) for text in member.whole().reshape(-1).tolist()
        ]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: 'task' is not a text ({in_one_line(error, 60)}).") from error
    if len(texts) not in (1, count):
        raise DataError(f"{path}: 'task' has {len(texts)} texts, but there are {count} episodes.")
    return tuple(texts * count if len(texts) == 1 else texts)
