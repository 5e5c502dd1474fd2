"""Interface of failure detectors (`FailureDetector`), their registry, and detectors with thresholds (`Calibrated`).

A detector reads every decision of an episode, never its outcome, and returns an index that is higher the more the
episode looks like a failure. A threshold turns it into an alarm. A custom detector is named by import path or by the
entry point robopolicy.failure_detectors. Axes: B row of a batch, R rows that decide now, D embedding, S sampled chunk,
K numbers of a chunk, n decisions of an episode, L vectors of a demonstration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import CheckpointError, DataError
from robopolicy.core.tensors import load_tree, save_tree, to_arrays, to_tensors
from robopolicy.failures import DETECTORS

FILE = "detector"
"""Name of the files of a saved detector."""


@dataclass(frozen=True)
class Seen:
    """Decisions of R rows: embedding [R, D] of what the policy observes, float32, without its noise, and chunks
    [R, S, K], action chunks sampled for the same observation, in units of the demonstrations' standard deviation.
    """

    embedding: Array
    chunks: Array


@dataclass(frozen=True)
class Rollout:
    """An episode of the policy: embedding [n, D] and chunks [n, S, K] of its decisions; success; length in control
    steps; fault: planted fault, "" for none, which begins after `begin` control steps.
    """

    embedding: Array
    chunks: Array
    success: bool
    length: int
    fault: str = ""
    begin: int = 0


@runtime_checkable
class FailureDetector(Protocol):
    """A detector. Rows are independent: an index depends on the decisions of the row's own episode alone.

    reads_chunks: whether it reads `Seen.chunks`, for which the policy is called once more; learns_from_rollouts:
    whether `fit` reads rollouts, which then calibrate no threshold.
    """

    reads_chunks: bool
    learns_from_rollouts: bool

    def fit(self, demonstrations: Sequence[Array], rollouts: Sequence[Rollout], decisions: int) -> None:
        """Learn from demonstrations [L, D] each and, if needed, the policy's own rollouts; decisions: most of an
        episode. Raises DataError if they do not suffice.
        """
        ...

    def start(self, batch_size: int) -> None:
        """Allocate the memory of `batch_size` rows and reset them."""
        ...

    def reset(self, rows: Array) -> None:
        """Forget the episodes of the rows [R]."""
        ...

    def watch(self, seen: Seen, rows: Array) -> Array:
        """Read the decisions of the rows [R], once each, and return their indices [R] float64."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return the fitted state for `restore`: a mapping of arrays and JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state`."""
        ...


def require_demonstrations(demonstrations: Sequence[Array]) -> None:
    """Raise DataError without demonstrations."""
    if not demonstrations:
        raise DataError("Failure detectors compare with demonstrations, and there are none.")


def indices_of(detector: FailureDetector, rollouts: Sequence[Rollout], batch_size: int = 64) -> list[Array]:
    """Return the index after every decision of each rollout, [n] float64 each, as `watch` returns it while acting."""
    all_indices: list[Array] = []
    for first in range(0, len(rollouts), batch_size):
        batch = rollouts[first : first + batch_size]
        detector.start(len(batch))
        lengths = np.array([len(each.embedding) for each in batch])
        indices = [np.zeros(length) for length in lengths]
        for step in range(lengths.max()):
            rows = np.flatnonzero(step < lengths)
            embedding = np.stack([batch[row].embedding[step] for row in rows])
            seen = Seen(embedding, np.stack([batch[row].chunks[step] for row in rows]))
            for row, value in zip(rows, detector.watch(seen, rows), strict=True):
                indices[row][step] = value
        all_indices += indices
    return all_indices


@dataclass
class Calibrated:
    """A fitted detector with thresholds [N], one per decision: it alarms once the index exceeds them.

    name: registered name or import path; fitted_for: description of checkpoint, engine and cameras, JSON-ready.
    """

    name: str
    detector: FailureDetector
    threshold: Array
    fitted_for: Mapping[str, Any]

    def start(self, batch_size: int) -> None:
        """Begin to watch `batch_size` rows."""
        self.detector.start(batch_size)
        self._count, self._alarmed = np.zeros(batch_size, dtype=np.int64), np.zeros(batch_size, dtype=bool)

    def reset(self, rows: Array) -> None:
        """Begin new episodes in the rows [R]."""
        self.detector.reset(rows)
        self._count[rows], self._alarmed[rows] = 0, False

    def watch(self, seen: Seen, rows: Array) -> tuple[Array, Array]:
        """Read the decisions of the rows [R]; return their indices [R], and whether they have alarmed so far, [R]."""
        index = self.detector.watch(seen, rows)
        place = np.minimum(self._count[rows], len(self.threshold) - 1)
        self._alarmed[rows] |= index > self.threshold[place]
        self._count[rows] += 1
        return index, self._alarmed[rows]

    def save(self, folder: Path) -> None:
        """Write JSON and safetensors into the folder."""
        tree = {
            "name": self.name,
            "threshold": self.threshold,
            "fitted_for": dict(self.fitted_for),
            "state": dict(self.detector.state()),
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_tree(folder, FILE, to_tensors(tree))


def load_detector(folder: Path, fitted_for: Mapping[str, Any] | None = None) -> Calibrated:
    """Load a detector that `Calibrated.save` wrote.

    fitted_for: the checkpoint, engine and cameras that it is to watch. Raises CheckpointError for damaged files and
    untrusted detectors, and when the detector was calibrated for others.
    """
    tree = to_arrays(load_tree(folder, FILE))
    try:
        name, threshold, saved_for, state = (tree[key] for key in ("name", "threshold", "fitted_for", "state"))
    except KeyError as error:
        raise CheckpointError(f"{folder} contains no failure detector: it lacks {error}.") from error
    if fitted_for is not None:
        changed_keys = [key for key in {**saved_for, **fitted_for} if saved_for.get(key) != fitted_for.get(key)]
        if changed_keys:
            raise CheckpointError(
                f"The failure detector in {folder} was calibrated for another {changed_keys[0].replace('_', ' ')}: "
                f"{saved_for.get(changed_keys[0])}, not {fitted_for.get(changed_keys[0])}. Calibrate it again: "
                "robopolicy detect CHECKPOINT with the settings that act."
            )
    detector = DETECTORS.load_saved(name, folder)()
    detector.restore(state)
    return Calibrated(name, detector, np.asarray(threshold, dtype=np.float64), saved_for)
