"""robosuite's control step without most of its Python: the same compiled model, moved by our compiled controller.

A control step of robosuite spends four fifths of its time in looking up names, copying Jacobians and ticking the clocks
of its observables. Here a physics step is MuJoCo's own and one call of the compiled controller; rewards, successes and
sensors remain robosuite's, called once per control step. Motion, rewards and observations are equal (tested). Runs
inside worker processes: no torch.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

from typing import Any

import mujoco
import numpy as np

from sims.suites.operational_space import (
    ANGLES,
    ARM_SIZE,
    JACOBIAN,
    MASS,
    POSITION,
    ROTATION,
    SPEEDS,
    STEP,
    STIFFNESS,
    TURN,
    Arm,
    ArmIndices,
    turned,
)

FINGER_STEP = 0.2
"""Change of a finger's command, whose range is -1 to 1, per control step."""
ACTION_SIZE = 7
METHODS = {
    "step": "robosuite.environments.base",
    "_update_observables": "robosuite.environments.base",
    "_pre_action": "robosuite.environments.robot_env",
}
"""Methods that are replaced here -> the module that defines them; a task with its own is stepped by robosuite."""


def stepper_of(inner: Any) -> "RobosuiteStepper | None":
    """Return a stepper of an environment of robosuite 1.5, or None where its robots or controllers are others.

    Equal are one or more fixed 7-joint arms with the Panda's gripper and the controller OSC_POSE as robosuite sets it:
    relative actions, fixed stiffness, no interpolation.
    """
    methods = {name: getattr(type(inner), name, None) for name in METHODS}
    is_plain = all(getattr(methods[name], "__module__", None) == module for name, module in METHODS.items())
    if is_plain and inner.lite_physics and all(map(_has_our_controller, inner.robots)):
        return RobosuiteStepper(inner)
    return None


def _has_our_controller(robot: Any) -> bool:
    """Whether a robot is moved by the controller of `operational_space`, with its constants."""
    parts = robot.part_controllers
    if robot.is_mobile or set(parts) != {"right", "right_gripper"}:
        return False
    arm, gripper = parts["right"], robot.gripper["right"]
    constants = {
        "input_max": 1.0,
        "input_min": -1.0,
        "output_max": [STEP] * 3 + [TURN] * 3,
        "output_min": [-STEP] * 3 + [-TURN] * 3,
        "kp": STIFFNESS,
        "kd": 2 * np.sqrt(STIFFNESS),
    }
    settings = {
        "name": "OSC_POSE",
        "impedance_mode": "fixed",
        "input_type": "delta",
        "uncoupling": True,
        "interpolator_pos": None,
        "interpolator_ori": None,
        "position_limits": None,
        "joint_dim": 7,
    }
    return (
        type(gripper).__name__ == "PandaGripper"
        and gripper.speed == FINGER_STEP
        and robot.composite_controller.name == "BASIC"
        and robot.action_dim == ACTION_SIZE
        and parts["right_gripper"].name == "JOINT_VELOCITY"
        and all(getattr(arm, name, ...) == value for name, value in settings.items())
        and all(np.all(getattr(arm, name, np.nan) == np.array(value)) for name, value in constants.items())
    )


class RobosuiteStepper:
    """Steps an environment of robosuite; `begin` follows every reset of it.

    The state of an episode, which a snapshot must hold: goals [R, 12], fingers' commands [R, 2] and resting
    postures [R, 7] of its robots; the arms' state before the first action [R, 117]; and the clock of robosuite's
    observables.
    """

    def __init__(self, inner: Any):
        self._inner = inner
        self._model: mujoco.MjModel = inner.sim.model._model
        self._data: mujoco.MjData = inner.sim.data._data
        self._arms = [self._arm(robot) for robot in inner.robots]
        self._bases = [self._base(robot) for robot in inner.robots]
        self._substeps = int(inner.control_timestep / inner.model_timestep)
        self._period, self._tick = 1.0 / inner.control_freq, float(inner.model_timestep)
        robots = len(self._arms)
        self.goals, self.fingers, self.postures = (np.zeros((robots, size)) for size in (12, 2, 7))
        self.before, self.is_first = np.zeros((robots, ARM_SIZE)), True
        self.clock, self.is_sampled = 0.0, False

    def _arm(self, robot: Any) -> Arm:
        actuators = robot._ref_actuators_indexes_dict
        joints = list(robot.part_controllers["right"].joint_index)
        site = self._model.site(robot.gripper["right"].important_sites["grip_site"]).id
        indices = ArmIndices(self._model, site, joints, actuators["right"], actuators["right_gripper"])
        return Arm(indices, self._data)

    def _base(self, robot: Any) -> np.ndarray:
        """Return the rotation [3, 3] of a robot's base, which is fixed; a view."""
        controller = robot.part_controllers["right"]
        return self._data.site(f"{controller.naming_prefix}{controller.part_name}_center").xmat.reshape(3, 3)

    def begin(self) -> None:
        """Take over the state that robosuite's reset has left: its controllers have read the arms already, before the
        objects were placed, and act on that in the first physics step.
        """
        for before, posture, robot in zip(self.before, self.postures, self._inner.robots, strict=True):
            controller = robot.part_controllers["right"]
            before[POSITION:ROTATION], before[ROTATION:JACOBIAN] = controller.ref_pos, controller.ref_ori_mat.ravel()
            before[JACOBIAN:MASS], before[MASS:ANGLES] = controller.J_full.ravel(), controller.mass_matrix.ravel()
            before[ANGLES:SPEEDS], before[SPEEDS:] = controller.joint_pos, controller.joint_vel
            posture[:] = controller.initial_joint
        self.fingers[:] = [robot.gripper["right"].current_action for robot in self._inner.robots]
        self.is_first = True
        observable = next(iter(self._inner._observables.values()))
        self.clock, self.is_sampled = float(observable._time_since_last_sample), bool(observable._sampled)

    def step(self, action: np.ndarray) -> float:
        """Run a control step of an action [7 R] and return robosuite's reward; its observables hold what was seen."""
        model, data = self._model, self._data
        self._inner.timestep += 1
        mujoco.mj_step1(model, data)
        self._set_goals(np.asarray(action, dtype=np.float64).reshape(len(self._arms), ACTION_SIZE))
        for number in range(self._substeps):
            if number:
                mujoco.mj_step1(model, data)
            for arm, goal, fingers in zip(self._arms, self.goals, self.fingers, strict=True):
                arm.act(goal, fingers, 0.0, fresh=number > 0)
            mujoco.mj_step2(model, data)
            self._observe()
        self._inner.cur_time += self._inner.control_timestep
        return float(self._inner._post_action(action)[0])

    def _set_goals(self, actions: np.ndarray) -> None:
        """Set the goals of actions [R, 7]: motion and turn from the present pose in the frame of the robot's base, and
        the direction of the fingers.
        """
        for index, (arm, base) in enumerate(zip(self._arms, self._bases, strict=True)):
            arm.posture[:] = self.postures[index]
            if self.is_first:
                arm.state[:] = self.before[index]
            else:
                arm.read()
            motion = np.clip(actions[index, :6], -1.0, 1.0)
            here, facing = arm.state[POSITION:ROTATION], arm.state[ROTATION:JACOBIAN].reshape(3, 3)
            self.goals[index, :3] = here + base @ (STEP * motion[:3])
            turned_there = (base.T @ facing).ravel()
            if motion[3:].any():
                turned_there = turned(turned_there, TURN * motion[3:])
            self.goals[index, 3:] = (base @ turned_there.reshape(3, 3)).ravel()
            closing = FINGER_STEP * np.sign(actions[index, 6]) * np.array([-1.0, 1.0])
            self.fingers[index] = np.clip(self.fingers[index] + closing, -1.0, 1.0)
        self.is_first = False

    def _observe(self) -> None:
        """Advance the clock of robosuite's observables by a physics step, and read the sensors when it says so."""
        self.clock += self._tick
        if not self.is_sampled and self._period >= self.clock:
            self._sample()
        if self.clock >= self._period:
            if not self.is_sampled:
                self._sample()
            self.clock %= self._period
            self.is_sampled = False

    def _sample(self) -> None:
        for observable in self._inner._observables.values():
            observable.update(timestep=0.0, obs_cache=self._inner._obs_cache, force=True)
        self.is_sampled = True
