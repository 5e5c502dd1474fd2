"""Failure detection while serving: watches the requests of a batch, each the next decision of a session's episode.

Axes: B request of a batch, R of them that are watched.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from robopolicy.core.candidates import rows_of_observation
from robopolicy.core.policy import TensorObservation
from robopolicy.failures.watcher import Watcher
from robopolicy.serving.sessions import Failure, RobotSession


class Detection:
    """Gives every session a row of a watcher, as long as there are rows; used by one thread.

    rows: maximum number of sessions that are watched at once; generator: of the chunks that detectors sample.
    """

    def __init__(self, watcher: Watcher, rows: int, generator: torch.Generator):
        self.watcher, self._generator = watcher, generator
        watcher.start(rows)
        self._free = deque(range(rows))
        self._rows: weakref.WeakKeyDictionary[RobotSession, tuple[int, int]] = weakref.WeakKeyDictionary()

    def watch(self, observation: TensorObservation, sessions: Sequence[RobotSession | None]) -> list[Failure | None]:
        """Read the observations [B, H, ...] that the sessions [B] decide from; None for those without a row."""
        failures: list[Failure | None] = [None] * len(sessions)
        for places in _each_once(sessions):
            rows = [self._row(sessions[place]) for place in places]
            watched_places = [(place, row) for place, row in zip(places, rows, strict=True) if row is not None]
            if not watched_places:
                continue
            part = rows_of_observation(observation, [place for place, _ in watched_places])
            results = self.watcher.watch(part, np.array([row for _, row in watched_places]), self._generator)
            for order, (place, _) in enumerate(watched_places):
                index = {name: float(values[order]) for name, (values, _) in results.items()}
                failures[place] = Failure(index, tuple(name for name, (_, alarm) in results.items() if alarm[order]))
        return failures

    def _row(self, session: RobotSession | None) -> int | None:
        """Return the row of a session, reset if a new episode began; None if all are taken."""
        if session is None:
            return None
        if session in self._rows:
            row, episode = self._rows[session]
        elif self._free:
            row, episode = self._free.popleft(), -1
            weakref.finalize(session, self._free.append, row)
        else:
            return None
        if episode != session.episode:
            self.watcher.reset(np.array([row]))
            self._rows[session] = row, session.episode
        return row


def _each_once(sessions: Sequence[RobotSession | None]) -> Iterable[list[int]]:
    """Yield the places of a batch in groups that contain no session twice, in order."""
    groups: list[list[int]] = []
    counts: dict[int, int] = {}
    for place, session in enumerate(sessions):
        turn = counts[id(session)] = counts.get(id(session), -1) + 1
        if turn == len(groups):
            groups.append([])
        groups[turn].append(place)
    return groups
