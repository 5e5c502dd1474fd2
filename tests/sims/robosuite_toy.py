"""Stands in for robosuite: the parts of its interface that the adapter uses, around a ball on a slide."""

import types

import mujoco
import numpy as np

SCENE = """
<mujoco><option timestep="0.01"/><worldbody>
  <camera name="agentview" pos="0 0 2"/>
  <body><joint name="slide" type="slide" axis="1 0 0" damping="1"/><geom size="0.05" mass="0.1"/></body>
</worldbody><actuator><position joint="slide" kp="20" kv="2"/></actuator></mujoco>
"""


class Controller:
    """Moves its goal by every action, so a future depends on it."""

    def __init__(self):
        self.goal = np.zeros(1)


Controller.__module__ = "robosuite.controllers.toy"


class Robot:
    def __init__(self):
        self.part_controllers = {"right": Controller()}


Robot.__module__ = "robosuite.robots.toy"


class Environment:
    """As robosuite's: starts from numpy's global generator, no success in info, an end after `horizon` if not told."""

    def __init__(self, **options):
        self.options, self.control_freq = options, options.get("control_freq", 20)
        self.size = np.random.uniform()  # noqa: NPY002
        model = mujoco.MjModel.from_xml_string(SCENE)
        self.sim = types.SimpleNamespace(
            model=types.SimpleNamespace(_model=model), data=types.SimpleNamespace(_data=mujoco.MjData(model))
        )
        self.robots, self.closed = [Robot()], False

    action_spec = (-np.ones(1), np.ones(1))

    def reset(self):
        self.robots = [Robot()]
        mujoco.mj_resetData(self.sim.model._model, self.sim.data._data)
        self.sim.data._data.qpos[:] = np.random.uniform(-0.1, 0.1, 1)  # noqa: NPY002
        return self._observations()

    def step(self, action):
        controller = self.robots[0].part_controllers["right"]
        controller.goal = controller.goal + 0.1 * np.asarray(action)
        self.sim.data._data.ctrl[:] = controller.goal + 1e-3 * np.random.normal()  # noqa: NPY002
        for _ in range(5):
            mujoco.mj_step(self.sim.model._model, self.sim.data._data)
        return self._observations(), self._level(), False, {}

    def _level(self):
        return float(self.sim.data._data.qpos[0])

    def _check_success(self):
        return np.bool_(self._level() > 0.3)

    def _observations(self):
        place, speed = self.sim.data._data.qpos.copy(), self.sim.data._data.qvel.copy()
        return {
            "robot0_joint_pos": place,
            "robot0_joint_vel": speed,
            "size": self.size,
            "cube_pos": np.array([0.3, 0.0, 0.0]) - place,
            "robot0_proprio-state": np.concatenate([place, speed]),
            "object-state": place,
        }

    def close(self):
        self.closed = True


Environment.__module__ = "robosuite.environments.toy"


def module():
    """Return the module that is imported as `robosuite`."""
    toy_module = types.ModuleType("robosuite")
    toy_module.ALL_ENVIRONMENTS, toy_module.made = {"Lift": 0, "Stack": 0, "TwoArmLift": 0, "Wipe": 0}.keys(), []

    def make(task, **options):
        toy_module.made.append((task, options))
        return Environment(**options)

    arm = {"type": "OSC_POSE", "gripper": {"type": "GRIP"}}
    toy_module.make = make
    toy_module.controllers = types.SimpleNamespace(
        ALL_PART_CONTROLLERS={"OSC_POSE", "OSC_POSITION"},
        load_composite_controller_config=lambda controller=None, robot=None: {
            "type": "BASIC",
            "of": controller or robot,
            "body_parts": {"right": dict(arm), "base": {"type": "JOINT_VELOCITY"}},
        },
        load_part_controller_config=lambda default_controller: {"type": default_controller},
    )
    return toy_module
