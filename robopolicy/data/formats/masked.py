"""Rollouts of equal length with masks in one .npz file, as of ImagineBench (arXiv:2505.10010).

`observations` [N, T, D], `actions` [N, T, A], `rewards` [N, T] or [N, T, 1], and `masks` likewise: 1 for a step, 0 for
padding. `fps` is a number, `task` a text or one per rollout. Every run of steps without padding between them is an
episode, so that nothing is read from the padding and no action chunk crosses it. The observation after a run's last
action is not in the file. Without an array of task ends, a rollout's last step ended its task, as in that benchmark's
own reader. Axes: N rollout, T time, D and A elements.
"""

import zipfile
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from robopolicy.core.errors import DataError
from robopolicy.data.formats.format import Column, DatasetFormat, Source
from robopolicy.data.formats.mapping import TERMINATED
from robopolicy.data.formats.npz import ACTIONS, ENDINGS, ArrayMember, fps_of, opened_members, texts_of

MASKS = ("masks", "mask")
LAST_STEP = "last_step"
"""Key of the column that is made from the masks: whether a step is its rollout's last one."""


class Masked(DatasetFormat):
    """Arrays [N, T, ...] with masks in one .npz file."""

    title = "padded rollouts with masks in an .npz file"

    def recognises(self, path: Path) -> bool:
        """Implement `DatasetFormat.recognises`."""
        if path.suffix != ".npz" or not path.is_file() or not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            return any(f"{name}.npy" in archive.namelist() for name in MASKS)

    @contextmanager
    def open(self, path: Path) -> Generator[Source]:
        """Implement `DatasetFormat.open`."""
        with opened_members(path) as members:
            yield _MaskedSource(path, members)


class _MaskedSource(Source):
    """An opened file. runs: rollout, first step and end of every episode, [E, 3]."""

    def __init__(self, path: Path, members: Mapping[str, ArrayMember]):
        self.path = path
        action = next((members[name] for name in ACTIONS if name in members), None)
        if action is None or len(action.shape) != 3:
            raise DataError(f"{path} has masks but no array 'actions' [N, T, A]; it has {', '.join(members)}.")
        rollouts, length = action.shape[:2]
        mask = _mask(path, members, (rollouts, length))
        self.runs = runs_of(mask)
        if not len(self.runs):
            raise DataError(f"{path}: every step is padding: masks are 1 where a step is valid.")
        self.last_step = np.zeros(mask.shape, dtype=bool)
        self.last_step[np.arange(rollouts), length - 1 - mask[:, ::-1].argmax(axis=1)] = True
        self.lengths = tuple((self.runs[:, 2] - self.runs[:, 1]).tolist())
        self.members = {
            key: each for key, each in members.items() if each.shape[:2] == (rollouts, length) and key not in MASKS
        }
        self.columns = {
            key: Column(each.shape[2:] or (1,), each.dtype.name)
            for key, each in self.members.items()
            if each.dtype.kind in "biuf"
        }
        if not any(key in self.columns for key in ENDINGS):
            self.columns[LAST_STEP] = Column((1,), "bool", targets=(TERMINATED,))
        self.fps = fps_of(members)
        texts = texts_of(members.get("task"), rollouts, path)
        self.tasks = tuple(texts[rollout] for rollout in self.runs[:, 0])
        padded = mask.size - sum(self.lengths)
        self.notes = (f"{padded} of {mask.size} steps are padding and left out.",) if padded else ()
        other = [
            f"{key} {list(each.shape)}"
            for key, each in members.items()
            if key not in (*self.members, *MASKS, "fps", "task")
        ]
        if other:
            self.notes += (f"These arrays do not begin with {[rollouts, length]} and are ignored: {', '.join(other)}.",)

    def shapes(self, episode: int, keys: Collection[str]) -> Mapping[str, tuple[int, ...]]:
        """Implement `Source.shapes`."""
        return {key: (self.lengths[episode], *self.columns[key].shape) for key in keys}

    def read(self, episode: int, keys: Collection[str]) -> Mapping[str, np.ndarray]:
        """Implement `Source.read`."""
        rollout, first, end = self.runs[episode]

        def steps(key: str) -> np.ndarray:
            whole = self.last_step if key == LAST_STEP else self.members[key].rows(rollout, rollout + 1)
            row = whole[rollout] if key == LAST_STEP else whole[0]
            return row[first:end].reshape(end - first, *self.columns[key].shape)

        return {key: steps(key) for key in keys}


def runs_of(mask: np.ndarray) -> np.ndarray:
    """Return the runs of valid steps of masks [N, T] bool: rollout, first step and end (exclusive) of each, [E, 3]."""
    edges = np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    rollout, first = np.nonzero(edges == 1)
    return np.stack([rollout, first, np.nonzero(edges == -1)[1]], axis=1)


def _mask(path: Path, members: Mapping[str, ArrayMember], shape: tuple[int, int]) -> np.ndarray:
    """Return the mask of valid steps, [N, T] bool; raises DataError if masks have another shape or other values."""
    name = next(name for name in MASKS if name in members)
    values = members[name].whole()
    if values.shape not in (shape, (*shape, 1)) or not np.isin(values, (0, 1)).all():
        raise DataError(
            f"{path}: '{name}' is {values.dtype} {list(values.shape)}, but must be 1 (a step) or 0 (padding) for each "
            f"of {list(shape)} steps."
        )
    return values.reshape(shape).astype(bool)
