"""A task on somebody else's MJCF: gymnasium's Reacher, whose arm and target are driven by motors and slides.

Reaching counts as success, which gymnasium's own Reacher never reports.
"""

from importlib.resources import files

import numpy as np

from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field, Observation
from robopolicy.core.world import Rows
from sims.task import Arrays, Readings, Start, Task, newest, scale, vector_field

UPPER, FORE = 0.1, 0.11  # m, link lengths of the model
TARGET_REF = np.array([0.1, -0.1])  # m, where the target's body lies in the model
TOLERANCE = 0.02  # m


def start(uniforms: np.ndarray) -> Start:
    """Any posture, and a target within reach."""
    joints = np.stack([scale(uniforms[:, 0], -np.pi, np.pi), scale(uniforms[:, 1], -2.0, 2.0)], axis=-1)
    angle, radius = scale(uniforms[:, 2], -np.pi, np.pi), scale(uniforms[:, 3], 0.08, 0.19)
    target = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return Start(qpos=np.concatenate([joints, target], axis=-1), goal=target)


def observe(readings: Readings) -> dict[str, np.ndarray]:
    """Return the arm's joints and speeds, and where tip and target are."""
    shoulder, elbow = readings.qpos[..., 0], readings.qpos[..., 1]
    tip = UPPER * np.stack([np.cos(shoulder), np.sin(shoulder)], axis=-1)
    tip = tip + FORE * np.stack([np.cos(shoulder + elbow), np.sin(shoulder + elbow)], axis=-1)
    angles = np.stack([np.cos(shoulder), np.sin(shoulder), elbow], axis=-1)
    return {
        STATE: np.concatenate([angles, readings.qvel[..., :2]], axis=-1),
        ENVIRONMENT_STATE: np.concatenate([tip, readings.qpos[..., 2:4]], axis=-1),
    }


def distance(observation: Arrays) -> np.ndarray:
    """Return metres from tip to target, [...]."""
    places = observation[ENVIRONMENT_STATE]
    return np.linalg.norm(places[..., :2] - places[..., 2:], axis=-1)


class Expert:
    """Inverse kinematics, then proportional and derivative torques."""

    def reset(self, rows: Rows = None) -> None:
        """Nothing is remembered."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return torques [B, 2] as a share of the motors' range."""
        state, places = newest(observation, STATE), newest(observation, ENVIRONMENT_STATE)
        shoulder, elbow = np.arctan2(state[:, 1], state[:, 0]), state[:, 2]
        x, y = places[:, 2], places[:, 3]
        cosine = (x**2 + y**2 - UPPER**2 - FORE**2) / (2 * UPPER * FORE)
        wanted = np.where(elbow < 0, -1.0, 1.0) * np.arccos(np.clip(cosine, -1.0, 1.0))
        first = np.arctan2(y, x) - np.arctan2(FORE * np.sin(wanted), UPPER + FORE * np.cos(wanted))
        error = np.stack([np.arctan2(np.sin(first - shoulder), np.cos(first - shoulder)), wanted - elbow], axis=-1)
        return np.clip(0.25 * error - 0.08 * state[:, 3:5], -1.0, 1.0)


def task() -> Task:
    """Return the reaching task."""
    return Task(
        name="outside_reacher",
        model=str(files("gymnasium") / "envs" / "mujoco" / "assets" / "reacher.xml"),
        instructions=("reach the red ball",),
        success_text=f"The fingertip is within {100 * TOLERANCE:.0f} cm of the target.",
        fps=20,
        substeps=5,
        horizon=60,
        cameras=(),
        action=Field((2,), low=-1.0, high=1.0, unit="share of the motors' range", names=("shoulder", "elbow")),
        observation={
            STATE: vector_field("shoulder_cos shoulder_sin elbow shoulder_velocity elbow_velocity", "rad, rad/s"),
            ENVIRONMENT_STATE: vector_field("tip_x tip_y target_x target_y", "m"),
        },
        uniforms=4,
        start=start,
        control=lambda actions, previous: actions,
        observe=observe,
        potential=lambda observation: -10.0 * distance(observation),
        succeeded=lambda observation: distance(observation) < TOLERANCE,
        expert=Expert,
    )
