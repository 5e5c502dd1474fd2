"""What a controller would do for several steps from where somebody else has got to: it plays on in another world.

A controller says one control step, and a policy learns chunks. Where the policy itself or noise leads, what the
controller says in four steps that follow one another is no plan: each was said somewhere else. So it plays on from a
snapshot, undisturbed, and what it does there is the chunk. Axes: B row, C step, A action dimension.
"""

import copy

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import Observation
from robopolicy.core.world import Controller, Rows, Snapshot, Snapshots, World


class Foresight:
    """A `core.player.Actor`: says whole chunks of a controller, in the state that `world` is in.

    ahead: a world like `world`, which needs no cameras, of as many rows; steps: C, of a chunk. Raises ConfigError where
    a world has no snapshots, or the controller cannot be copied.
    """

    def __init__(self, controller: Controller, world: World, ahead: World, steps: int):
        if not isinstance(world, Snapshots) or not isinstance(ahead, Snapshots):
            raise ConfigError(f"'{world.spec.name}' has no snapshots, from which a controller could play on.")
        try:
            copy.deepcopy(controller)
        except Exception as error:
            raise ConfigError(
                f"{type(controller).__name__} cannot be copied to play on from what it remembers ({error}): let it "
                "label single steps (label_steps=1)."
            ) from error
        self.controller, self.ahead, self.steps = controller, ahead, steps
        self._now, self._restore = world.snapshot, ahead.restore
        ahead.reset()
        self._known = tuple(ahead.snapshot().arrays)

    def reset(self, rows: Rows = None) -> None:
        """Let the controller forget `rows` [R], all of them for None."""
        self.controller.reset(rows)

    def choose(self, observation: Observation) -> tuple[Array, None]:
        """Return what the controller would do from here, [B, C, A] float64; in rows that ended it means nothing.

        It sees `observation` itself, so that it remembers what really happened; a copy of it plays on.
        """
        actions = [self._one(self.controller, observation)]
        thinking = copy.deepcopy(self.controller)
        arrays = self._now().arrays
        self._restore(Snapshot({name: arrays[name] for name in self._known}))
        while len(actions) < self.steps:
            actions.append(self._one(thinking, self.ahead.step(actions[-1][:, None]).observation))
        return np.stack(actions, 1), None

    def close(self) -> None:
        """Close the world in which it plays on."""
        self.ahead.close()

    @staticmethod
    def _one(controller: Controller, observation: Observation) -> Array:
        return np.asarray(controller.act(observation), dtype=np.float64)
