"""Scripted controller for Gymnasium-Robotics' FetchPush: move behind the block, then push it towards the goal."""

import numpy as np

from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Observation
from robopolicy.core.world import Rows

STEP = 0.05
"""Metres that an action of 1 moves the gripper in one control step."""


class FetchPushController:
    """Acts on the newest observation alone; all computations are vectorised geometry over rows.

    behind: waiting position of the gripper before a push, metres behind the block's centre; above: travel height,
    metres above the block; gain: fraction of the remaining distance covered per control step.
    """

    def __init__(self, behind: float = 0.075, above: float = 0.08, gain: float = 0.7):
        self._behind = behind
        self._above = above
        self._gain = gain

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; there is no state. rows: [R] indices, ignored."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, 4]: gripper motion in x, y, z (1 is 5 cm), and the fingers, kept closed.

        observation: `observation.state` [B, H, 25] starts with gripper and block, `observation.environment_state` [B,
        H, 6] is the achieved and the desired goal; positions in m.
        """
        state = observation[STATE][:, -1].astype(np.float64)
        goal = observation[ENVIRONMENT_STATE][:, -1, 3:6].astype(np.float64)
        gripper, block = state[:, 0:3], state[:, 3:6]
        way = (goal - block)[:, :2]
        distance = np.linalg.norm(way, axis=1, keepdims=True)
        direction = way / np.maximum(distance, 1e-6)

        # The gripper as seen from the block, along and beside the way to the goal (metres).
        offset = (gripper - block)[:, :2]
        along = np.sum(offset * direction, axis=1, keepdims=True)
        lateral = np.linalg.norm(offset - along * direction, axis=1, keepdims=True)
        low = (gripper[:, 2:] - block[:, 2:]) < 0.5 * self._above
        ready = (along < -0.5 * self._behind) & (lateral < 0.02)

        start = block[:, :2] - self._behind * direction
        travel = np.concatenate([start, block[:, 2:] + self._above], axis=1)
        lower = np.concatenate([start, block[:, 2:]], axis=1)
        # Pushing keeps the gripper on the line through block and goal, and stops when the block is there.
        push_point = block[:, :2] + (np.minimum(distance, 2 * STEP) - 0.4 * self._behind) * direction
        push = np.concatenate([push_point, block[:, 2:]], axis=1)
        # A low gripper that is not behind the block first rises, so that it does not knock the block away.
        rise = np.concatenate([gripper[:, :2], block[:, 2:] + self._above], axis=1)
        target = np.where(ready, np.where(low, push, lower), np.where(low, rise, travel))

        motion = self._gain * (target - gripper) / STEP
        return np.clip(np.concatenate([motion, np.full((len(motion), 1), -1.0)], axis=1), -1.0, 1.0)
