"""Standing still and going back: actions of robots without a policy or an operator. Axes: B row, A action dimension."""

from collections.abc import Sequence

import numpy as np

from robopolicy.client.element_kinds import POSITIONS, Kind, is_gripper, keeps_value, kinds_of
from robopolicy.core.action_bounds import bounds_of
from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import Field

SHARE = 0.2
"""Share of an episode's costs that a robot keeps when it goes back (FLOAT, arXiv:2510.02298)."""


def usual_decisions(costs: Sequence[float] | Array, share: float = SHARE) -> int:
    """Return the number of first decisions to which a robot goes back: the most whose costs [n] sum to less than
    `share` of the total.

    costs: of every decision so far, at least 0, as FLOAT's transport gives them.
    """
    sums = np.cumsum(costs)
    return int((sums < share * sums[-1]).sum()) if len(sums) else 0


class Paths:
    """What robots have executed, and the actions that hold them still or take them back along it.

    Elements that are positions or grippers keep their value while a robot holds still, all others are zero. On the way
    back, grippers repeat their action, positions take the one before, and all others are mirrored in the middle of
    their range. rewinds: whether robots go back; raises ConfigError if they do and a mirrored element has no range.
    """

    def __init__(self, action: Field, rows: int, rewinds: bool = False):
        low, high = (bound.reshape(action.shape) for bound in bounds_of(action))
        names = action.names or ("",) * action.size
        kinds = kinds_of(action.names, action.unit) if action.names else [Kind.UNKNOWN] * action.size
        self._grippers = np.array([is_gripper(name) or "gripper" in name for name in names])
        self._positions = np.array([kind is Kind.POSITION for kind in kinds]) & ~self._grippers
        with np.errstate(invalid="ignore"):  # of bounds that are infinite
            self._middle = (low + high) / 2
        if rewinds and not np.isfinite(self._middle[~self._grippers & ~self._positions]).all():
            raise ConfigError(
                "Undoing actions mirrors them in the middle of their range, but these actions are unbounded: set "
                "collect.correct.rewind=0."
            )
        self._keeps = np.array(keeps_value("zero", POSITIONS, action.names, action.size, action.unit))
        self._rest = np.clip(np.zeros(action.shape), low, high)
        self._done: list[list[Array]] = [[] for _ in range(rows)]
        self._left = np.zeros(rows, dtype=np.int64)

    def start(self, rows: Array) -> None:
        """Forget the paths of `rows` [R]."""
        for row in rows:
            self._done[row] = []
        self._left[rows] = 0

    def add(self, actions: Array, rows: Array) -> None:
        """Append the executed actions [R, A] of `rows` [R]."""
        for row, action in zip(rows, actions, strict=True):
            self._done[row].append(action)

    def length(self, row: int) -> int:
        """Return the number of a row's control steps that can be undone."""
        return len(self._done[row])

    def last(self, row: int) -> Array:
        """Return a row's last action [A], at rest before the first."""
        return self._done[row][-1] if self._done[row] else self._rest

    def still(self, row: int) -> Array:
        """Return the action [A] that holds a row still."""
        return np.where(self._keeps, self.last(row), self._rest)

    def rewind(self, row: int, steps: int) -> None:
        """Plan to undo the last `steps` control steps of a row, at most all."""
        self._left[row] = min(steps, len(self._done[row]))

    def is_back(self, row: int) -> bool:
        """Whether nothing is left to be undone."""
        return bool(self._left[row] == 0)

    def undo(self, row: int) -> Array:
        """Return the action [A] that undoes a row's last control step that is left, which is then forgotten."""
        self._left[row] -= 1
        done = self._done[row]
        action = done.pop()
        before = done[-1] if done else action
        mirrored = np.where(self._grippers, action, 2 * self._middle - action)
        return np.where(self._positions, before, mirrored)
