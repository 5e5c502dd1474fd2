"""Save recorded episodes to disk as they end, so that an interrupted recording loses none of them.

Axes: T control step, D decision.
"""

import io
import time
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import DataError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.storage import remove_leftovers, write_atomic

SECONDS = 10.0
"""Seconds that finished episodes may wait in memory: a killed process loses at most this much, an interrupted one
nothing.
"""


@dataclass
class Recording:
    """One episode while it is being recorded; lists of arrays along time. position: index of its seed in the
    recording.
    """

    position: int
    task: str
    observation: dict[str, list[Array]]
    actions: list[Array] = field(default_factory=list[Array])
    rewards: dict[str, list[Array]] = field(default_factory=dict[str, list[Array]])
    success: list[bool] = field(default_factory=list[bool])
    terminated: bool = False
    begins: list[int] = field(default_factory=list[int])
    chains: list[tuple[Array, Array]] = field(default_factory=list[tuple[Array, Array]])
    turns: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    labels: list[Array] = field(default_factory=list[Array])
    label_steps: list[int] = field(default_factory=list[int])


class RecordingCache:
    """Finished episodes of one recording, in a separate folder.

    known: position -> episode, including those of earlier processes; seconds: see SECONDS. Raises DataError if a file
    cannot be read.
    """

    def __init__(self, folder: Path, seconds: float = SECONDS):
        self.folder, self.seconds = folder, seconds
        self.known: dict[int, Recording] = {}
        if folder.is_dir():
            remove_leftovers(folder)
            for file in sorted(folder.glob("*.npz")):
                self.known |= _read(file)
        self._waiting: list[Recording] = []
        self._written = time.monotonic()

    def left(self, count: int) -> list[int]:
        """Return the indices of the `count` episodes that are still to be recorded, in order."""
        return [position for position in range(count) if position not in self.known]

    def add(self, ended: Iterable[Recording]) -> None:
        """Add finished episodes; they are written at intervals."""
        for item in ended:
            self.known[item.position] = item
            self._waiting.append(item)
        if time.monotonic() - self._written >= self.seconds:
            self.write()

    def write(self) -> None:
        """Write pending episodes, if any. Raises StorageError if the disk is full."""
        self._written = time.monotonic()
        if not self._waiting:
            return
        buffer = io.BytesIO()
        np.savez(buffer, **to_arrays(self._waiting))  # pyright: ignore[reportArgumentType]
        write_atomic(self.folder / f"{len(self.known):08}.npz", buffer.getvalue())
        self._waiting = []


def to_arrays(recordings: Iterable[Recording]) -> dict[str, Array]:
    """Return recordings as arrays, "<position>/<part>" -> array, for `from_arrays`."""
    return {f"{item.position}/{name}": values for item in recordings for name, values in _arrays(item).items()}


def from_arrays(arrays: Iterable[tuple[str, Array]]) -> dict[int, Recording]:
    """Return the recordings in `arrays`, as (name, array), by position. Raises KeyError and ValueError if some are
    missing.
    """
    by_position: dict[int, dict[str, Array]] = {}
    for name, values in arrays:
        position, _, part = name.partition("/")
        by_position.setdefault(int(position), {})[part] = values
    return {position: _recording(position, parts) for position, parts in by_position.items()}


def _arrays(item: Recording) -> dict[str, Array]:
    """Return a recording as arrays by name, without empty ones."""
    arrays: dict[str, Array] = {
        "task": np.array(item.task),
        "terminated": np.array(item.terminated),
        "success": np.array(item.success, dtype=bool),
        "actions": np.concatenate(item.actions),
        **{f"observation/{key}": np.concatenate(frames) for key, frames in item.observation.items()},
        **{f"rewards/{name}": np.concatenate(values) for name, values in item.rewards.items()},
    }
    lists: dict[str, list[Any]] = {
        "begins": item.begins,
        "chain": [chain for chain, _ in item.chains],  # [D, K+1, P, A]
        "mask": [mask for _, mask in item.chains],  # [D, K]
        "turns": item.turns,
        "labels": item.labels,
        "label_steps": item.label_steps,
    }
    return arrays | {name: np.array(values) for name, values in lists.items() if values}


def _read(file: Path) -> dict[int, Recording]:
    """Return the recordings in a file by position. Raises DataError if the file is invalid."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return from_arrays((name, arrays[name]) for name in arrays.files)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{file} is corrupt ({error}): run.overwrite=true records everything again.") from error


def _recording(position: int, parts: Mapping[str, Array]) -> Recording:
    def under(prefix: str) -> dict[str, list[Array]]:
        return {name.removeprefix(prefix): [values] for name, values in parts.items() if name.startswith(prefix)}

    def listed(name: str) -> list[Any]:
        return list(parts.get(name, ()))

    return Recording(
        position=position,
        task=str(parts["task"]),
        observation=under("observation/"),
        actions=[parts["actions"]],
        rewards=under("rewards/"),
        success=[bool(value) for value in parts["success"]],
        terminated=bool(parts["terminated"]),
        begins=[int(value) for value in listed("begins")],
        chains=list(zip(listed("chain"), listed("mask"), strict=True)),
        turns=[(int(actor), int(segment)) for actor, segment in listed("turns")],
        labels=listed("labels"),
        label_steps=[int(value) for value in listed("label_steps")],
    )


keep_former_names(__name__, {"Kept": "RecordingCache"})
