"""Experts that work towards other goals than the true one, or too slowly: at play, or with a constant fault.

In recordings of an expert, however noisy, every deliberate push heads for the goal, so that a world model learns that
things go to goals by themselves, and flatters policies that aim beside them. Play moves the same things deliberately to
other places; after Lynch et al. 2020, arXiv:1903.01973, who let people play. Experts with a constant fault are policies
to rank: unlike noise, being wrong by some centimetres tells world models apart that are wrong by as much.
"""

from dataclasses import dataclass

import numpy as np

from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import derive_keys, uniforms
from robopolicy.core.spec import ENVIRONMENT_STATE, Field, Observation, WorldSpec
from robopolicy.core.world import Controller, Rows, begin_episodes

PLAY = "play"
"""Name of this behaviour among the noise levels of an expert."""

NEAR, FAR = 0.02, 0.25
"""Smallest and largest distance of a random goal from the true one, m."""
SLOW = 0.2
"""Smallest fraction of the expert's speed; the largest is 1."""
SHORT, LONG = 10, 40
"""Fewest and most control steps for which a random goal stays."""

PLANE = "xy"
"""Axes along which goals are moved."""


def goal_elements(field: Field) -> list[list[int]]:
    """Return for each axis of PLANE the indices of the elements of a vector that move with a goal: `goal_x`, and
    `NAME_to_goal_x`, its place as seen from elsewhere. They are empty where the vector names none.
    """
    return [
        [
            index
            for index, name in enumerate(field.names)
            if name in (f"goal_{axis}",) or name.endswith(f"_to_goal_{axis}")
        ]
        for axis in PLANE
    ]


def can_play(spec: WorldSpec) -> bool:
    """Return whether the environment state of a world names a goal that `PlayingController` can move."""
    field = spec.observation.get(ENVIRONMENT_STATE)
    return field is not None and all(goal_elements(field))


def slowed_elements(spec: WorldSpec) -> np.ndarray:
    """Return a mask [A] of the action's elements that scale with speed: those with symmetric bounds, as velocities
    have, except for grippers.
    """
    low, high = (np.broadcast_to(np.asarray(bound), spec.action.shape) for bound in (spec.action.low, spec.action.high))
    names = spec.action.names or ("",) * spec.action.size
    gripper = np.array([name.endswith("gripper") for name in names]).reshape(spec.action.shape)
    return np.isclose(low, -high) & ~gripper


def act_elsewhere(controller: Controller, observation: Observation, spec: WorldSpec, offset: np.ndarray) -> np.ndarray:
    """Return actions [B, A] of a controller that sees the goal moved by `offset` [B, 2], m along the axes of PLANE."""
    state = np.array(observation[ENVIRONMENT_STATE])
    for axis, elements in enumerate(goal_elements(spec.observation[ENVIRONMENT_STATE])):
        state[..., elements] += offset[:, None, None, axis]
    return np.asarray(controller.act({**observation, ENVIRONMENT_STATE: state}), dtype=np.float64)


@dataclass(frozen=True)
class Fault:
    """A constant fault of an expert. aim: distance of the goal that it sees from the true one, m, in a direction of its
    own in every episode; speed: fraction of its speed. Raises ConfigError when one of them is out of range.
    """

    aim: float = 0.0
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.aim < np.inf or not 0 < self.speed <= 1:
            raise ConfigError(f"A fault needs aim >= 0 (m) and 0 < speed <= 1, but got {self}.")


def fault_of(level: str) -> Fault | None:
    """Return the fault of which `level` is the text, aim=METRES or speed=FRACTION; None where it is none. Raises
    ConfigError when its number is missing or out of range.
    """
    name, _, value = level.partition("=")
    if name not in ("aim", "speed"):
        return None
    try:
        return Fault(**{name: float(value)})
    except ValueError:
        raise ConfigError(f"'{level}' needs a number: aim=0.04 (m) or speed=0.5 (fraction).") from None


def behaviour_name(level: str) -> str:
    """Return the name of an expert with a noise level, at play or with a fault, for tables and reports."""
    return f"expert, {level}" if level == PLAY or fault_of(level) else f"expert, noise {level}"


class FaultyController:
    """An expert with a constant fault. seed: of the directions in which it aims beside the goal, one for every seed of
    an episode (passed to `begin`, before that the row). Raises ConfigError where the world names no goal to aim beside,
    or no element of the action that scales with speed.
    """

    def __init__(self, controller: Controller, fault: Fault, seed: int, spec: WorldSpec):
        if fault.aim and not can_play(spec):
            raise ConfigError(
                f"The expert of '{spec.name}' cannot aim beside its goal: no elements of {ENVIRONMENT_STATE} are named "
                "goal_x and goal_y. Use speed=FRACTION, or noise."
            )
        self._slowed = slowed_elements(spec)
        if fault.speed < 1 and not self._slowed.any():
            raise ConfigError(
                f"The expert of '{spec.name}' cannot be slowed down: no element of its action has symmetric bounds, as "
                "velocities have. Use aim=METRES, or noise."
            )
        self._controller, self._fault = controller, fault
        self._seed, self._spec = seed, spec
        self._episodes = np.zeros(0, np.int64)

    def reset(self, rows: Rows = None) -> None:
        """Reset the expert in `rows` [R], None for all."""
        self._controller.reset(rows)

    def begin(self, seeds: np.ndarray, rows: Rows = None) -> None:
        """Start episodes with `seeds` [R] in `rows` [R], None for all."""
        begin_episodes(self._controller, seeds, rows)
        if rows is None:
            self._episodes = np.array(seeds)
        else:
            self._episodes[np.asarray(rows)] = seeds

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, A] with the fault, for an observation [B, H, ...], in the world's units."""
        if self._fault.aim:
            rows = len(observation[ENVIRONMENT_STATE])
            if len(self._episodes) != rows:
                self._episodes = np.arange(rows)
            angle = 2 * np.pi * uniforms(derive_keys(self._seed, self._episodes), 1)[:, 0]
            offset = self._fault.aim * np.stack([np.cos(angle), np.sin(angle)], -1)
            actions = act_elsewhere(self._controller, observation, self._spec, offset)
        else:
            actions = np.asarray(self._controller.act(observation), dtype=np.float64)
        return np.where(self._slowed, self._fault.speed * actions, actions)


class PlayingController:
    """An expert that sees another goal than the true one, and acts at a random fraction of its speed.

    spec: of the world. Both change every SHORT to LONG control steps; they depend on `seed`, the episode's seed (passed
    to `begin`, before that the row) and its control step. Raises ConfigError when the environment state names no goal.
    """

    def __init__(self, controller: Controller, seed: int, spec: WorldSpec):
        if not can_play(spec):
            raise ConfigError(
                f"The expert of '{spec.name}' cannot play: no elements of {ENVIRONMENT_STATE} are named goal_x and "
                "goal_y (or NAME_to_goal_x and NAME_to_goal_y). Set worldmodel.play=0, or leave 'play' out of the "
                "noise levels."
            )
        self._controller = controller
        self._seed, self._spec = seed, spec
        self._slowed = slowed_elements(spec)
        self._start(0)

    def _start(self, rows: int) -> None:
        """Allocate this number of rows, each with its index as episode seed."""
        self._episodes = np.arange(rows)
        self._step, self._left = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._offset, self._speed = np.zeros((rows, len(PLANE))), np.ones(rows)

    def reset(self, rows: Rows = None) -> None:
        """Choose new goals for `rows` [R], None for all, and reset the expert."""
        self._controller.reset(rows)
        self._left[slice(None) if rows is None else np.asarray(rows)] = 0

    def begin(self, seeds: np.ndarray, rows: Rows = None) -> None:
        """Start the play of episodes with `seeds` [R] in `rows` [R], None for all, at their first control step."""
        begin_episodes(self._controller, seeds, rows)
        if rows is None:
            self._start(len(seeds))
        index = slice(None) if rows is None else np.asarray(rows)
        self._episodes[index] = seeds
        self._step[index], self._left[index] = 0, 0

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, A] towards the random goals, for an observation [B, H, ...], in the world's units."""
        rows = len(observation[ENVIRONMENT_STATE])
        if len(self._left) != rows:
            self._start(rows)
        self._choose()
        actions = act_elsewhere(self._controller, observation, self._spec, self._offset)
        return np.where(self._slowed, self._speed[:, None] * actions, actions)

    def _choose(self) -> None:
        """Draw a goal, a speed and their duration in rows whose last ones are over, and count a control step."""
        draws = uniforms(derive_keys(self._seed, self._episodes, self._step), 4)
        distance, angle = NEAR + (FAR - NEAR) * draws[:, 0], 2 * np.pi * draws[:, 1]
        over = self._left == 0
        offset = distance[:, None] * np.stack([np.cos(angle), np.sin(angle)], -1)
        self._offset = np.where(over[:, None], offset, self._offset)
        self._speed = np.where(over, SLOW + (1 - SLOW) * draws[:, 2], self._speed)
        self._left = np.where(over, SHORT + (draws[:, 3] * (LONG - SHORT + 1)).astype(np.int64), self._left) - 1
        self._step += 1
