"""A person with keyboard, gamepad or touch screen as operator: axes from -1 to 1 that move the elements of the action.

An axis moves an element that is a position or a gripper with a speed, from where it is; any other element (velocity,
force, difference) takes the axis as share of its range. Axes: A action dimension.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from robopolicy.client.element_kinds import Kind, is_gripper, kinds_of
from robopolicy.client.executed import ActingAgent
from robopolicy.core.action_bounds import bounds_of
from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import Field, Observation
from robopolicy.core.world import Rows
from robopolicy.operators.operator import Site

FRESH = 0.5
"""Seconds after which axes that were not sent again count as released: a lost connection must not move a robot."""


class AxisMapping:
    """Actions from axes, for actions with finite bounds.

    speed: share of the whole range that a position covers in a second; gripper_speed: the same for grippers. Raises
    ConfigError when a bound is infinite.
    """

    def __init__(self, action: Field, fps: float, speed: float = 0.25, gripper_speed: float = 2.0):
        low, high = (bound.reshape(action.shape) for bound in bounds_of(action))
        if not np.isfinite([low, high]).all():
            raise ConfigError(
                "Axes move actions within their range, but these actions are unbounded: set the range of every element "
                "in the policy's description, or use a LeRobot teleoperator."
            )
        kinds = kinds_of(action.names, action.unit) if action.names else [Kind.UNKNOWN] * action.size
        grippers = np.array([is_gripper(name) for name in action.names or ("",) * action.size])
        self._low, self._high = low, high
        self._moves = np.array([kind is Kind.POSITION for kind in kinds]) | grippers
        self._step = (high - low) / fps * np.where(grippers, gripper_speed, speed)
        self._rest = np.clip(np.zeros(action.shape), low, high)

    def action(self, axes: Array, last: Array) -> Array:
        """Return the action [A] for axes [A] from -1 to 1 after the `last` action [A]."""
        axes = np.clip(axes, -1.0, 1.0)
        share = self._rest + np.where(axes > 0, self._high - self._rest, self._rest - self._low) * axes
        return np.where(self._moves, np.clip(last + self._step * axes, self._low, self._high), share)


class AxesOperator:
    """A person who sends axes (`set_axes`) and says when to hand back (`finish`); operates one robot at a time."""

    agent = ActingAgent.HUMAN

    def __init__(self, site: Site, speed: float = 0.25, clock: Callable[[], float] = time.monotonic):
        self.mapping = AxisMapping(site.action, site.fps, speed)
        self._clock = clock
        self._axes, self._sent = np.zeros(site.action.size), -np.inf
        self._finished = False

    def set_axes(self, axes: Sequence[float]) -> None:
        """Take new axes [A]; missing ones are 0. They count for `FRESH` seconds."""
        values = np.zeros(len(self._axes))
        given = np.nan_to_num(np.asarray(axes, dtype=np.float64).reshape(-1)[: len(values)])
        values[: len(given)] = given
        self._axes, self._sent = values, self._clock()

    def finish(self) -> None:
        """Hand the robot back at the next control step."""
        self._finished = True

    def start(self, seeds: Array, rows: Rows = None) -> None:
        """Implement `Operator.start`."""

    def begin(self, rows: Array) -> None:
        """Implement `Operator.begin`."""
        self._finished = False

    def act(self, observation: Observation, rows: Array, last: Array) -> Array:
        """Implement `Operator.act`; without recent input the robot holds still, which nobody has to imitate."""
        if self._clock() - self._sent > FRESH or not self._axes.any():
            return np.full(last.shape, np.nan)
        return np.stack([self.mapping.action(self._axes, each) for each in last])

    def finished(self, rows: Array) -> Array:
        """Implement `Operator.finished`."""
        return np.full(len(rows), self._finished)

    def close(self) -> None:
        """Implement `Operator.close`."""
