"""One robosuite task as a gymnasium environment whose episodes depend on their seed alone.

robosuite samples its initial states from numpy's global generator; here every environment has its own generator, which
replaces the global one while robosuite runs. Runs inside worker processes: no torch.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import contextlib
import importlib.metadata
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium import spaces

from robopolicy.core.errors import ConfigError, RobopolicyError, did_you_mean, require_extra
from sims.suites.robosuite_stepper import stepper_of

VERSIONS = (
    "robosuite 1.5.1 with mujoco 3.3 is known to work: pip install 'robopolicy[robosuite]', in a separate "
    "environment if another package needs a newer mujoco"
)
CAMERA = "agentview"
"""Default camera."""
ROBOMIMIC = "robomimic"
"""Name of the observation of robomimic's and DPPO's policies without cameras: ROBOMIMIC_ROBOT, and the objects'
entries.
"""
ROBOMIMIC_ROBOT = ("eef_pos", "eef_quat", "gripper_qpos")
HOLDERS = (
    "robosuite.controllers",
    "robosuite.environments",
    "robosuite.models.grippers",
    "robosuite.robots",
    "robosuite.utils.buffers",
    "robosuite.utils.observables",
)
"""Modules whose objects change during an episode: goals of controllers, positions of grippers, buffers."""


def robosuite_tasks() -> list[str]:
    """Return the names of robosuite's tasks. Raises ConfigError when the extra is missing or does not work."""
    return list(_imported().ALL_ENVIRONMENTS)


def _imported() -> Any:
    """Import robosuite without its messages about optional packages."""
    log = logging.getLogger("robosuite_logs")
    if _only_errors not in log.filters:
        log.addFilter(_only_errors)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return require_extra("robosuite", "robosuite")
    except ConfigError as error:
        raise ConfigError(f"{error} ({VERSIONS}).") from error
    except Exception as error:
        raise ConfigError(f"robosuite cannot be imported: {_told(error)}. {VERSIONS}.") from error


def _only_errors(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _told(error: Exception) -> str:
    installed = []
    for name in ("robosuite", "mujoco", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed.append(f"{name} {importlib.metadata.version(name)}")
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} (installed: {', '.join(installed)})"


def open_robosuite(task: str, env_options: Mapping[str, Any]) -> gymnasium.Env:
    """Create one environment of `task`, such as "Lift"; env_options: of `RobosuiteEnvironment`.

    Raises ConfigError on an unknown task, option, robot or controller, and when robosuite does not work.
    """
    tasks = robosuite_tasks()
    if task not in tasks:
        raise ConfigError(f"robosuite has no task '{task}'.{did_you_mean(task, tasks)}")
    try:
        return RobosuiteEnvironment(task, **env_options)
    except RobopolicyError:
        raise
    except Exception as error:  # foreign code
        raise ConfigError(
            f"robosuite's '{task}' could not be created with the options {dict(env_options)}: {_told(error)}. "
            f"{VERSIONS}."
        ) from error


class RobosuiteEnvironment(gymnasium.Env):
    """robosuite.make(task) with seeds, success and named observations.

    robots: one name or several, default "Panda", two for the TwoArm tasks; controller: None for the robot's own, the
    name of an arm controller (OSC_POSE, OSC_POSITION, JOINT_POSITION, JOINT_VELOCITY, ...), or a JSON file for a
    complete robot; keys: entries of robosuite's observation to include, "robomimic" for those of robomimic's low_dim
    datasets, default all but its concatenations; fast: whether to step with our own controller where it equals
    robosuite's, see `stepper_of`; options: other arguments of robosuite.make. `info["success"]` is the task's own
    `_check_success`; the reward is robosuite's, shaped unless reward_shaping=False. Object sizes that robosuite samples
    when it builds a scene are the same in every environment, because scenes are built once. Raises ConfigError on an
    unknown key or controller.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 (gymnasium's own convention)

    def __init__(
        self,
        task: str,
        robots: str | Sequence[str] | None = None,
        controller: str | None = None,
        keys: Sequence[str] | str | None = None,
        fast: bool = True,
        **options: Any,
    ):
        reserved = {"hard_reset", "ignore_done", "has_renderer", "has_offscreen_renderer", "use_camera_obs", "horizon"}
        for name in reserved & set(options):
            raise ConfigError(
                f"'{name}' of robosuite cannot be set here: scenes are built once, time limits are set with "
                "world.options.horizon, and images with world.cameras."
            )
        suite = _imported()
        robot_names = robots if robots is not None else (["Panda", "Panda"] if task.startswith("TwoArm") else "Panda")
        robot_names = robot_names if isinstance(robot_names, str) else list(robot_names)
        if controller is not None:
            options["controller_configs"] = controller_configuration(suite, controller, robot_names)
        self._draws: Any = np.random.RandomState(0).get_state()
        with self._own_generator():
            self._inner = suite.make(
                task,
                robots=robot_names,
                has_renderer=False,
                has_offscreen_renderer=False,
                use_camera_obs=False,
                hard_reset=False,
                ignore_done=True,
                **{"reward_shaping": True, **options},
            )
            first = self._inner.reset()
        self._stepper = stepper_of(self._inner) if fast else None
        self._keys = observation_keys(first, keys)
        robot_entries = {f"robot{index}_" for index in range(len(self._inner.robots))}
        self.state_keys = tuple(key for key in self._keys if key.startswith(tuple(robot_entries)))
        vectors = self._shown(first)
        # Pairs, because gymnasium sorts the keys of a dictionary.
        self.observation_space = spaces.Dict(
            [(key, spaces.Box(-np.inf, np.inf, value.shape)) for key, value in vectors.items()]
        )
        low, high = self._inner.action_spec
        self.action_space = spaces.Box(low, high, dtype=np.float64)
        self.dt = 1.0 / self._inner.control_freq
        self.model, self.data = self._inner.sim.model._model, self._inner.sim.data._data
        self.scene_option = mujoco.MjvOption()
        self.scene_option.geomgroup[0] = 0  # shapes for collisions
        self.mujoco_renderer = SimpleNamespace(default_cam_config=default_view(self.model))

    @property
    def state_holders(self) -> tuple[Any, ...]:
        """Objects that contain a part of the state; some are recreated by every reset."""
        stepper = () if self._stepper is None else (self._stepper,)
        return (*state_holders(self._inner), *stepper)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        """Start the episode of `seed`; options are not used. Returns entries [n] by name, info."""
        super().reset(seed=seed)
        if seed is not None:
            self._draws = np.random.RandomState(seed).get_state()
            self._inner.rng = np.random.default_rng(seed)
        with self._own_generator():
            observation = self._inner.reset()
        if self._stepper is not None:
            self._stepper.begin()
        return self._shown(observation), {"success": False}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        """Act.

        action: [A], as the robot's controller reads it -> entries [n] by name, reward, terminated, truncated, info.
        """
        if self._stepper is not None:  # draws nothing
            reward = self._stepper.step(action)
            return self._sampled(), reward, False, False, {"success": bool(self._inner._check_success())}
        with self._own_generator():
            observation, reward, *_ = self._inner.step(action)
            success = bool(self._inner._check_success())
        return self._shown(observation), float(reward), False, False, {"success": success}

    def close(self) -> None:
        """Free the simulation."""
        self._inner.close()

    def _shown(self, observation: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {key: np.atleast_1d(np.asarray(observation[key], dtype=np.float32)) for key in self._keys}

    def _sampled(self) -> dict[str, np.ndarray]:
        """Return the last readings of robosuite's sensors, entries [n] by name."""
        sensors = self._inner._observables
        if all(key in sensors for key in self._keys):
            return self._shown({key: sensors[key].obs for key in self._keys})
        return self._shown(self._inner._get_observations())

    @contextlib.contextmanager
    def _own_generator(self) -> Iterator[None]:
        """Replace numpy's global generator with this environment's; it is restored afterwards."""
        outer_state = np.random.get_state()  # noqa: NPY002
        np.random.set_state(self._draws)  # noqa: NPY002
        try:
            yield
        finally:
            self._draws = np.random.get_state()  # noqa: NPY002
            np.random.set_state(outer_state)  # noqa: NPY002


def observation_keys(observation: Mapping[str, Any], keys: Sequence[str] | str | None) -> tuple[str, ...]:
    """Return the entries of robosuite's observation to include: `keys`, those of robomimic's policies ("robomimic"), or
    all but the concatenations "...-state" (None).

    observation: entries [n] by name, in robosuite's order. Raises ConfigError on a key that it lacks.
    """
    if keys is None or keys == ROBOMIMIC:
        single = [key for key in observation if not key.endswith("-state")]
        if keys is None:
            return tuple(single)
        robots = [key for key in single if re.match(r"robot\d_", key)]
        wanted = [key for part in ROBOMIMIC_ROBOT for key in robots if key.partition("_")[2] == part]
        return (*wanted, *(key for key in single if key not in robots))
    names = (keys,) if isinstance(keys, str) else tuple(keys)
    for key in names:
        if key not in observation:
            known = (*observation, ROBOMIMIC)
            raise ConfigError(f"robosuite's observation has no '{key}' (keys).{did_you_mean(key, known)}")
    return names


def controller_configuration(suite: Any, controller: str, robots: str | list[str]) -> Any:
    """Return robosuite's configuration of every robot, with `controller` for the arms; a JSON file describes a complete
    robot.

    Raises ConfigError on an unknown controller.
    """
    parts = suite.controllers
    if controller.endswith(".json"):
        return parts.load_composite_controller_config(controller=controller)
    controller_names = sorted(parts.ALL_PART_CONTROLLERS)
    if controller not in controller_names:
        raise ConfigError(
            f"robosuite has no arm controller '{controller}'.{did_you_mean(controller, controller_names)} Set the "
            "controller of a whole robot with its JSON file."
        )
    configurations = []
    for robot in [robots] if isinstance(robots, str) else robots:
        configuration = parts.load_composite_controller_config(robot=robot)
        for arm in {"right", "left"} & set(configuration["body_parts"]):
            gripper = configuration["body_parts"][arm].get("gripper", {"type": "GRIP"})
            arm_settings = parts.load_part_controller_config(default_controller=controller)
            configuration["body_parts"][arm] = {**arm_settings, "gripper": gripper}
        configurations.append(configuration)
    return configurations[0] if isinstance(robots, str) else configurations


def state_holders(inner: Any) -> tuple[Any, ...]:
    """Return the objects of an environment that change during an episode, itself first, each once."""
    holders: list[Any] = [inner]
    holder_ids = {id(inner)}
    for holder in holders:  # grows while it is walked
        for value in list(vars(holder).values()):
            items = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            )
            for item in items:
                if (
                    id(item) not in holder_ids
                    and hasattr(item, "__dict__")
                    and type(item).__module__.startswith(HOLDERS)
                ):
                    holder_ids.add(id(item))
                    holders.append(item)
    return tuple(holders)


def default_view(model: mujoco.MjModel) -> dict[str, Any]:
    """Return the settings of MuJoCo's default camera; {} for the free one."""
    camera = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, CAMERA)
    return {} if camera < 0 else {"type": int(mujoco.mjtCamera.mjCAMERA_FIXED), "fixedcamid": camera}
