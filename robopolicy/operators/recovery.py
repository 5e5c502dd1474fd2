"""Recovery before a correction: back to a state from which demonstrations go on (RaC, arXiv:2509.07953).

The paper's operator first returns to a state that demonstrations have at the same or an earlier stage, then corrects;
both are recorded as segments of their own. Axes: B row, R selected rows, A action dimension, L frame, D number.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.spec import Observation
from robopolicy.core.world import Rows
from robopolicy.operators.operator import Operator

USUAL = 0.95
"""Share of demonstrated frames that count as familiar."""


@runtime_checkable
class Recovers(Protocol):
    """A controller that can also go back to where the task can be tried again.

    It may also have `recovered(observation)`, which returns the mask [B] bool of rows that are back.
    """

    def recover(self, observation: Observation) -> Array:
        """Return one control step of going back for every row, [B, A], in world units."""
        ...


class FamiliarStates:
    """States that demonstrations visit, by the distance to the nearest demonstrated frame.

    demonstrations: frames [L, D] of each. Elements are standardised. A state is familiar if its distance is at most
    the 95th percentile of the distances of demonstrated frames to the nearest frame of another demonstration. Raises
    DataError for fewer than two demonstrations.
    """

    def __init__(self, demonstrations: Sequence[Array]):
        if len(demonstrations) < 2:
            raise DataError(
                f"Familiar states need two demonstrations or more, and there are {len(demonstrations)}: set "
                "collect.correct.recover_data to a larger dataset."
            )
        frames = np.concatenate(list(demonstrations)).astype(np.float64)
        spread = frames.std(0)
        self._mean, self._scale = frames.mean(0), np.where(spread > 0, spread, 1.0)
        self._frames = (frames - self._mean) / self._scale
        self._stages = np.concatenate([np.linspace(0, 1, len(each)) for each in demonstrations])
        self._episodes = np.repeat(np.arange(len(demonstrations)), [len(each) for each in demonstrations])
        distances = [self.nearest(each, without=index)[0] for index, each in enumerate(demonstrations)]
        self.bound = float(np.quantile(np.concatenate(distances), USUAL))

    def nearest(self, states: Array, without: int | None = None) -> tuple[Array, Array]:
        """Return the distances [R] of states [R, D] to their nearest frames, and the places of these in their
        demonstrations [R], 0 to 1; without: index of a demonstration that is left out.
        """
        from scipy.spatial.distance import cdist  # a tenth of a second, which only this needs

        scaled = (np.asarray(states, dtype=np.float64) - self._mean) / self._scale
        distances = cdist(scaled, self._frames)
        if without is not None:
            distances[:, self._episodes == without] = np.inf
        place = distances.argmin(1)
        return distances[np.arange(len(place)), place], self._stages[place]

    def contain(self, states: Array, stages: Array) -> Array:
        """Return the mask [R] of states [R, D] that are familiar at or before these stages [R], 0 to 1."""
        distance, stage = self.nearest(states)
        return (distance <= self.bound) & (stage <= stages)


class RecoveringOperator:
    """An operator before whose correction `controller` goes back, for at most `most` control steps of a turn.

    It ends earlier once the controller is back (`recovered`), or the state is one of `familiar`, which demonstrations
    have no later than the one at the begin of the turn. rows: number of robots B; keys: fields of the vectors of
    `familiar`. Raises ConfigError for a controller that cannot go back, or only with `familiar`.
    """

    def __init__(
        self,
        operator: Operator,
        controller: object,
        rows: int,
        most: int,
        familiar: FamiliarStates | None = None,
        keys: Sequence[str] = (),
    ):
        if not isinstance(controller, Recovers):
            raise ConfigError(
                f"{type(controller).__name__} cannot go back: give it recover(observation) and recovered(observation), "
                "or set collect.correct.recover_steps=0."
            )
        self._recovered: Callable[[Observation], Array] | None = getattr(controller, "recovered", None)
        if self._recovered is None and familiar is None:
            raise ConfigError(
                f"{type(controller).__name__} does not say when it is back: give it recovered(observation), or set "
                "collect.correct.recover_data=DATASET to demonstrations."
            )
        self.agent = operator.agent
        self._operator, self._controller = operator, controller
        self._familiar, self._keys = familiar, tuple(keys)
        self._most = most
        self._left = np.zeros(rows, dtype=np.int64)
        self._stages = np.full(rows, np.nan)  # of the demonstrations, where the turn began
        self._recovers = np.zeros(rows, dtype=bool)

    def start(self, seeds: Array, rows: Rows = None) -> None:
        """Implement `Operator.start`."""
        self._operator.start(seeds, rows)

    def begin(self, rows: Array) -> None:
        """Implement `Operator.begin`."""
        self._left[rows], self._stages[rows] = self._most, np.nan
        self._operator.begin(rows)

    def act(self, observation: Observation, rows: Array, last: Array) -> Array:
        """Implement `Operator.act`."""
        back = np.zeros(len(rows), dtype=bool)
        if self._recovered is not None:
            back |= np.asarray(self._recovered(observation), dtype=bool)[rows]
        if self._familiar is not None:
            back |= self._is_familiar(self._familiar, observation, rows)
        self._left[rows[back]] = 0
        recovers = self._recovers[rows] = self._left[rows] > 0
        self._left[rows[recovers]] -= 1
        actions = np.array(last, dtype=np.float64)
        if recovers.any():
            actions[recovers] = np.asarray(self._controller.recover(observation))[rows[recovers]]
        if not recovers.all():
            actions[~recovers] = self._operator.act(observation, rows[~recovers], last[~recovers])
        return actions

    def _is_familiar(self, familiar: FamiliarStates, observation: Observation, rows: Array) -> Array:
        """Return the mask [R] of rows in a state that demonstrations have no later than where the turn began."""
        states = state_vectors(observation, self._keys)[rows]
        new = np.isnan(self._stages[rows])
        if new.any():
            self._stages[rows[new]] = familiar.nearest(states[new])[1]
        return familiar.contain(states, self._stages[rows])

    def recovers(self, rows: Array) -> Array:
        """Return the mask of `rows` [R] in which the last action went back."""
        return self._recovers[rows]

    def finished(self, rows: Array) -> Array:
        """Implement `Operator.finished`."""
        return self._operator.finished(rows) & (self._left[rows] == 0)

    def close(self) -> None:
        """Implement `Operator.close`."""
        self._operator.close()


def state_vectors(observation: Observation, keys: Sequence[str]) -> Array:
    """Return the newest frames of the fields `keys` of an observation [B, H, ...] as vectors [B, D]."""
    parts = [np.asarray(observation[key])[:, -1] for key in keys]
    return np.concatenate([each.reshape(len(each), -1) for each in parts], axis=1)
