"""Reach: a two-link arm on a table moves its tip to a point; the smallest task, for smoke tests."""

import numpy as np

from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field, Observation
from robopolicy.core.world import Rows
from sims.task import Arrays, Markers, Readings, Start, Task, elements, flat_quaternion, newest, scale, vector_field

SPEED = 2.5  # rad/s at full action
TOLERANCE = 0.02  # m
UPPER, FORE = 0.13, 0.11  # m, link lengths


ARM_FIELD = vector_field("shoulder_cos elbow_cos shoulder_sin elbow_sin shoulder_velocity elbow_velocity", "rad/s")
GOAL_FIELD = vector_field("tip_x tip_y goal_x goal_y tip_to_goal_x tip_to_goal_y", "m")
COSINES, SINES = elements(ARM_FIELD, "shoulder_cos elbow_cos"), elements(ARM_FIELD, "shoulder_sin elbow_sin")
GOAL, TO_GOAL = elements(GOAL_FIELD, "goal_x goal_y"), elements(GOAL_FIELD, "tip_to_goal_x tip_to_goal_y")


def start(uniforms: np.ndarray) -> Start:
    """Any shoulder angle, a bent elbow, and a reachable goal in another direction from the base.

    uniforms: [R, 5] -> qpos and activation [R, 2] rad, goal [R, 2] m.
    """
    side = np.where(uniforms[:, 0] < 0.5, -1.0, 1.0)
    joints = np.stack([scale(uniforms[:, 1], -np.pi, np.pi), side * scale(uniforms[:, 2], 0.5, 2.2)], axis=-1)
    radius = scale(uniforms[:, 3], 0.09, 0.22)
    tip = joints[:, 0] + np.arctan2(FORE * np.sin(joints[:, 1]), UPPER + FORE * np.cos(joints[:, 1]))
    angle = tip + scale(uniforms[:, 4], 0.4, 2 * np.pi - 0.4)
    goal = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return Start(qpos=joints, goal=goal, activation=joints)


def control(actions: np.ndarray, previous: np.ndarray) -> np.ndarray:
    """Actions are joint velocities as fractions of full speed.

    actions: [R, C, 2]; previous: [R, 2], ignored -> [R, C, 2] rad/s.
    """
    return SPEED * actions


def observe(readings: Readings) -> dict[str, np.ndarray]:
    """Arm: joint angles as cosine and sine, velocities. Environment: tip, goal and the offset between them.

    readings: qpos and qvel [..., 2], goal [..., 2], sensor "tip" [..., 3] -> `observation.state` [..., 6] (velocities
    in rad/s), `observation.environment_state` [..., 6] m.
    """
    tip = readings.sensors["tip"][..., 0:2]
    state = [np.cos(readings.qpos), np.sin(readings.qpos), readings.qvel]
    return {
        STATE: np.concatenate(state, axis=-1),
        ENVIRONMENT_STATE: np.concatenate([tip, readings.goal, readings.goal - tip], axis=-1),
    }


def _distance(observation: Arrays) -> np.ndarray:
    """Return the distance from the tip to the goal, [...] m."""
    offset = observation[ENVIRONMENT_STATE][..., TO_GOAL]
    return np.sqrt(offset[..., 0] ** 2 + offset[..., 1] ** 2)


def potential(observation: Arrays) -> np.ndarray:
    """Progress potential: rises by 10 per metre that the tip gets closer to the goal; environment state [..., 6] ->
    [...].
    """
    return -10.0 * _distance(observation)


def succeeded(observation: Arrays) -> np.ndarray:
    """The tip is within the tolerance of the goal: environment state [..., 6] -> [...] bool."""
    return _distance(observation) < TOLERANCE


def markers(goal: np.ndarray) -> Markers:
    """The goal disc lies at the goal: [R, 2] m -> positions [R, 1, 3], quaternions [R, 1, 4]."""
    position = np.concatenate([goal, np.zeros_like(goal[:, :1])], axis=1)[:, None]
    return Markers(position, flat_quaternion(np.zeros(position.shape[:2])))


class ReachPlanarExpert:
    """Inverse kinematics with the elbow on its current side, then a straight path in joint space."""

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; there is no state. rows: [R] indices, ignored."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, 2], fractions of full speed, for an observation [B, H, ...]."""
        state, goal = newest(observation, STATE), newest(observation, ENVIRONMENT_STATE)[:, GOAL]
        joints = np.arctan2(state[:, SINES], state[:, COSINES])
        # The law of cosines gives the elbow; the shoulder points at the goal, less the angle by which the bent elbow
        # turns the tip aside. A goal beyond reach leaves [-1, 1], and the arm is stretched towards it.
        cosine = ((goal**2).sum(axis=1) - UPPER**2 - FORE**2) / (2 * UPPER * FORE)
        elbow = np.where(joints[:, 1] < 0, -1.0, 1.0) * np.arccos(np.clip(cosine, -1.0, 1.0))
        shoulder = np.arctan2(goal[:, 1], goal[:, 0]) - np.arctan2(FORE * np.sin(elbow), UPPER + FORE * np.cos(elbow))
        error = np.stack([shoulder, elbow], axis=-1) - joints
        error[:, 0] = np.arctan2(np.sin(error[:, 0]), np.cos(error[:, 0]))
        return np.clip(2.0 * error, -1.0, 1.0)


def task() -> Task:
    """Return the planar reaching task."""
    return Task(
        name="reach_planar",
        model="planar/reach_planar.xml",
        instructions=("reach the green disc",),
        success_text=f"The tip of the arm is within {100 * TOLERANCE:.0f} cm of the goal.",
        fps=10,
        substeps=10,
        horizon=40,
        cameras=("top", "front"),
        action=Field((2,), low=-1.0, high=1.0, unit="share of 2.5 rad/s", names=("shoulder", "elbow")),
        observation={
            STATE: ARM_FIELD,
            ENVIRONMENT_STATE: GOAL_FIELD,
        },
        uniforms=5,
        start=start,
        control=control,
        observe=observe,
        potential=potential,
        succeeded=succeeded,
        expert=ReachPlanarExpert,
        markers=markers,
    )
