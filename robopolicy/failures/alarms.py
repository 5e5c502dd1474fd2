"""Calibrated failure detectors as alarms that call an operator. Axes: B row, R selected rows, n decisions."""

from contextlib import nullcontext

import numpy as np
import torch

from robopolicy.core.arrays import Array
from robopolicy.core.candidates import rows_of_observation
from robopolicy.core.history import newest_window
from robopolicy.core.policy import to_tensors
from robopolicy.core.randomness import EpisodeGenerator, derive_keys
from robopolicy.core.spec import Observation
from robopolicy.failures.float import FloatDetector
from robopolicy.failures.watcher import Watcher
from robopolicy.operators.paths import usual_decisions


class DetectorAlarm:
    """`Alarm` of any of a watcher's detectors, in `rows` rows of a world.

    Detectors read all decisions of an episode, also those of an operator. After a turn of an operator an index counts
    from its value at that time, so that what the operator has solved causes no second alarm. seed: of sampled chunks.
    """

    name = "detector"
    reads_decisions = True

    def __init__(self, watcher: Watcher, rows: int, seed: int = 0, device: torch.device | str = "cpu"):
        self._watcher = watcher
        self._seed, self._device = seed, torch.device(device)
        watcher.start(rows)
        self._episodes, self._count, self._since = (np.zeros(rows, dtype=np.int64) for _ in range(3))
        self._raised, self._fresh = np.zeros(rows, dtype=bool), np.zeros(rows, dtype=bool)
        self._base = {name: np.zeros(rows) for name in watcher.detectors}
        self.index: dict[str, list[list[float]]] = {name: [[] for _ in range(rows)] for name in watcher.detectors}

    def start(self, rows: Array, seeds: Array) -> None:
        """Implement `Alarm.start`."""
        self._watcher.reset(rows)
        self._episodes[rows] = seeds
        self._count[rows] = self._since[rows] = 0
        self._raised[rows] = self._fresh[rows] = False
        for name, base in self._base.items():
            base[rows] = 0.0
            for row in rows:
                self.index[name][row] = []

    def resume(self, rows: Array) -> None:
        """Implement `Alarm.resume`: the next index is where the policy's new turn starts from."""
        self._raised[rows], self._fresh[rows] = False, True
        self._since[rows] = 0

    def decide(self, observation: Observation, rows: Array) -> None:
        """Implement `Alarm.decide`: compare each index with the threshold of its decision."""
        observer = self._watcher.observer
        spec = observer.policy.spec
        tensors = to_tensors(newest_window(observation, spec.observation, spec.history), self._device)
        generator = EpisodeGenerator(self._seed, self._device)
        if samples := observer.samples:
            keys = np.repeat(self._episodes[rows], samples), np.tile(np.arange(samples), len(rows))
            generator.begin(derive_keys(self._seed, np.repeat(self._count[rows], samples), *keys))
        with generator.decision() if samples else nullcontext():
            seen = observer.see(rows_of_observation(tensors, rows.tolist()), generator)
        for name, calibrated in self._watcher.detectors.items():
            index = calibrated.detector.watch(seen, rows)
            base = self._base[name]
            base[rows] = np.where(self._fresh[rows], index, base[rows])
            place = np.minimum(self._since[rows], len(calibrated.threshold) - 1)
            self._raised[rows] |= index - base[rows] > calibrated.threshold[place]
            for row, value in zip(rows, index, strict=True):
                self.index[name][row].append(float(value))
        self._fresh[rows] = False
        self._count[rows] += 1
        self._since[rows] += 1

    def step(self, rewards: Array, policy: Array) -> None:
        """Implement `Alarm.step`: rewards are not read."""

    def raised(self) -> Array:
        """Implement `Alarm.raised`."""
        return self._raised

    def steps_back(self, row: int) -> int | None:
        """Implement `Alarm.steps_back`: back to the decisions before those that raised the first detector's index."""
        name, index = next(iter(self.index.items()))
        if not index[row]:
            return None
        detector = self._watcher.detectors[name].detector
        increase = np.maximum(np.diff(index[row], prepend=0.0), 0.0)
        costs = detector.costs(row) if isinstance(detector, FloatDetector) else increase
        back = len(costs) - 1 - usual_decisions(costs)  # the present decision has not been executed yet
        return max(back, 0) * self._watcher.observer.policy.spec.chunk
