"""Chunk labels from a single-step controller, by continuing it in a copy of the world.

A controller returns one control step, but a policy learns chunks. In states visited by the policy or noise, the
controller's outputs of successive steps do not form a plan, since each belongs to another state. Therefore the
controller continues from a snapshot without disturbance, and its actions there form the chunk. With latency
(`core.delayed`) the queued actions are executed first, so the controller observes the state at execution time and need
not handle the delay. Axes: B row, C step, A action dimension, d steps of latency.
"""

import copy

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.delayed import queued_actions
from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.spec import Observation
from robopolicy.core.world import Controller, Rows, Snapshot, Snapshots, World, begin_episodes


class LookaheadController:
    """A `core.player.Actor` that returns whole chunks of a controller from the current state of `world`; also a
    `Controller`.

    ahead: a world like `world` with as many rows, without latency; it needs no cameras; steps: C steps per chunk;
    before_end: [B], number of steps of the last chunk before the row's episode would end. Raises ConfigError if a world
    has no snapshots, or the controller cannot be copied.
    """

    def __init__(self, controller: Controller, world: World, ahead: World, steps: int):
        if not isinstance(world, Snapshots) or not isinstance(ahead, Snapshots):
            raise ConfigError(
                f"'{world.spec.name}' does not support snapshots, which a controller needs to look ahead."
            )
        try:
            copy.deepcopy(controller)
        except Exception as error:
            name = getattr(controller, "name", type(controller).__name__)
            raise ConfigError(
                f"{name} cannot be deep-copied to look ahead ({error}): use single-step labels (label_steps=1)."
            ) from error
        self.controller = controller
        self.ahead = ahead
        self.steps = steps
        self._now, self._restore = world.snapshot, ahead.restore
        self.before_end = np.full(ahead.batch_size, steps)
        ahead.reset()
        self._known = tuple(ahead.snapshot().arrays)

    def reset(self, rows: Rows = None) -> None:
        """Reset the controller for `rows` [R], or for all when None."""
        self.controller.reset(rows)

    def begin(self, seeds: Array, rows: Rows = None) -> None:
        """Pass the seeds [R] of the episodes in `rows` [R] to the controller, if it accepts them."""
        begin_episodes(self.controller, seeds, rows)

    def choose(self, observation: Observation) -> tuple[Array, None]:
        """Return the controller's next actions from the current state, [B, C, A] float64; undefined in ended rows.

        The controller itself reads only `observation` (with latency: the predicted one d steps later), so that its
        memory contains real events; a copy of it continues.
        """
        snapshot = self._now()
        self._restore(Snapshot({name: snapshot.arrays[name] for name in self._known}))
        action = queued_actions(snapshot)
        goes_on = np.ones(self.ahead.batch_size, bool)
        if action is not None:
            step = self.ahead.step(action)
            observation, goes_on = step.observation, ~step.ended
        actions = [self._one(self.controller, observation)]
        self.before_end = goes_on.astype(np.int64)
        thinking = copy.deepcopy(self.controller) if self.steps > 1 else self.controller
        while len(actions) < self.steps:
            step = self.ahead.step(actions[-1][:, None])
            goes_on = goes_on & ~step.ended
            self.before_end += goes_on
            actions.append(self._one(thinking, step.observation))
        return np.stack(actions, 1), None

    def act(self, observation: Observation) -> Array:
        """Return the first step of the chunk from `choose`, [B, A]."""
        return self.choose(observation)[0][:, 0]

    def close(self) -> None:
        """Close the internal world `ahead`."""
        self.ahead.close()

    @staticmethod
    def _one(controller: Controller, observation: Observation) -> Array:
        return np.asarray(controller.act(observation), dtype=np.float64)


keep_former_names(__name__, {"Foresight": "LookaheadController"})
