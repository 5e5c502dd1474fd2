"""Shared parts of the cube-carrying tasks: cube observation, progress potential, and the scripted expert.

The first 21 numbers of their environment state are the same, see `CUBE_NAMES`; "goal" is the target position of the
cube's centre. Positions are metres in the table's frame; "..." is any leading axes.
"""

from dataclasses import dataclass

import numpy as np

from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Observation
from robopolicy.core.world import Rows
from sims.arm import GRIPPER_HOLDS, GRIPPER_OPEN, TIP_HIGH, TIP_STEP, parts
from sims.task import Arrays, elements, newest, vector_field

CUBE_HALF = 0.02
"""Half the edge of every cube, in metres."""
START_HEIGHT = CUBE_HALF - 1.1471e-5
"""Height of a cube's centre at the start of an episode, in metres, including the depth to which its weight presses it
into the table.

At CUBE_HALF the distance to the table would be 0, and rounding would decide whether there is a contact. Without a
contact, a cube falls by 1 mm in the first physics step.
"""

CUBE_NAMES = (
    "cube_x cube_y cube_z cube_r11 cube_r21 cube_r31 cube_r12 cube_r22 cube_r32 "
    "cube_velocity_x cube_velocity_y cube_velocity_z cube_spin_x cube_spin_y cube_spin_z "
    "tip_to_cube_x tip_to_cube_y tip_to_cube_z cube_to_goal_x cube_to_goal_y cube_to_goal_z"
)

_CUBE_FIELD = vector_field(CUBE_NAMES, "m, 1, m/s, rad/s")
CUBE = elements(_CUBE_FIELD, "cube_x cube_y cube_z")
VELOCITY = elements(_CUBE_FIELD, "cube_velocity_x cube_velocity_y cube_velocity_z")
TO_CUBE = elements(_CUBE_FIELD, "tip_to_cube_x tip_to_cube_y tip_to_cube_z")
TO_GOAL = elements(_CUBE_FIELD, "cube_to_goal_x cube_to_goal_y cube_to_goal_z")
"""Slices of these offsets in the environment state, [..., 3] each."""

HELD_WITHIN = 0.012
"""Maximum distance of the cube's centre from the tip, in metres, for a grasped cube."""
RELEASED = GRIPPER_HOLDS + 0.15
"""Gripper angle, in radians, beyond which the jaws release a cube."""
HOVER = 0.055
"""Height of the tip over the cube's centre, in metres, at which a hand approaches a cube."""


def rotation_columns(quaternion: np.ndarray) -> np.ndarray:
    """Return the first two columns of the rotation matrix, [..., 4] (w first) -> [..., 6] (Zhou et al. 2019).

    Unlike quaternions and angles, this representation is continuous and unique, which networks learn better.
    """
    w, x, y, z = (quaternion[..., index] for index in range(4))
    first = [1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)]
    second = [2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)]
    return np.stack([*first, *second], axis=-1)


def cube_features(pose: np.ndarray, velocity: np.ndarray, tip: np.ndarray, goal: np.ndarray) -> list[np.ndarray]:
    """Return the parts named by CUBE_NAMES; pose [..., 7], velocity [..., 6], tip and goal [..., 3].

    pose: position in m and quaternion (w first); velocity: m/s and rad/s; the five parts: [..., 3], [..., 6],
    [..., 6], [..., 3], [..., 3].
    """
    cube = pose[..., :3]
    return [cube, rotation_columns(pose[..., 3:7]), velocity, cube - tip, goal - cube]


def placing_potential(observation: Arrays, lift: float) -> np.ndarray:
    """Return progress from 0 to 4.5: approach the cube, close on it, lift it by `lift` metres, carry it, release it.

    At the goal the first two terms stay full however the hand moves away, so releasing has no penalty. observation:
    `observation.state` [..., 19], `observation.environment_state` [..., >= 21] -> [...].
    """
    # Each term goes from 0 to its weight: clips are 1 where a part is done; tanh over 0.1 m lets a far cube still draw
    # the hand a little. All lengths are metres.
    state, environment = observation[STATE], observation[ENVIRONMENT_STATE]
    gripper = parts(state)["gripper"]
    reach = np.maximum(length(environment[..., TO_CUBE]) - HELD_WITHIN, 0.0)
    distance = length(environment[..., TO_GOAL])
    lift_progress = np.clip((environment[..., CUBE][..., 2] - CUBE_HALF) / lift, 0.0, 1.0)
    closed = np.clip(1.0 - np.abs(gripper - GRIPPER_HOLDS) / (GRIPPER_OPEN - GRIPPER_HOLDS), 0.0, 1.0)
    placement = np.clip((0.04 - distance) / 0.03, 0.0, 1.0)
    release = np.clip((gripper - GRIPPER_HOLDS) / (RELEASED - GRIPPER_HOLDS), 0.0, 1.0)
    near = 1.0 - np.tanh(reach / 0.1)
    grasped = np.clip(1.0 - reach / 0.02, 0.0, 1.0) * closed
    carrying = lift_progress * (1.0 - np.tanh(distance / 0.1))
    return (
        0.5 * np.maximum(near, placement)
        + 0.5 * np.maximum(grasped, placement)
        + lift_progress
        + 2.0 * carrying
        + 0.5 * placement * release
    )


def cube_rests_at_goal(observation: Arrays, tolerance: float) -> np.ndarray:
    """Return a mask [...] bool: the cube is within `tolerance` of the goal, at its height, stationary and released.

    observation: `observation.state` [..., 19], `observation.environment_state` [..., >= 21]; tolerance: horizontal, m;
    "at its height" is within 8 mm, "stationary" is slower than 5 cm/s.
    """
    state, environment = observation[STATE], observation[ENVIRONMENT_STATE]
    offset = environment[..., TO_GOAL]
    at_goal = (length(offset[..., :2]) < tolerance) & (np.abs(offset[..., 2]) < 0.008)
    is_still = length(environment[..., VELOCITY]) < 0.05
    return at_goal & is_still & (parts(state)["gripper"] > RELEASED)


def length(vector: np.ndarray) -> np.ndarray:
    """Euclidean length over the last axis, [..., n] -> [...], in the unit of the vectors."""
    return np.sqrt((vector * vector).sum(axis=-1))


@dataclass(frozen=True)
class PlaceExpert:
    """Picks the cube up and places it at the goal; it depends only on the current observation, so it recovers from any
    disturbance. `recover` goes back to where demonstrations approach the cube, or carry it.

    carry_height: height of the tip while the cube is carried, m; precision: horizontal error at which lowering starts,
    m.
    """

    carry_height: float
    precision: float = 0.006

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; there is no state. rows: [R] indices, ignored."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, 4], tip moves and gripper, for an observation [B, H, ...]."""
        state, environment = newest(observation, STATE), newest(observation, ENVIRONMENT_STATE)
        arm = parts(state)
        cube = environment[:, CUBE]
        to_cube = environment[:, TO_CUBE]
        to_goal = environment[:, TO_GOAL]
        between, at_goal, is_held = self._places(arm["gripper"], to_cube, to_goal)
        # Where the tip is to go, later lines overruling earlier ones: carry a held cube, else approach; wait while the
        # jaws close on the cube; at the goal wait while they open, then rise.
        tip = np.where(is_held[:, None], self._carry(arm["tip"], to_goal), _approach(arm["tip"], cube))
        tip = np.where((between & ~is_held)[:, None], arm["tip_target"], tip)
        let_go = at_goal & (arm["gripper"] > RELEASED)
        tip[:, 2] = np.where(at_goal, np.where(let_go, self.carry_height, arm["tip_target"][:, 2]), tip[:, 2])
        tip[:, :2] = np.where(at_goal[:, None], arm["tip_target"][:, :2], tip[:, :2])
        move = np.clip((tip - arm["tip_target"]) / TIP_STEP, -1.0, 1.0)
        gripper = np.where(between & ~at_goal, -1.0, 1.0)
        return np.concatenate([move, gripper[:, None]], axis=1)

    def recover(self, observation: Observation) -> np.ndarray:
        """Return actions [B, 4] that lift a held cube, else open the jaws and rise, for an observation [B, H, ...]."""
        state, environment = newest(observation, STATE), newest(observation, ENVIRONMENT_STATE)
        arm = parts(state)
        is_held = self._places(arm["gripper"], environment[:, TO_CUBE], environment[:, TO_GOAL])[2]
        move = np.zeros_like(arm["tip_target"])
        move[:, 2] = np.clip((self._height(environment, is_held) - arm["tip_target"][:, 2]) / TIP_STEP, 0.0, 1.0)
        return np.concatenate([move, np.where(is_held, -1.0, 1.0)[:, None]], axis=1)

    def recovered(self, observation: Observation) -> np.ndarray:
        """Return whether the cube can be approached, or carried on, [B] bool, for an observation [B, H, ...]."""
        state, environment = newest(observation, STATE), newest(observation, ENVIRONMENT_STATE)
        arm = parts(state)
        is_held = self._places(arm["gripper"], environment[:, TO_CUBE], environment[:, TO_GOAL])[2]
        is_up = arm["tip"][:, 2] > self._height(environment, is_held) - 0.01
        return is_up & (is_held | (arm["gripper"] > RELEASED))

    def _height(self, environment: np.ndarray, is_held: np.ndarray) -> np.ndarray:
        """Return the height [B] to which a hand goes back: that of carrying, or of hovering over the cube, m."""
        hovering = np.minimum(environment[:, CUBE][:, 2] + HOVER, TIP_HIGH[2])
        return np.where(is_held, self.carry_height, hovering)

    def _places(
        self, gripper: np.ndarray, to_cube: np.ndarray, to_goal: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return whether the cube is between the jaws (a box about the tip, m), at the goal, held, [B] bool each."""
        between = (
            (np.abs(to_cube[:, 0]) < 0.015)
            & (to_cube[:, 1] > -0.014)
            & (to_cube[:, 1] < 0.018)
            & (np.abs(to_cube[:, 2]) < 0.015)
        )
        at_goal = (length(to_goal[:, :2]) < 1.5 * self.precision) & (np.abs(to_goal[:, 2]) < 0.006)
        return between, at_goal, between & (gripper < GRIPPER_HOLDS + 0.06) & ~at_goal

    def _carry(self, tip: np.ndarray, to_goal: np.ndarray) -> np.ndarray:
        """Move up, across once the cube clears its support, then down: tip targets [B, 3], all [B, 3] m."""
        target = tip + to_goal
        above = length(to_goal[:, :2]) < self.precision
        clear = to_goal[:, 2] < -0.006
        target[:, :2] = np.where((clear | above)[:, None], target[:, :2], tip[:, :2])
        target[:, 2] = np.where(above, target[:, 2] - 0.001, self.carry_height)
        return target


def _approach(tip: np.ndarray, cube: np.ndarray) -> np.ndarray:
    """Hover over the cube with clearance for the fixed jaw, then descend: tip targets [B, 3] from two [B, 3], m."""
    target = cube - np.array([0.0, 0.008, 0.0])
    is_aside = length(target[:, :2] - tip[:, :2]) > 0.008
    target[:, 2] += np.where(is_aside, HOVER, 0.0)
    return target
