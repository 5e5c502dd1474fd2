"""Stack: a six-joint arm puts the red cube on top of the blue one."""

import numpy as np

from robopolicy.core.faults import MOVED_GOAL
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from sims import arm, grasping
from sims.task import Arrays, Readings, Start, Task, flat_quaternion, scale, vector_field

EDGE = 2 * grasping.CUBE_HALF  # m
TOLERANCE = 0.018  # m
LOWER_AREA = [0.145, 0.03], [0.245, 0.11]  # m, where the blue cube may stand


def start(uniforms: np.ndarray) -> Start:
    """Red cube to the right, blue cube to the left, both slightly turned; tip above the middle.

    uniforms: [R, 9] -> qpos [R, 20] (six joints in rad, each cube's position in m and quaternion), goal [R, 0],
    control [R, 6] rad.
    """
    tip = scale(uniforms[:, 0:3], [0.16, -0.05, 0.08], [0.24, 0.05, 0.10])
    cube = scale(uniforms[:, 3:5], [0.145, -0.13], [0.245, -0.06])
    lower = scale(uniforms[:, 5:7], *LOWER_AREA)
    yaw, lower_yaw = scale(uniforms[:, 7], -0.4, 0.4), scale(uniforms[:, 8], -0.4, 0.4)
    height = np.full((len(uniforms), 1), grasping.START_HEIGHT)
    joints = arm.resting_joints(tip)
    poses = [cube, height, flat_quaternion(yaw), lower, height, flat_quaternion(lower_yaw)]
    return Start(
        qpos=np.concatenate([joints, *poses], axis=1),
        goal=np.empty((len(uniforms), 0)),
        control=joints,
    )


def move_lower(qpos: np.ndarray, qvel: np.ndarray, uniforms: np.ndarray) -> None:
    """Put the blue cube elsewhere in its area, at rest; qpos [R, 20], qvel [R, 18], uniforms [R, 4]."""
    qpos[:, 13:15], qpos[:, 15] = scale(uniforms[:, :2], *LOWER_AREA), grasping.START_HEIGHT
    qpos[:, 16:20], qvel[:, 12:18] = [1.0, 0.0, 0.0, 0.0], 0.0


def observe(readings: Readings) -> dict[str, np.ndarray]:
    """The arm's own state; the red cube's pose, velocity and two offsets; the blue cube's pose, velocity.

    readings: qpos [..., 20], qvel [..., 18], control [..., 6] -> `observation.state` [..., 19],
    `observation.environment_state` [..., 36]. The goal is one edge above the blue cube's current centre.
    """
    tip = arm.tip_position(readings.qpos)
    lower = readings.qpos[..., 13:20]
    goal = lower[..., :3] + np.array([0.0, 0.0, EDGE])
    cube = grasping.cube_features(readings.qpos[..., 6:13], readings.qvel[..., 6:12], tip, goal)
    other = [lower[..., :3], grasping.rotation_columns(lower[..., 3:]), readings.qvel[..., 12:18]]
    return {STATE: arm.proprioception(readings), ENVIRONMENT_STATE: np.concatenate([*cube, *other], axis=-1)}


def potential(observation: Arrays) -> np.ndarray:
    """Reach, grasp, lift by one cube, carry, release; see `placing_potential`.

    observation: state [..., 19], environment state [..., 36] -> [...] in 0 to 4.5.
    """
    return grasping.placing_potential(observation, EDGE)


def succeeded(observation: Arrays) -> np.ndarray:
    """The red cube rests on the blue one and the jaws are open.

    observation: state [..., 19], environment state [..., 36] -> [...] bool.
    """
    return grasping.cube_rests_at_goal(observation, TOLERANCE)


def task() -> Task:
    """Return the stacking task."""
    return Task(
        name="stack",
        model="arm/stack.xml",
        instructions=("stack the red cube on the blue cube",),
        success_text=(
            f"The red cube lies on the blue one, centres within {100 * TOLERANCE:.1f} cm horizontally, slower than "
            "5 cm/s, and the gripper has let go."
        ),
        fps=10,
        substeps=10,
        horizon=60,
        cameras=("front", "top", "wrist"),
        action=arm.ACTION,
        open_gripper=1.0,
        observation={
            STATE: arm.STATE_FIELD,
            ENVIRONMENT_STATE: vector_field(
                grasping.CUBE_NAMES
                + " lower_x lower_y lower_z lower_r11 lower_r21 lower_r31 lower_r12 lower_r22 lower_r32 "
                "lower_velocity_x lower_velocity_y lower_velocity_z lower_spin_x lower_spin_y lower_spin_z",
                "m, 1, m/s, rad/s",
            ),
        },
        uniforms=9,
        start=start,
        control=arm.control,
        observe=observe,
        potential=potential,
        succeeded=succeeded,
        expert=lambda: grasping.PlaceExpert(carry_height=0.095, precision=0.004),
        disturbances={MOVED_GOAL: move_lower},
    )
