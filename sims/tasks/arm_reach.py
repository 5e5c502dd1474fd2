"""Arm reach: a six-joint arm moves its tip to a point in the air."""

import numpy as np

from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Observation
from robopolicy.core.world import Rows
from sims import arm
from sims.task import Arrays, Markers, Readings, Start, Task, elements, flat_quaternion, newest, scale, vector_field

TOLERANCE = 0.015  # m

GOAL_FIELD = vector_field("goal_x goal_y goal_z tip_to_goal_x tip_to_goal_y tip_to_goal_z", "m")
GOAL = elements(GOAL_FIELD, "goal_x goal_y goal_z")
TO_GOAL = elements(GOAL_FIELD, "tip_to_goal_x tip_to_goal_y tip_to_goal_z")


def start(uniforms: np.ndarray) -> Start:
    """Tip near the middle, goal to one of its sides, at least 4 cm away.

    uniforms: [R, 7] -> qpos and control [R, 6] rad, goal [R, 3] m.
    """
    tip = scale(uniforms[:, 0:3], [0.16, -0.03, 0.04], [0.23, 0.03, 0.09])
    goal = scale(uniforms[:, 3:6], [0.14, 0.07, 0.03], [0.25, 0.14, 0.095])
    goal[:, 1] *= np.where(uniforms[:, 6] < 0.5, -1.0, 1.0)
    joints = arm.resting_joints(tip)
    return Start(qpos=joints, goal=goal, control=joints)


def observe(readings: Readings) -> dict[str, np.ndarray]:
    """The arm's own state; the goal and the offset from the tip to it.

    readings: qpos, qvel and control [..., 6], goal [..., 3] -> `observation.state` [..., 19],
    `observation.environment_state` [..., 6] m.
    """
    offset = readings.goal - arm.tip_position(readings.qpos)
    environment = np.concatenate([readings.goal, offset], axis=-1)
    return {STATE: arm.proprioception(readings), ENVIRONMENT_STATE: environment}


def potential(observation: Arrays) -> np.ndarray:
    """Progress potential: rises by 10 per metre that the tip gets closer to the goal; environment state [..., 6] ->
    [...].
    """
    return -10.0 * _distance(observation)


def succeeded(observation: Arrays) -> np.ndarray:
    """The tip is within the tolerance of the goal: environment state [..., 6] -> [...] bool."""
    return _distance(observation) < TOLERANCE


def markers(goal: np.ndarray) -> Markers:
    """The ball floats at the goal: [R, 3] m -> positions [R, 1, 3], quaternions [R, 1, 4]."""
    position = goal[:, None]
    return Markers(position, flat_quaternion(np.zeros(position.shape[:2])))


class ArmReachExpert:
    """Moves the tip target straight to the goal."""

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; there is no state. rows: [R] indices, ignored."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, 4] for an observation [B, H, ...]; the gripper closes, because the goal is a point."""
        target = arm.parts(newest(observation, STATE))["tip_target"]
        move = np.clip((newest(observation, ENVIRONMENT_STATE)[:, GOAL] - target) / arm.TIP_STEP, -1.0, 1.0)
        return np.concatenate([move, np.full((len(move), 1), -1.0)], axis=1)


def _distance(observation: Arrays) -> np.ndarray:
    """Return the distance from the tip to the goal, [...] m."""
    offset = observation[ENVIRONMENT_STATE][..., TO_GOAL]
    return np.sqrt((offset * offset).sum(axis=-1))


def task() -> Task:
    """Return the arm-reach task."""
    return Task(
        name="arm_reach",
        model="arm/arm_reach.xml",
        instructions=("move the gripper to the green ball",),
        success_text=f"The gripper's tip is within {100 * TOLERANCE:.1f} cm of the ball's centre.",
        fps=10,
        substeps=10,
        horizon=40,
        cameras=("front", "top", "wrist"),
        action=arm.ACTION,
        observation={
            STATE: arm.STATE_FIELD,
            ENVIRONMENT_STATE: GOAL_FIELD,
        },
        uniforms=7,
        start=start,
        control=arm.control,
        observe=observe,
        potential=potential,
        succeeded=succeeded,
        expert=ArmReachExpert,
        markers=markers,
    )
