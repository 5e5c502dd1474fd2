"""Pick-and-place: a six-joint arm lifts a cube from the table and puts it on the green mark on a shelf.

The shelf is a raised platform, so the cube cannot be pushed to the mark: it has to be picked up.
"""

import numpy as np

from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from sims import arm, grasping
from sims.task import Arrays, Markers, Readings, Start, Task, flat_quaternion, scale, vector_field

SHELF_HEIGHT = 0.025  # m, the platform's top
TOLERANCE = 0.03  # m


def start(uniforms: np.ndarray) -> Start:
    """Cube on the table in front of the arm and slightly turned, goal on the shelf, tip above the middle.

    uniforms: [R, 8] -> qpos [R, 13] (six joints in rad, the cube's position in m and quaternion), goal [R, 3] m,
    control [R, 6] rad.
    """
    tip = scale(uniforms[:, 0:3], [0.16, -0.06, 0.07], [0.24, 0.06, 0.10])
    cube = scale(uniforms[:, 3:5], [0.14, -0.14], [0.25, -0.015])
    yaw = scale(uniforms[:, 5], -0.4, 0.4)
    goal = scale(uniforms[:, 6:8], [0.14, 0.10], [0.255, 0.14])
    height = np.full((len(uniforms), 1), grasping.START_HEIGHT)
    joints = arm.resting_joints(tip)
    return Start(
        qpos=np.concatenate([joints, cube, height, flat_quaternion(yaw)], axis=1),
        goal=np.concatenate([goal, SHELF_HEIGHT + height], axis=1),
        control=joints,
    )


def observe(readings: Readings) -> dict[str, np.ndarray]:
    """The arm's own state; the cube's pose, velocity and offsets to tip and goal, and the goal.

    readings: qpos [..., 13], qvel [..., 12], control [..., 6], goal [..., 3] -> `observation.state` [..., 19],
    `observation.environment_state` [..., 24].
    """
    tip = arm.tip_position(readings.qpos)
    cube = grasping.cube_features(readings.qpos[..., 6:13], readings.qvel[..., 6:12], tip, readings.goal)
    environment = np.concatenate([*cube, readings.goal], axis=-1)
    return {STATE: arm.proprioception(readings), ENVIRONMENT_STATE: environment}


def potential(observation: Arrays) -> np.ndarray:
    """Reach, grasp, lift to the shelf's height, carry, release; see `placing_potential`.

    observation: state [..., 19], environment state [..., 24] -> [...] in 0 to 4.5.
    """
    return grasping.placing_potential(observation, SHELF_HEIGHT)


def succeeded(observation: Arrays) -> np.ndarray:
    """The cube rests on the mark and the jaws are open.

    observation: state [..., 19], environment state [..., 24] -> [...] bool.
    """
    return grasping.cube_rests_at_goal(observation, TOLERANCE)


def markers(goal: np.ndarray) -> Markers:
    """The disc lies on the shelf under the goal: [R, 3] m -> positions [R, 1, 3], quaternions [R, 1, 4]."""
    position = np.stack([goal[:, 0], goal[:, 1], np.full(len(goal), SHELF_HEIGHT + 0.0006)], axis=-1)[:, None]
    return Markers(position, flat_quaternion(np.zeros(position.shape[:2])))


def task() -> Task:
    """Return the pick-and-place task."""
    return Task(
        name="pick_place",
        model="arm/pick_place.xml",
        instructions=("pick up the blue cube and put it on the green mark",),
        success_text=(
            f"The cube's centre is within {100 * TOLERANCE:.0f} cm of the mark's, the cube lies on the shelf slower "
            "than 5 cm/s, and the gripper has let go."
        ),
        fps=10,
        substeps=10,
        horizon=60,
        cameras=("front", "top", "wrist"),
        action=arm.ACTION,
        open_gripper=1.0,
        observation={
            STATE: arm.STATE_FIELD,
            ENVIRONMENT_STATE: vector_field(grasping.CUBE_NAMES + " goal_x goal_y goal_z", "m, 1, m/s, rad/s"),
        },
        uniforms=8,
        start=start,
        control=arm.control,
        observe=observe,
        potential=potential,
        succeeded=succeeded,
        expert=lambda: grasping.PlaceExpert(carry_height=0.075),
        markers=markers,
    )
