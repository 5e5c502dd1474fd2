"""Six-joint arm of the tabletop tasks: closed-form kinematics, Cartesian control, and proprioception.

The arm has the joint names, limits and proportions of the SO-101 (TheRobotStudio); its MJCF is assets/arm/arm.xml.
During a task the hand points straight down, so four joints position the tip and wrist_roll turns the hand. Positions
are metres in the table's frame (x away from the base, y to its left, z up), angles radians. "..." is any leading axes.
"""

from collections.abc import Mapping

import numpy as np

from robopolicy.core.spec import Field
from sims.task import Readings, elements, scale, vector_field

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
JOINT_LOW = np.array([-1.92, -1.745, -1.69, -1.658, -2.74, -0.1745])
JOINT_HIGH = np.array([1.92, 1.745, 1.69, 1.658, 2.84, 1.745])

SHOULDER_OFFSET, SHOULDER_HEIGHT = 0.03, 0.14
"""Position of the shoulder_lift axis: outward from the pan axis and above the table."""
UPPER_ARM = 0.155
"""Distance from shoulder_lift to elbow_flex, m."""
FOREARM = 0.16
"""Distance from elbow_flex to wrist_flex."""
HAND = 0.14
"""Distance from wrist_flex to the tip."""

TIP_LOW = np.array([0.13, -0.15, 0.014])
TIP_HIGH = np.array([0.26, 0.15, 0.10])
"""Box that tip targets are clipped to; every point can be reached with the hand pointing down."""

GRIPPER_CLOSED, GRIPPER_OPEN = 0.0, 0.95
"""Gripper joint targets of the gripper action -1 and 1; `GRIPPER_HOLDS` is the joint angle around a 4 cm cube."""
GRIPPER_HOLDS = 0.45

TIP_STEP = 0.02
"""Largest move of the tip target along each axis in one control step."""

ACTION = Field(
    (4,),
    low=-1.0,
    high=1.0,
    unit=f"x, y, z: 1 moves the tip target by {TIP_STEP} m; gripper: -1 closed, 1 open",
    names=("x", "y", "z", "gripper"),
)

STATE_FIELD = vector_field(
    " ".join(f"{joint}_{kind}" for kind in ("position", "velocity") for joint in JOINTS)
    + " tip_x tip_y tip_z tip_target_x tip_target_y tip_target_z gripper_target",
    "rad, rad/s, m, m, rad",
)
_POSITIONS, _VELOCITIES = (
    elements(STATE_FIELD, " ".join(f"{joint}_{kind}" for joint in JOINTS)) for kind in ("position", "velocity")
)
_TIP, _TIP_TARGET = (elements(STATE_FIELD, f"{tip}_x {tip}_y {tip}_z") for tip in ("tip", "tip_target"))
_GRIPPER_TARGET = elements(STATE_FIELD, "gripper_target")
_TARGET_GRID = 9  # decimals: targets lie on a nanometre grid, so that reading them back from joint targets is exact


def tip_position(joints: np.ndarray) -> np.ndarray:
    """Return the tip position, [..., >= 4 joints] rad -> [..., 3] m; exact for every configuration."""
    pan, lift, elbow, wrist = (joints[..., index] for index in range(4))
    # Lift, elbow and wrist turn in one vertical plane, so their angles add up: first where the tip lies in that plane
    # (reach outward, height), then the turn of the plane about the pan axis.
    forearm = lift + elbow
    hand = forearm + wrist
    reach = SHOULDER_OFFSET + UPPER_ARM * np.sin(lift) + FOREARM * np.cos(forearm) + HAND * np.cos(hand)
    height = SHOULDER_HEIGHT + UPPER_ARM * np.cos(lift) - FOREARM * np.sin(forearm) - HAND * np.sin(hand)
    return np.stack([reach * np.cos(pan), reach * np.sin(pan), height], axis=-1)


def joint_targets(tip: np.ndarray, yaw: np.ndarray | float = 0.0) -> np.ndarray:
    """Return the five joint angles that place the tip at `tip` with the hand pointing down, [..., 3] -> [..., 5].

    tip: m; yaw: [...] rotation of the hand about the vertical; 0 opens the jaws along y; angles: rad. Points beyond
    reach are approached as far as the arm reaches; every point inside TIP_LOW..TIP_HIGH is within reach. Two links in
    closed form, elbow up.
    """
    x = tip[..., 0]
    y = tip[..., 1]
    z = tip[..., 2]
    pan = np.arctan2(y, x)
    # The wrist is a hand's length above the tip: upper arm and forearm have to span (outward, upward) from the
    # shoulder. The law of cosines gives the fold between them; beyond reach its cosine leaves [-1, 1] and is clipped.
    outward = np.hypot(x, y) - SHOULDER_OFFSET
    upward = z + HAND - SHOULDER_HEIGHT
    cosine = (outward**2 + upward**2 - UPPER_ARM**2 - FOREARM**2) / (2 * UPPER_ARM * FOREARM)
    fold = np.arccos(np.clip(cosine, -1.0, 1.0))
    lift = np.arctan2(outward, upward) - np.arctan2(FOREARM * np.sin(fold), UPPER_ARM + FOREARM * np.cos(fold))
    elbow = fold - np.pi / 2
    return np.stack([pan, lift, elbow, np.pi / 2 - lift - elbow, pan - yaw], axis=-1)


def control(
    actions: np.ndarray, previous: np.ndarray, low: np.ndarray = TIP_LOW, high: np.ndarray = TIP_HIGH
) -> np.ndarray:
    """Turn tip moves and gripper openings into joint targets: actions [R, C, 4], previous [R, 6] -> [R, C, 6] rad.

    Moves are added to the current tip target (not to the measured tip) and clipped to the workspace box from low to
    high [3] m. Every point of the box must be within reach, so a whole chunk is determined before it runs. For a policy
    with joint-angle actions, `joint_targets` gives the targets.
    """
    tip = np.round(tip_position(previous), _TARGET_GRID)
    targets = np.empty((*actions.shape[:2], 3))
    for step in range(actions.shape[1]):
        tip = np.round(np.clip(tip + TIP_STEP * actions[:, step, :3], low, high), _TARGET_GRID)
        targets[:, step] = tip
    gripper = scale((actions[..., 3:] + 1) / 2, GRIPPER_CLOSED, GRIPPER_OPEN)
    return np.concatenate([joint_targets(targets), gripper], axis=-1)


def resting_joints(tip: np.ndarray) -> np.ndarray:
    """Return the joints of an arm that rests at `tip` with an open gripper, [..., 3] m -> [..., 6] rad."""
    gripper = np.full((*tip.shape[:-1], 1), GRIPPER_OPEN)
    return np.concatenate([joint_targets(np.round(tip, _TARGET_GRID)), gripper], axis=-1)


def proprioception(readings: Readings) -> np.ndarray:
    """Return `observation.state`, [..., 19]: joint positions and velocities, tip, tip target, gripper target."""
    joints, targets = readings.qpos[..., :6], readings.control
    return np.concatenate(
        [joints, readings.qvel[..., :6], tip_position(joints), tip_position(targets), targets[..., 5:6]], axis=-1
    )


def parts(state: np.ndarray) -> Mapping[str, np.ndarray]:
    """Split `observation.state` into named parts: joints, velocities, tip, tip_target (vectors), gripper,
    gripper_target.

    state: [..., 19] -> joints [..., 6] rad, velocities [..., 6] rad/s, tip and tip_target [..., 3] m, gripper and
    gripper_target [...] rad.
    """
    return {
        "joints": state[..., _POSITIONS],
        "velocities": state[..., _VELOCITIES],
        "gripper": state[..., _POSITIONS][..., -1],
        "tip": state[..., _TIP],
        "tip_target": state[..., _TIP_TARGET],
        "gripper_target": state[..., _GRIPPER_TARGET][..., 0],
    }
