"""What a controller would do for several steps from where somebody else has got to: it plays on in another world.

A controller says one control step, and a policy learns chunks. Where the policy itself or noise leads, what the
controller says in four steps that follow one another is no plan: each was said somewhere else. So it plays on from a
snapshot, undisturbed, and what it does there is the chunk. Where decisions take time (`core.delayed`), what is decided
already is played first: the controller sees the moment at which its decision counts, and need not know of the delay.
Axes: B row, C step, A action dimension, d steps that a decision takes.
"""

import copy

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.delayed import queued
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import Observation
from robopolicy.core.world import Controller, Rows, Snapshot, Snapshots, World, begin_episodes


class Foresight:
    """A `core.player.Actor`: says whole chunks of a controller, in the state that `world` is in; and a `Controller`.

    ahead: a world like `world`, which needs no cameras and whose decisions take no time, of as many rows; steps: C, of
    a chunk; before_end: how many steps of the last chunk come before the row's episode would end, [B]. Raises
    ConfigError where a world has no snapshots, or the controller cannot be copied.
    """

    def __init__(self, controller: Controller, world: World, ahead: World, steps: int):
        if not isinstance(world, Snapshots) or not isinstance(ahead, Snapshots):
            raise ConfigError(f"'{world.spec.name}' has no snapshots, from which a controller could play on.")
        try:
            copy.deepcopy(controller)
        except Exception as error:
            name = getattr(controller, "name", type(controller).__name__)
            raise ConfigError(
                f"{name} cannot be copied to play on from what it remembers ({error}): let it label single steps "
                "(label_steps=1)."
            ) from error
        self.controller = controller
        self.ahead = ahead
        self.steps = steps
        self._now, self._restore = world.snapshot, ahead.restore
        self.before_end = np.full(ahead.batch_size, steps)
        ahead.reset()
        self._known = tuple(ahead.snapshot().arrays)

    def reset(self, rows: Rows = None) -> None:
        """Let the controller forget `rows` [R], all of them for None."""
        self.controller.reset(rows)

    def begin(self, seeds: Array, rows: Rows = None) -> None:
        """Give the controller the seeds [R] of the episodes in `rows` [R], if it wants them."""
        begin_episodes(self.controller, seeds, rows)

    def choose(self, observation: Observation) -> tuple[Array, None]:
        """Return what the controller would do from here, [B, C, A] float64; in rows that ended it means nothing.

        It sees `observation` itself (with a delay: what will be seen d steps from now), so that it remembers what
        really happened; a copy of it plays on.
        """
        snapshot = self._now()
        self._restore(Snapshot({name: snapshot.arrays[name] for name in self._known}))
        decided = queued(snapshot)
        goes_on = np.ones(self.ahead.batch_size, bool)
        if decided is not None:
            step = self.ahead.step(decided)
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
        """Return the first step of what `choose` returns, [B, A]."""
        return self.choose(observation)[0][:, 0]

    def close(self) -> None:
        """Close the world in which it plays on."""
        self.ahead.close()

    @staticmethod
    def _one(controller: Controller, observation: Observation) -> Array:
        return np.asarray(controller.act(observation), dtype=np.float64)
