"""robosuite 1.4's operational-space controller of a 7-joint arm (OSC_POSE), compiled.

The torques of one physics step: two uncoupled tasks, a force that moves the gripper to a position and a torque that
turns it to an orientation, each weighted by its own operational-space mass matrix; gravity compensation; and, in the
null space of both, a spring to the arm's reset posture (Khatib 1987). Parity with robosuite is tested step by step.
"""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import mujoco
import numpy as np


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function, and store the result for later processes; without numba it runs as it is, slowly."""
    try:
        return importlib.import_module("numba").njit(cache=True)(function)
    except ImportError:
        return function


POSITION, ROTATION = 0, 3
JACOBIAN, MASS = 12, 54
ANGLES, SPEEDS = 103, 110
ARM_SIZE = 117
"""Layout of an arm's state [117]: position (3), rotation matrix (9), Jacobian (6 x 7), mass matrix (7 x 7), joint
angles and speeds (7 each).
"""
STIFFNESS, POSTURE_STIFFNESS = 150.0, 10.0
"""Stiffness of robosuite's OSC_POSE in its task and in the null space; damping is critical."""
FINGER_SPEED = 0.01
"""Change of a finger's command, whose range is -1 to 1, per physics step."""
STEP, TURN = 0.05, 0.5
"""Metres and radians that an action of 1 moves the goal in one control step."""


@_compiled
def read_arm(
    arm: np.ndarray,
    position: np.ndarray,
    rotation: np.ndarray,
    axes: np.ndarray,
    anchors: np.ndarray,
    mass: np.ndarray,
    place: np.ndarray,
    angles: np.ndarray,
    speeds: np.ndarray,
) -> None:  # pragma: no cover (compiled)
    """Write the state of an arm, `arm` [117], from MuJoCo's arrays.

    position [3] and rotation [9] of the gripper's site; axes, anchors: [7, 3] of the hinges in the world; mass: [nM]
    MuJoCo's sparse mass matrix; place: [7, 7] int, index of every element of the arm's block in it; angles, speeds:
    [7].
    """
    arm[POSITION:ROTATION] = position
    arm[ROTATION:JACOBIAN] = rotation
    for joint in range(7):
        x, y, z = axes[joint]
        rx, ry = position[0] - anchors[joint, 0], position[1] - anchors[joint, 1]
        rz = position[2] - anchors[joint, 2]
        arm[JACOBIAN + joint] = y * rz - z * ry
        arm[JACOBIAN + 7 + joint] = z * rx - x * rz
        arm[JACOBIAN + 14 + joint] = x * ry - y * rx
        for part in range(3):
            arm[JACOBIAN + 21 + 7 * part + joint] = axes[joint, part]
        for other in range(7):
            arm[MASS + 7 * joint + other] = mass[place[joint, other]]
    arm[ANGLES:SPEEDS] = angles
    arm[SPEEDS:ARM_SIZE] = speeds


@_compiled
def _inverse(matrix: np.ndarray, out: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Write the inverse of a positive definite matrix [n, n] into `out`, by Cholesky's decomposition."""
    n = matrix.shape[0]
    lower = np.zeros((n, n))
    for i in range(n):
        for j in range(i + 1):
            total = matrix[i, j]
            for k in range(j):
                total -= lower[i, k] * lower[j, k]
            lower[i, j] = np.sqrt(max(total, 1e-300)) if i == j else total / lower[j, j]
    for column in range(n):
        for i in range(n):
            total = 1.0 if i == column else 0.0
            for k in range(i):
                total -= lower[i, k] * out[k, column]
            out[i, column] = total / lower[i, i]
        for i in range(n - 1, -1, -1):
            total = out[i, column]
            for k in range(i + 1, n):
                total -= lower[k, i] * out[k, column]
            out[i, column] = total / lower[i, i]


@_compiled
def arm_torques(
    arm: np.ndarray, goal: np.ndarray, posture: np.ndarray, bias: np.ndarray, limits: np.ndarray, out: np.ndarray
) -> None:  # pragma: no cover (compiled)
    """Write the joint torques, Nm, into `out` [7].

    arm: [117], see `read_arm`; goal: [12], position and rotation matrix; posture: [7] joint angles; bias: [7] torques
    of gravity and Coriolis forces; limits: [7, 2].
    """
    jacobian, mass = arm[JACOBIAN:MASS].reshape(6, 7), arm[MASS:ANGLES].reshape(7, 7)
    mass_inverse = np.zeros((7, 7))
    _inverse(mass, mass_inverse)
    along = np.zeros((7, 6))  # M^-1 J^T
    for i in range(7):
        for k in range(6):
            total = 0.0
            for j in range(7):
                total += mass_inverse[i, j] * jacobian[k, j]
            along[i, k] = total
    inertia_inverse = np.zeros((6, 6))  # J M^-1 J^T
    for i in range(6):
        for k in range(6):
            total = 0.0
            for j in range(7):
                total += jacobian[i, j] * along[j, k]
            inertia_inverse[i, k] = total
    inertia = np.zeros((6, 6))
    inertia_position, inertia_rotation = np.zeros((3, 3)), np.zeros((3, 3))
    _inverse(inertia_inverse, inertia)
    _inverse(inertia_inverse[:3, :3], inertia_position)
    _inverse(inertia_inverse[3:, 3:], inertia_rotation)

    wanted = np.zeros(6)
    for k in range(3):  # half the sum of the cross products of both frames' columns
        x, y, z = arm[ROTATION + k : JACOBIAN : 3]
        gx, gy, gz = goal[3 + k :: 3]
        wanted[3] += 0.5 * (y * gz - z * gy)
        wanted[4] += 0.5 * (z * gx - x * gz)
        wanted[5] += 0.5 * (x * gy - y * gx)
        wanted[k] = goal[k] - arm[POSITION + k]
    damping = 2.0 * np.sqrt(STIFFNESS)
    for i in range(6):
        speed = 0.0
        for j in range(7):
            speed += jacobian[i, j] * arm[SPEEDS + j]
        wanted[i] = STIFFNESS * wanted[i] - damping * speed
    wrench = np.zeros(6)
    for i in range(3):
        for k in range(3):
            wrench[i] += inertia_position[i, k] * wanted[k]
            wrench[3 + i] += inertia_rotation[i, k] * wanted[3 + k]

    own_damping = 2.0 * np.sqrt(POSTURE_STIFFNESS)
    spring = np.zeros(7)
    for i in range(7):
        for j in range(7):
            error = POSTURE_STIFFNESS * (posture[j] - arm[ANGLES + j]) - own_damping * arm[SPEEDS + j]
            spring[i] += mass[i, j] * error
    # N^T spring with N = 1 - M^-1 J^T L J: first L (M^-1 J^T)^T spring, then J^T of it.
    projected, along_task = np.zeros(6), np.zeros(6)
    for k in range(6):
        for i in range(7):
            projected[k] += along[i, k] * spring[i]
    for i in range(6):
        for k in range(6):
            along_task[i] += inertia[i, k] * projected[k]
    for j in range(7):
        torque = bias[j] + spring[j]
        for k in range(6):
            torque += jacobian[k, j] * (wrench[k] - along_task[k])
        out[j] = min(max(torque, limits[j, 0]), limits[j, 1])


@_compiled
def control(
    arm: np.ndarray,
    position: np.ndarray,
    rotation: np.ndarray,
    axes: np.ndarray,
    anchors: np.ndarray,
    mass: np.ndarray,
    place: np.ndarray,
    angles: np.ndarray,
    speeds: np.ndarray,
    goal: np.ndarray,
    posture: np.ndarray,
    bias: np.ndarray,
    limits: np.ndarray,
    torques: np.ndarray,
    fingers: np.ndarray,
    finger_range: np.ndarray,
    commands: np.ndarray,
    close: float,
    fresh: bool,
) -> None:  # pragma: no cover (compiled)
    """Write the controls of a physics step: torques [7] of the arm and commands [2] of the fingers.

    fingers: [2] from -1 to 1, moved by FINGER_SPEED to close (1), open (-1) or not at all (0); finger_range: [2, 2];
    fresh: whether to read the arm's state first. The others: see `read_arm` and `arm_torques`.
    """
    if fresh:
        read_arm(arm, position, rotation, axes, anchors, mass, place, angles, speeds)
    arm_torques(arm, goal, posture, bias, limits, torques)
    for k in range(2):
        fingers[k] = min(max(fingers[k] + (2 * k - 1) * FINGER_SPEED * close, -1.0), 1.0)
        low, high = finger_range[k]
        commands[k] = 0.5 * (high + low) + 0.5 * (high - low) * fingers[k]


@_compiled
def _single_precision(quaternion: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """Return the rotation matrix [3, 3] of a quaternion w, x, y, z [4], computed in single precision.

    robosuite does so, in compiled code, where 1 minus a number has double precision: goals agree to the last digit.
    """
    part = quaternion.astype(np.float32)
    part *= np.sqrt(2.0 / np.dot(part, part))
    w, x, y, z = part
    return np.array(
        [
            [1.0 - y * y - z * z, x * y - z * w, x * z + y * w],
            [x * y + z * w, 1.0 - x * x - z * z, y * z - x * w],
            [x * z - y * w, y * z + x * w, 1.0 - x * x - y * y],
        ]
    )


def turned(rotation: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Return rotation matrices [9] turned in the world frame by a rotation vector [3], rad."""
    angle = np.linalg.norm(turn)
    matrix = _single_precision(np.array([np.cos(angle / 2), *(turn / angle * np.sin(angle / 2))]))
    return (matrix @ rotation.reshape(3, 3)).reshape(9)


class ArmIndices:
    """Where a model holds a 7-joint arm and its two fingers.

    site: between the fingertips; joints [7], actuators [7]: of the arm; finger_actuators: [2]. Slices: hinges, qpos,
    dofs of the joints, ctrl and finger_ctrl of the actuators; limits [7, 2] and finger_range [2, 2] of their controls;
    mass: [7, 7] places of the arm's block in MuJoCo's sparse mass matrix.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        site: int,
        joints: Sequence[int],
        actuators: Sequence[int],
        finger_actuators: Sequence[int],
    ):
        self.site, self.hinges = site, consecutive(joints)
        self.qpos, self.dofs = consecutive(model.jnt_qposadr[joints]), consecutive(model.jnt_dofadr[joints])
        self.ctrl, self.finger_ctrl = consecutive(actuators), consecutive(finger_actuators)
        self.limits = model.actuator_ctrlrange[self.ctrl].copy()
        self.finger_range = model.actuator_ctrlrange[self.finger_ctrl].copy()
        dofs = range(self.dofs.start, self.dofs.stop)
        self.mass = np.array([[_mass_place(model, i, j) for j in dofs] for i in dofs])


def _mass_place(model: mujoco.MjModel, row: int, column: int) -> int:
    """Return the index of two degrees of freedom in MuJoCo's sparse mass matrix."""
    row, column = max(row, column), min(row, column)
    start, count = model.M_rowadr[row], model.M_rownnz[row]
    return int(start + np.flatnonzero(model.M_colind[start : start + count] == column)[0])


def consecutive(numbers: Sequence[int] | np.ndarray) -> slice:
    """Return consecutive indices [n] as a slice, whose result is a view."""
    first, last = int(numbers[0]), int(numbers[-1])
    assert list(numbers) == list(range(first, last + 1))
    return slice(first, last + 1)


class Arm:
    """An arm in MuJoCo's data, with views that its controller reads and writes in every physics step.

    state: [117], as it was last read; posture: [7] joint angles that the free joint is pulled to.
    """

    def __init__(self, indices: ArmIndices, data: mujoco.MjData, posture: np.ndarray | None = None):
        self.state = np.zeros(ARM_SIZE)
        self.posture = np.zeros(7) if posture is None else posture
        self._sources = (
            data.site_xpos[indices.site],
            data.site_xmat[indices.site],
            data.xaxis[indices.hinges],
            data.xanchor[indices.hinges],
            data.M,
            indices.mass,
            data.qpos[indices.qpos],
            data.qvel[indices.dofs],
        )
        self._bias = data.qfrc_bias[indices.dofs]
        self._torques, self._commands = data.ctrl[indices.ctrl], data.ctrl[indices.finger_ctrl]
        self._limits, self._finger_range = indices.limits, indices.finger_range

    def read(self) -> None:
        """Read the arm's state."""
        read_arm(self.state, *self._sources)

    def act(self, goal: np.ndarray, fingers: np.ndarray, close: float, fresh: bool = True) -> None:
        """Write the controls towards `goal` [12], from the arm's present state if it is fresh; fingers: [2], changed;
        close: 1, 0 or -1.
        """
        control(
            self.state,
            *self._sources,
            goal,
            self.posture,
            self._bias,
            self._limits,
            self._torques,
            fingers,
            self._finger_range,
            self._commands,
            close,
            fresh,
        )
