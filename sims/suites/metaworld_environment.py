"""One Meta-World task as a gymnasium environment whose episodes depend on their seed alone.

Meta-World's own reset ignores its seed and its observation hides the goal. Here the seed determines object and goal,
the goal is observed, and the reward is the progress of Meta-World's shaped reward. Runs inside worker processes: no
torch.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import weakref
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding

from robopolicy.core.errors import ConfigError, did_you_mean, extra_conflict, in_one_line, require_extra
from sims.suites.metaworld_stepper import lean
from sims.suites.mujoco_state import MujocoCamera, MujocoState

HORIZON = 500
LEVEL = 10.0
"""Meta-World's shaped reward at success."""
ROBOT = (slice(0, 4), slice(18, 22))
"""Hand position and gripper opening, current and one control step ago, in Meta-World's 39 numbers."""
OBJECTS = (slice(4, 18), slice(22, 36), slice(36, 39))
"""Current and previous poses of up to two objects, and the goal."""
ROBOT_INDEX, OBJECTS_INDEX = (np.r_[parts] for parts in (ROBOT, OBJECTS))

VIEW = {"lookat": np.array([0.0, 0.6, 0.1]), "distance": 1.5, "azimuth": 235.0, "elevation": -35.0}
"""Default camera: from the front, over the table (Meta-World's own free view shows the robot's back)."""


def metaworld_tasks() -> dict[str, Any]:
    """Return Meta-World's environment classes by name. Raises ConfigError when the extra is missing."""
    return dict(require_extra("metaworld", "metaworld").ALL_V3_ENVIRONMENTS)


def open_metaworld(task: str) -> gymnasium.Env:
    """Create one environment of `task`, such as "push-v3".

    Raises ConfigError on an unknown task, or when the extra `metaworld` is missing.
    """
    tasks = metaworld_tasks()
    if task not in tasks:
        raise ConfigError(f"Meta-World has no task '{task}'.{did_you_mean(task, tasks)}")
    try:
        inner = lean(tasks[task])()
    except Exception as error:  # another mujoco than it knows has other arrays
        conflict = extra_conflict("metaworld")
        raise ConfigError(f"Meta-World's '{task}' could not be created: {in_one_line(error)}.{conflict}") from error
    inner._partially_observable = False
    vars(inner).pop("sawyer_observation_space", None)
    inner._freeze_rand_vec = False
    inner.seeded_rand_vec = True
    inner._set_task_called = True
    inner.mujoco_renderer.default_cam_config = VIEW
    return MetaworldEnvironment(inner)


class MetaworldEnvironment(gymnasium.Wrapper):
    """Adds seeding, an observed goal in a dictionary observation, and progress as reward: the increase of the shaped
    reward divided by its value at success, so a finished episode has a return of at most 1.
    """

    open_gripper = {3: -1.0}  # noqa: RUF012 (gymnasium's own convention)

    def __init__(self, environment: gymnasium.Env):
        super().__init__(environment)
        self.observation_space = spaces.Dict(agent_pos=_unbounded(ROBOT), environment_state=_unbounded(OBJECTS))
        self._level = 0.0
        self.painter = MetaworldPainter(environment)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        """Start the episode of `seed`; options are not used. Returns agent_pos [8], environment_state [31]; info."""
        inner: Any = self.env
        if seed is not None:
            inner._np_random, _ = seeding.np_random(seed)
        flat, info = inner.reset()
        reward, _ = inner.evaluate_state(flat, np.zeros(4, dtype=np.float32))
        self._level = float(reward) / LEVEL
        return _split(flat), info

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        """Take a step; the reward is progress.

        action: [4], the hand's motion in x, y, z (1 is 1 cm) and the gripper's effort -> observation (agent_pos [8],
        environment_state [31]), reward, terminated, truncated, info.
        """
        flat, reward, terminated, truncated, info = self.env.step(action)
        level = float(reward) / LEVEL
        progress, self._level = level - self._level, level
        return _split(flat), progress, terminated, truncated, info


class Drawing:
    """What a process's environments of one task share to draw images: graphics contexts, of 130 MB each, and data."""

    def __init__(self, model: mujoco.MjModel):
        self.renderers: dict[tuple[int, int], mujoco.Renderer] = {}
        self.data = mujoco.MjData(model)
        self.users = weakref.WeakSet[MetaworldPainter]()

    def close(self) -> None:
        """Free every graphics context."""
        for renderer in self.renderers.values():
            renderer.close()
        self.renderers.clear()


DRAWINGS: dict[type, Drawing] = {}
"""Class of a task -> what its environments share."""


class MetaworldPainter(MujocoCamera):
    """Images of the present state. What Meta-World derives from it is older after a reset, for example the goal."""

    def __init__(self, environment: gymnasium.Env):
        super().__init__(environment, MujocoState(environment))
        kind = type(environment)
        if kind not in DRAWINGS:
            DRAWINGS[kind] = Drawing(self._state.model)
        self._owner = self._drawing = DRAWINGS[kind]
        self._drawing.users.add(self)
        self._renderers = self._drawing.renderers

    def _drawn_data(self) -> mujoco.MjData:
        model, drawn = self._state.model, self._drawing.data
        for name in ("qpos", "mocap_pos", "mocap_quat"):
            getattr(drawn, name)[:] = getattr(self._state.data, name)
        mujoco.mj_kinematics(model, drawn)
        mujoco.mj_comPos(model, drawn)  # lights and cameras may follow a centre of mass
        mujoco.mj_camlight(model, drawn)
        return drawn

    def close(self) -> None:
        """Free the graphics contexts after the last environment of the task."""
        self._drawing.users.discard(self)
        if not self._drawing.users:
            self._drawing.close()


def _unbounded(parts: tuple[slice, ...]) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (sum(part.stop - part.start for part in parts),))


def _split(flat: np.ndarray) -> dict[str, np.ndarray]:
    return {"agent_pos": flat[ROBOT_INDEX], "environment_state": flat[OBJECTS_INDEX]}


def joined(robot: np.ndarray, objects: np.ndarray) -> np.ndarray:
    """Join robot [B, 8] and objects [B, 31] in Meta-World's order, [B, 39] float64."""
    flat = np.empty((len(robot), 39))
    for parts, values in ((ROBOT, robot), (OBJECTS, objects)):
        start = 0
        for part in parts:
            flat[:, part] = values[:, start : start + part.stop - part.start]
            start += part.stop - part.start
    return flat
