"""Push-T as a user would write it by hand for one environment at a time: the environments that DPPO's own code plays.

It depends on no version of gym, so that other libraries' wrappers can be put around it.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import math

import mujoco
import numpy as np

from robopolicy.core.randomness import uniforms
from sims.engine import load_model
from sims.registry import load_task
from sims.tasks import push_t

OBSERVATION_SIZE = 19
"""The fields of the native task, in its order: observation.state (6), observation.environment_state (13)."""


class PushT:
    """The same scene, observation and rewards as the native task: one environment, plain floats; a test compares both.

    model: compiled scene, which environments may share.
    """

    def __init__(self, model: mujoco.MjModel | None = None) -> None:
        self.task = load_task("push_t")
        self.model = load_model(self.task) if model is None else model
        self.data = mujoco.MjData(self.model)
        self._goal = push_t.GOAL
        self._potential = 0.0

    def start(self, episode: int) -> np.ndarray:
        """Start the episode with this seed; return the observation [19]."""
        start = self.task.start(uniforms(np.asarray([episode]), self.task.uniforms))
        assert start.activation is not None
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = start.qpos[0]
        self.data.act[:] = start.activation[0]
        observation, self._potential, _ = self._look()
        return observation

    def advance(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        """Run one control step of an action [2]; return the observation [19], the reward and whether it succeeded."""
        self.data.ctrl[0] = push_t.SPEED * min(max(float(action[0]), -1.0), 1.0)
        self.data.ctrl[1] = push_t.SPEED * min(max(float(action[1]), -1.0), 1.0)
        mujoco.mj_step(self.model, self.data, self.task.substeps)
        observation, potential, success = self._look()
        reward = potential - self._potential + float(success)
        self._potential = potential
        return observation, reward, success

    def _look(self) -> tuple[np.ndarray, float, bool]:
        """Return the observation [19], the potential, and whether the block is at its goal."""
        x, y, yaw, px, py = self.data.qpos.tolist()
        vx, vy, spin, pvx, pvy = self.data.qvel.tolist()
        tx, ty = self.data.act.tolist()
        gx, gy, goal_yaw = self._goal
        cosine, sine = math.cos(yaw), math.sin(yaw)
        turn_cosine, turn_sine = math.cos(goal_yaw - yaw), math.sin(goal_yaw - yaw)
        dx, dy = px - x, py - y
        inside_x, inside_y = cosine * dx + sine * dy, cosine * dy - sine * dx
        state = (px, py, pvx, pvy, tx - px, ty - py)
        block = (x, y, cosine, sine, vx, vy, spin, gx - x, gy - y, turn_cosine, turn_sine, inside_x, inside_y)
        distance, turn = math.hypot(gx - x, gy - y), abs(math.atan2(turn_sine, turn_cosine))
        potential = -12.0 * distance - 0.8 * turn - max(math.hypot(inside_x, inside_y), 0.05)
        success = distance < push_t.POSITION_TOLERANCE and turn < push_t.ANGLE_TOLERANCE
        return np.array(state + block, dtype=np.float32), potential, success
