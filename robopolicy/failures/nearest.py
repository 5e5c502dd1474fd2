"""Simple detectors: distance to the nearest demonstrated frame, progress along demonstrations, and a clock.

The clock is the yardstick: where failed episodes last longest, it detects them all by their end. Axes: see `detector`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.failures.detector import Rollout, Seen, require_demonstrations


class ClockDetector:
    """The index is the number of decisions so far."""

    reads_chunks = False
    learns_from_rollouts = False

    def fit(self, demonstrations: Sequence[Array], rollouts: Sequence[Rollout], decisions: int) -> None:
        """Implement `FailureDetector.fit`: nothing is learned."""

    def start(self, batch_size: int) -> None:
        """Implement `FailureDetector.start`."""
        self._index = np.zeros(batch_size)

    def reset(self, rows: Array) -> None:
        """Implement `FailureDetector.reset`: rows [R]."""
        self._index[rows] = 0

    def watch(self, seen: Seen, rows: Array) -> Array:
        """Implement `FailureDetector.watch`: rows [R] -> [R]."""
        self._index[rows] += 1
        return self._index[rows]

    def state(self) -> Mapping[str, Any]:
        """Implement `FailureDetector.state`: there is none."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Implement `FailureDetector.restore`."""


class NearestDetector(ClockDetector):
    """The index is the sum of the decisions' distances to the nearest demonstrated vector, per root of D."""

    def fit(self, demonstrations: Sequence[Array], rollouts: Sequence[Rollout], decisions: int) -> None:
        """Implement `FailureDetector.fit`: demonstrations [L, D] each."""
        require_demonstrations(demonstrations)
        self._vectors = np.concatenate(list(demonstrations))
        self._phase = np.concatenate([np.linspace(0, 1, len(each)) for each in demonstrations])

    def watch(self, seen: Seen, rows: Array) -> Array:
        """Implement `FailureDetector.watch`: rows [R] -> [R]."""
        self._index[rows] += self._nearest(seen)[0]
        return self._index[rows]

    def _nearest(self, seen: Seen) -> tuple[Array, Array]:
        """Return the distance to the nearest demonstrated vector and its place in its demonstration, 0 to 1, [R]."""
        squares = ((seen.embedding[:, None].astype(np.float64) - self._vectors) ** 2).mean(-1)
        place = squares.argmin(1)
        return np.sqrt(squares[np.arange(len(place)), place]), self._phase[place]

    def state(self) -> Mapping[str, Any]:
        """Implement `FailureDetector.state`."""
        return {"vectors": self._vectors, "phase": self._phase}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Implement `FailureDetector.restore`."""
        self._vectors, self._phase = np.asarray(state["vectors"]), np.asarray(state["phase"])


class FarthestDetector(NearestDetector):
    """The index is the largest distance to the nearest demonstrated vector so far, per root of D."""

    def watch(self, seen: Seen, rows: Array) -> Array:
        """Implement `FailureDetector.watch`: rows [R] -> [R]."""
        self._index[rows] = np.maximum(self._index[rows], self._nearest(seen)[0])
        return self._index[rows]


class ProgressDetector(NearestDetector):
    """The index is the number of decisions since the episode was at a later place of the demonstrations than before.

    The place is that of the nearest demonstrated vector in its demonstration, so no reward is needed.
    """

    def start(self, batch_size: int) -> None:
        """Implement `FailureDetector.start`."""
        super().start(batch_size)
        self._best = np.full(batch_size, -1.0)

    def reset(self, rows: Array) -> None:
        """Implement `FailureDetector.reset`: rows [R]."""
        super().reset(rows)
        self._best[rows] = -1.0

    def watch(self, seen: Seen, rows: Array) -> Array:
        """Implement `FailureDetector.watch`: rows [R] -> [R]."""
        phase = self._nearest(seen)[1]
        self._index[rows] = np.where(phase > self._best[rows], 0.0, self._index[rows] + 1)
        self._best[rows] = np.maximum(self._best[rows], phase)
        return self._index[rows]
