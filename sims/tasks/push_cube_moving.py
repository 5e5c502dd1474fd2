"""Push-cube with a circling goal: with inference latency, actions aim at the goal's earlier position.

The world of `push_cube`; the goal disc circles a point near the cube at 3 to 5 cm/s, in either direction.
"""

from dataclasses import replace

import numpy as np

from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Observation
from robopolicy.core.world import Rows
from sims.task import Readings, Start, Task, elements, newest, scale, vector_field
from sims.tasks import push_cube
from sims.tasks.push_cube import PUSHER, TARGET, TO_GOAL, steer

RADIUS = 0.04  # m of the circle
SPEEDS = 0.03, 0.05  # m/s of the goal
LEAD = 0.7  # s that the expert aims ahead of the goal

FIELD = vector_field(" ".join((*push_cube.CUBE_FIELD.names, "goal_velocity_x goal_velocity_y")), "m, m/s, rad/s")
VELOCITY = elements(FIELD, "goal_velocity_x goal_velocity_y")


def start(uniforms: np.ndarray) -> Start:
    """Initial states of `push_cube`, with a circle around its goal.

    uniforms: [R, 9] -> as there, goal [R, 4]: the circle's centre in m, the initial angle in rad and its angular
    velocity in rad/s.
    """
    base_start = push_cube.start(uniforms[:, :7])
    angle = scale(uniforms[:, 7], -np.pi, np.pi)
    # One number says both which way the goal goes round and how fast.
    either = 2 * uniforms[:, 8] - 1
    rate = np.sign(either) * scale(np.abs(either), *SPEEDS) / RADIUS
    return replace(base_start, goal=np.concatenate([base_start.goal, angle[:, None], rate[:, None]], axis=1))


def goal_at(goal: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Return position and velocity of goals [R, 4] at times [R, C] s: [R, C, 4], m and m/s."""
    rate = goal[:, None, 3]
    angle = goal[:, None, 2] + rate * time
    toward = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    along = np.stack([-toward[..., 1], toward[..., 0]], axis=-1)
    return np.concatenate([goal[:, None, 0:2] + RADIUS * toward, RADIUS * rate[..., None] * along], axis=-1)


def observe(readings: Readings) -> dict[str, np.ndarray]:
    """Return the observation of `push_cube` and the goal's velocity.

    readings: as there, goal [..., 4] -> `observation.state` [..., 6], `observation.environment_state` [..., 15].
    """
    observation = push_cube.observe(replace(readings, goal=readings.goal[..., 0:2]))
    observation[ENVIRONMENT_STATE] = np.concatenate([observation[ENVIRONMENT_STATE], readings.goal[..., 2:4]], axis=-1)
    return observation


class PushCubeMovingExpert:
    """Pushes as in `push_cube`, towards the goal's predicted position."""

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; there is no state. rows: [R] indices, ignored."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, 2], fractions of full speed, for an observation [B, H, ...]."""
        state, environment = newest(observation, STATE), newest(observation, ENVIRONMENT_STATE)
        future_goal = environment[:, TO_GOAL] + LEAD * environment[:, VELOCITY]
        return steer(state[:, PUSHER] + state[:, TARGET], environment[:, push_cube.CUBE], future_goal)


def task() -> Task:
    """Return the push-cube task whose goal moves."""
    return replace(
        push_cube.task(),
        name="push_cube_moving",
        instructions=("push the cube onto the moving green disc",),
        success_text=(
            f"The cube's centre is within {100 * push_cube.TOLERANCE:.0f} cm of the goal's centre at that time."
        ),
        observation={STATE: push_cube.PUSHER_FIELD, ENVIRONMENT_STATE: FIELD},
        uniforms=9,
        start=start,
        goal_at=goal_at,
        observe=observe,
        expert=PushCubeMovingExpert,
        markers=lambda goal: push_cube.markers(goal[:, 0:2]),
    )
