"""Push-cube as a plain Gymnasium environment, as a user would write it by hand: baseline of the native engine.

It is a module of its own, so that the worker processes of a vector environment import only what it needs.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import math
from typing import Any

import gymnasium
import mujoco
import numpy as np

from robopolicy.core.randomness import uniforms
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from sims.engine import load_model
from sims.registry import load_task
from sims.tasks import push_cube


class PushCubeEnv(gymnasium.Env):
    """The scene, observation and rewards of the native task: one environment, plain floats; tests compare both."""

    def __init__(self) -> None:
        self.task = load_task("push_cube")
        self.model = load_model(self.task)
        self.data = mujoco.MjData(self.model)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        sizes = {key: field.shape for key, field in self.task.observation.items()}
        self.observation_space = gymnasium.spaces.Dict(
            {key: gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32) for key, shape in sizes.items()}
        )
        self._goal = (0.0, 0.0)
        self._potential = 0.0
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        """Start the episode of `seed`, or of a seed drawn from the environment's own generator."""
        super().reset(seed=seed)
        episode = seed if seed is not None else int(self.np_random.integers(2**62))
        start = self.task.start(uniforms(np.asarray([episode]), self.task.uniforms))
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = start.qpos[0]
        self.data.act[:] = start.qpos[0, 3:5]
        self._goal, self._steps = (float(start.goal[0, 0]), float(start.goal[0, 1])), 0
        observation, self._potential, _ = self._look()
        return observation, {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        """Run one control step."""
        self.data.ctrl[0] = push_cube.SPEED * min(max(float(action[0]), -1.0), 1.0)
        self.data.ctrl[1] = push_cube.SPEED * min(max(float(action[1]), -1.0), 1.0)
        mujoco.mj_step(self.model, self.data, self.task.substeps)
        self._steps += 1
        observation, potential, distance = self._look()
        success = distance < push_cube.TOLERANCE
        reward = potential - self._potential + float(success)
        self._potential = potential
        return observation, reward, success, not success and self._steps >= self.task.horizon, {"is_success": success}

    def _look(self) -> tuple[dict[str, np.ndarray], float, float]:
        """Return the observation, the potential and the cube's distance to the goal."""
        x, y, yaw, px, py = self.data.qpos.tolist()
        vx, vy, spin, pvx, pvy = self.data.qvel.tolist()
        tx, ty = self.data.act.tolist()
        gx, gy = self._goal
        cosine, sine = math.cos(yaw), math.sin(yaw)
        state = np.array((px, py, pvx, pvy, tx - px, ty - py), dtype=np.float32)
        environment = np.array(
            (x, y, cosine, sine, vx, vy, spin, gx, gy, x - px, y - py, gx - x, gy - y), dtype=np.float32
        )
        distance = math.hypot(gx - x, gy - y)
        potential = -10.0 * distance - 2.0 * max(math.hypot(x - px, y - py), push_cube.CONTACT)
        return {STATE: state, ENVIRONMENT_STATE: environment}, potential, distance
