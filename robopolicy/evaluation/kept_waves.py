"""Waves of an evaluation that have been played, kept in its run's folder: one that is broken off loses none of them.

What a wave brings depends on its seeds and on the seed of its noise alone (`play_wave`), so an evaluation that goes on
ends where an unbroken one does, bit for bit. Waves of another version of the noise are played again.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.core.randomness import NOISE_VERSION
from robopolicy.core.storage import read_json_lines, reading, storage_errors, write_atomic
from robopolicy.evaluation.waves import Wave


class KeptWaves:
    """One file of JSON lines: what is judged, then a wave a line.

    of: all that the outcomes depend on, JSON-ready; what was kept of anything else is dropped.
    """

    def __init__(self, path: Path, of: Mapping[str, Any]):
        self.path = path
        of = {**of, "noise": NOISE_VERSION}
        self._known: dict[str, tuple[Wave, float]] = {}
        records = read_json_lines(path)
        if records and records[0] == of:
            with reading(path, "Remove it: the episodes are played anew"):
                self._known = {each["key"]: (_read(each["wave"]), each["seconds"]) for each in records[1:]}
        lines = [json.dumps(of), *(_line(key, *known) for key, known in self._known.items())]
        write_atomic(path, "\n".join(lines) + "\n")

    @property
    def episodes(self) -> int:
        """How many episodes were played before this process."""
        return sum(len(wave.success) for wave, _ in self._known.values())

    def known(self, name: str, seeds: np.ndarray) -> tuple[Wave, float] | None:
        """Return a wave of the evaluation `name` on these seeds [n], and what it took, s; None where there is none."""
        return self._known.get(_key(name, seeds))

    def keep(self, name: str, seeds: np.ndarray, wave: Wave, seconds: float) -> None:
        """Keep a wave of the evaluation `name` on these seeds [n], which took so long, s."""
        with storage_errors(self.path), self.path.open("a") as file:
            file.write(_line(_key(name, seeds), wave, seconds) + "\n")

    def remove(self) -> None:
        """Drop everything: it is in the result."""
        self.path.unlink(missing_ok=True)


def _key(name: str, seeds: np.ndarray) -> str:
    return f"{name}: {' '.join(map(str, seeds.tolist()))}"


def _line(key: str, wave: Wave, seconds: float) -> str:
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in asdict(wave).items()}
    return json.dumps({"key": key, "wave": plain, "seconds": seconds})


def _read(plain: Mapping[str, Any]) -> Wave:
    arrays = {name: np.asarray(value) for name, value in plain.items() if name != "instructions" and value is not None}
    return Wave(**arrays, instructions=tuple(plain["instructions"]))
