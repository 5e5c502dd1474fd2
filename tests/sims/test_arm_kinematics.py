"""The arm's closed-form kinematics against MuJoCo, its limits, and Cartesian control."""

import itertools

import mujoco
import numpy as np
import pytest

from robopolicy.core.storage import resource
from sims import arm, grasping

CORNERS = np.array(list(itertools.product(*zip(arm.TIP_LOW, arm.TIP_HIGH, strict=True))))


def model() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_path(str(resource("assets", "arm/arm_reach.xml")))


def points(count: int = 2000) -> np.ndarray:
    inside = arm.TIP_LOW + np.random.default_rng(0).random((count, 3)) * (arm.TIP_HIGH - arm.TIP_LOW)
    return np.concatenate([CORNERS, inside])


def test_names_and_limits_are_those_of_the_model():
    scene = model()
    assert tuple(scene.joint(index).name for index in range(6)) == arm.JOINTS
    assert tuple(scene.actuator(index).name for index in range(6)) == arm.JOINTS
    np.testing.assert_array_equal(scene.jnt_range[:6], np.stack([arm.JOINT_LOW, arm.JOINT_HIGH], axis=1))
    np.testing.assert_array_equal(scene.actuator_ctrlrange, scene.jnt_range[:6])


def test_tip_position_is_the_models():
    scene = model()
    data = mujoco.MjData(scene)
    generator = np.random.default_rng(1)
    for _ in range(50):
        data.qpos[:] = generator.uniform(arm.JOINT_LOW, arm.JOINT_HIGH)
        mujoco.mj_kinematics(scene, data)
        np.testing.assert_allclose(arm.tip_position(data.qpos), data.site("tip").xpos, atol=1e-12)


def test_inverse_kinematics_round_trip_within_the_limits():
    tips = points()
    joints = arm.joint_targets(tips)
    np.testing.assert_allclose(arm.tip_position(joints), tips, atol=1e-12)
    assert (joints > arm.JOINT_LOW[:5]).all() and (joints < arm.JOINT_HIGH[:5]).all()


@pytest.mark.parametrize("yaw", [0.0, 0.4, -0.7])
def test_the_hand_points_down_and_keeps_its_yaw(yaw: float):
    scene = model()
    data = mujoco.MjData(scene)
    for tip in CORNERS:
        data.qpos[:5] = arm.joint_targets(tip, yaw)
        mujoco.mj_kinematics(scene, data)
        axes = data.body("hand").xmat.reshape(3, 3)
        np.testing.assert_allclose(axes[:, 0], [0, 0, -1], atol=1e-12)
        np.testing.assert_allclose(axes[:, 1], [-np.sin(yaw), np.cos(yaw), 0], atol=1e-12)


def test_a_chunk_equals_single_steps_bitwise():
    generator = np.random.default_rng(2)
    actions = generator.uniform(-1, 1, (32, 40, 4))
    previous = arm.resting_joints(points(24))
    whole = arm.control(actions, previous)
    for step in range(actions.shape[1]):
        previous = arm.control(actions[:, step : step + 1], previous)[:, 0]
        np.testing.assert_array_equal(previous, whole[:, step])


def test_actions_move_the_tip_target_and_stop_at_the_box():
    start = np.array([[0.2, 0.01, 0.06]])
    joints = arm.resting_joints(start)
    one = arm.control(np.array([[[0.5, -1.0, 0.25, -1.0]]]), joints)[:, 0]
    np.testing.assert_allclose(arm.tip_position(one), start + arm.TIP_STEP * np.array([[0.5, -1.0, 0.25]]), atol=1e-8)
    assert one[0, 5] == arm.GRIPPER_CLOSED
    far = arm.control(np.full((1, 50, 4), 1.0), joints)[:, -1]
    np.testing.assert_allclose(arm.tip_position(far)[0], arm.TIP_HIGH, atol=1e-8)
    assert far[0, 5] == arm.GRIPPER_OPEN


def test_the_tip_follows_its_target():
    scene = model()
    data = mujoco.MjData(scene)
    data.qpos[:] = data.ctrl[:] = arm.resting_joints(np.array([0.2, 0.0, 0.06]))
    for action in ([1.0, 1.0, 0.5, 1.0], [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]):
        data.ctrl[:] = arm.control(np.array([[action]]), data.ctrl[None].copy())[0, 0]
        mujoco.mj_step(scene, data, nstep=10)
    error = np.abs(arm.tip_position(data.qpos) - [0.22, 0.02, 0.07]).max()
    assert error < 0.002, f"the tip is {1000 * error:.1f} mm off its target after 0.4 s"


def test_rotation_columns_are_the_matrix():
    quaternion = np.random.default_rng(3).standard_normal((20, 4))
    quaternion /= np.linalg.norm(quaternion, axis=1, keepdims=True)
    for one, columns in zip(quaternion, grasping.rotation_columns(quaternion), strict=True):
        matrix = np.empty(9)
        mujoco.mju_quat2Mat(matrix, one)
        np.testing.assert_allclose(columns, matrix.reshape(3, 3)[:, :2].T.reshape(-1), atol=1e-12)
