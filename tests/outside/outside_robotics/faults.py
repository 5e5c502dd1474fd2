"""A fault of one's own: the robot does nothing from the begin on."""

import numpy as np

from robopolicy.core.faults import Fault


class Stall(Fault):
    """Actions are multiplied by `rest`."""

    def __init__(self, world, rest: float = 0.0):
        super().__init__(world)
        self.rest = rest

    def act(self, actions, onset):
        return np.where(onset.since[..., None] >= 0, self.rest * actions, actions)
