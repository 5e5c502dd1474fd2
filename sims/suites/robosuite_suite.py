"""robosuite's tasks as worlds, with a scripted expert for Lift (extra `robosuite`)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Observation, WorldSpec
from robopolicy.core.world import Controller, Rows
from sims.suites.gymnasium_suite import GymnasiumWorld, check_options, words
from sims.suites.robosuite_environment import open_robosuite, robosuite_tasks

HORIZON = 400
HORIZONS = {"NutAssembly": 1000, "PickPlace": 1000, "ToolHang": 700, "TwoArmTransport": 700}
"""Control steps until the time limit (robosuite itself has none), by task; other tasks use HORIZON."""
INSTRUCTIONS = {
    "Door": "open the door",
    "Lift": "lift the cube",
    "NutAssembly": "put both nuts on their pegs",
    "NutAssemblyRound": "put the round nut on its peg",
    "NutAssemblySquare": "put the square nut on its peg",
    "PickPlace": "put every object in its bin",
    "PickPlaceCan": "put the can in its bin",
    "Stack": "stack the red cube on the green cube",
    "ToolHang": "assemble the stand and hang the tool on it",
    "TwoArmHandover": "hand the hammer from one arm to the other",
    "TwoArmLift": "lift the pot with both arms",
    "TwoArmPegInHole": "put the peg in the hole",
    "TwoArmTransport": "move the hammer to the other side, and the trash out of the bin",
    "Wipe": "wipe the table clean",
}
"""Instructions by task; the instructions of other tasks are derived from their names."""
NOT_LEVELS = ("Wipe",)
"""Tasks whose reward marks single events instead of progress."""


def make_robosuite_world(
    task: str,
    batch_size: int,
    *,
    reward: str | None = None,
    reward_scale: float = 2.0,
    env_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> GymnasiumWorld:
    """Build the world of a robosuite task such as "Lift"; options are those of `GymnasiumWorld`.

    env_options: robots, controller, keys and other arguments of `RobosuiteEnvironment`. observation.state: entries of
    robosuite's observation that start with a robot's name; environment_state: the others. reward: None, the increase of
    robosuite's shaped reward, 0 to reward_scale per episode, plus 1 at success (the reward itself when it does not
    measure progress); or as for any gymnasium environment. Raises ConfigError on an unknown task or option, and when
    the extra is missing or does not work.
    """
    check_options(options)
    tasks = robosuite_tasks()
    if task not in tasks:
        raise ConfigError(f"robosuite has no task '{task}'.{did_you_mean(task, tasks)}")
    settings = {
        "horizon": HORIZONS.get(task, HORIZON),
        "instruction": INSTRUCTIONS.get(task, words(task)),
        "success_text": "robosuite's own check of the task",
        "success_key": "success",
        "clip_actions": True,
    }
    return GymnasiumWorld(
        f"robosuite/{task}",
        partial(open_robosuite, task, dict(env_options or {})),
        batch_size,
        reward=("environment" if task in NOT_LEVELS else "increase") if reward is None else reward,
        reward_scale=reward_scale,
        **{**settings, **options},
    )


def robosuite_expert(task: str, spec: WorldSpec) -> Controller | None:
    """Return the scripted expert of `task`, or None when it has none (all but Lift)."""

    return RobosuiteLiftController(spec) if task == "Lift" else None


STEP = 0.05
"""Metres that an action of 1 moves the gripper in one control step (robosuite's OSC_POSE and OSC_POSITION)."""
ENTRIES = {
    "gripper": (STATE, "robot0_eef_pos"),
    "fingers": (STATE, "robot0_gripper_qpos"),
    "cube": (ENVIRONMENT_STATE, "cube_pos"),
}


class RobosuiteLiftController:
    """Acts on the newest observation alone; all computations are vectorised geometry over rows.

    spec: of a world with controller OSC_POSE (robosuite's default) or OSC_POSITION; above: hover height over the cube,
    m; gain: fraction of the remaining distance covered per control step; closed: finger distance, m, below which the
    cube is grasped. Raises ConfigError when the world lacks a position that it reads.
    """

    def __init__(self, spec: WorldSpec, above: float = 0.06, gain: float = 0.5, closed: float = 0.055):
        self._above = above
        self._gain = gain
        self._closed = closed
        self._dims = spec.action.shape[0]
        self._columns: dict[str, tuple[str, list[int]]] = {}
        for part, (key, entry) in ENTRIES.items():
            names = spec.observation[key].names if key in spec.observation else ()
            columns = [index for index, name in enumerate(names) if name.startswith(f"{entry}[")]
            if not columns:
                raise ConfigError(f"The expert of Lift reads '{entry}', which '{spec.name}' does not output.")
            self._columns[part] = (key, columns)

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; there is no state. rows: [R] indices, ignored."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, A]: motion in x, y, z (1 is 5 cm), no rotation, and the fingers (1 closes).

        observation: `observation.state` [B, H, n] and `observation.environment_state` [B, H, m]; positions in m.
        """
        gripper, fingers, cube = (
            observation[key][:, -1, columns].astype(np.float64) for key, columns in self._columns.values()
        )
        way = cube - gripper
        distance = np.linalg.norm(way[:, :2], axis=1)
        # Beside the cube's axis it travels above it; on the axis it sinks until the fingers are around it.
        heights = np.where(distance < 0.02, 0.0, self._above)
        near = (distance < 0.015) & (np.abs(way[:, 2]) < 0.015)
        is_held = near & (np.abs(fingers[:, 0] - fingers[:, -1]) < self._closed)
        target = way + np.stack([np.zeros_like(heights), np.zeros_like(heights), heights], axis=1)
        target = np.where(is_held[:, None], np.array([0.0, 0.0, 2 * STEP]), target)
        actions = np.zeros((len(way), self._dims))
        actions[:, :3] = self._gain * target / STEP
        actions[:, -1] = np.where(near, 1.0, -1.0)
        return np.clip(actions, -1.0, 1.0)
