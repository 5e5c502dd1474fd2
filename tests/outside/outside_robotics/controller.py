"""A controller for the ball: straight to the hole."""

import numpy as np

from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Observation
from robopolicy.core.world import Rows


class Straight:
    """Full speed towards the hole, slower when near."""

    def reset(self, rows: Rows = None) -> None:
        """Nothing is remembered."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return velocities [B, 2]."""
        way = observation[ENVIRONMENT_STATE][:, -1] - observation[STATE][:, -1]
        return np.clip(4.0 * way, -1.0, 1.0)
