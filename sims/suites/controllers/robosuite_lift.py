"""A scripted controller for robosuite's Lift: go above the cube, down to it, close the gripper, and up."""

import numpy as np

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Observation, WorldSpec
from robopolicy.core.world import Rows

STEP = 0.05
"""Metres that an action of 1 moves the gripper in one control step (robosuite's OSC_POSE and OSC_POSITION)."""
ENTRIES = {
    "gripper": (STATE, "robot0_eef_pos"),
    "fingers": (STATE, "robot0_gripper_qpos"),
    "cube": (ENVIRONMENT_STATE, "cube_pos"),
}


class RobosuiteLiftController:
    """Decides from the newest observation alone; all of it is geometry on arrays of rows.

    spec: of a world with controller OSC_POSE (robosuite's default) or OSC_POSITION; above: how high it waits over the
    cube, m; gain: share of the remaining distance covered in one control step; closed: distance between the fingers, m,
    below which they hold the cube. Raises ConfigError where the world lacks a position that it reads.
    """

    def __init__(self, spec: WorldSpec, above: float = 0.06, gain: float = 0.5, closed: float = 0.055):
        self._above = above
        self._gain = gain
        self._closed = closed
        self._dims = spec.action.shape[0]
        self._columns: dict[str, tuple[str, list[int]]] = {}
        for what, (key, entry) in ENTRIES.items():
            names = spec.observation[key].names if key in spec.observation else ()
            columns = [index for index, name in enumerate(names) if name.startswith(f"{entry}[")]
            if not columns:
                raise ConfigError(f"The expert of Lift reads '{entry}', which '{spec.name}' does not show.")
            self._columns[what] = (key, columns)

    def reset(self, rows: Rows = None) -> None:
        """Nothing is remembered. rows: [R] indices, which make no difference."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, A]: motion in x, y, z (1 is 5 cm), no turns, and the fingers (1 closes).

        observation: `observation.state` [B, H, n] and `observation.environment_state` [B, H, m]; positions in m.
        """
        gripper, fingers, cube = (
            observation[key][:, -1, columns].astype(np.float64) for key, columns in self._columns.values()
        )
        way = cube - gripper
        aside = np.linalg.norm(way[:, :2], axis=1)
        # Beside the cube's axis it travels above it; on the axis it sinks until the fingers are around it.
        over = np.where(aside < 0.02, 0.0, self._above)
        near = (aside < 0.015) & (np.abs(way[:, 2]) < 0.015)
        held = near & (np.abs(fingers[:, 0] - fingers[:, -1]) < self._closed)
        target = way + np.stack([np.zeros_like(over), np.zeros_like(over), over], axis=1)
        target = np.where(held[:, None], np.array([0.0, 0.0, 2 * STEP]), target)
        actions = np.zeros((len(way), self._dims))
        actions[:, :3] = self._gain * target / STEP
        actions[:, -1] = np.where(near, 1.0, -1.0)
        return np.clip(actions, -1.0, 1.0)
