"""Recordings of another library, converted as they lie: a text file with a line for every step."""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from robopolicy.data.formats.format import Column, DatasetFormat, Source


class CsvSource(Source):
    """Columns episode, x, y and push, under a line that says the rate."""

    def __init__(self, path: Path):
        self.path = path
        rate, _, *lines = path.read_text().splitlines()
        self.rows = np.array([[float(value) for value in line.split(",")] for line in lines])
        self.fps = float(rate.split()[-1])
        counts = np.unique(self.rows[:, 0], return_counts=True)[1]
        self.lengths = tuple(counts.tolist())
        self.tasks = ("",) * len(counts)
        self.columns = {
            "place": Column((2,), "float64", targets=("observation.state",)),
            "push": Column((1,), "float64", targets=("action",)),
        }

    def shapes(self, episode: int, keys: Collection[str]) -> Mapping[str, tuple[int, ...]]:
        """All rows are there."""
        return {key: (self.lengths[episode], *self.columns[key].shape) for key in keys}

    def read(self, episode: int, keys: Collection[str]) -> Mapping[str, np.ndarray]:
        """Cut them out."""
        rows = self.rows[self.rows[:, 0] == episode]
        return {key: rows[:, 1:3] if key == "place" else rows[:, 3:] for key in keys}


class CsvLog(DatasetFormat):
    """Files that end in .csv and begin with a rate."""

    title = "outside robotics' text"

    def recognises(self, path: Path) -> bool:
        """By its first line."""
        return path.suffix == ".csv" and path.read_text().startswith("# rate")

    @contextmanager
    def open(self, path: Path) -> Generator[Source]:
        """Read it."""
        yield CsvSource(path)
