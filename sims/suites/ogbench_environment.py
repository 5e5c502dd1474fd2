"""One OGBench manipulation task as a gymnasium environment whose episodes depend on their seed alone.

OGBench samples the task from numpy's global generator and the goal's settling actions from an unseeded generator; here
the seed determines both. Runs inside worker processes: no torch.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import copy
import functools
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium import spaces

from robopolicy.core.errors import ConfigError, RobopolicyError, did_you_mean, require_extra
from robopolicy.core.registry import load_dotted

STYLES = ("play", "noisy")
"""Style words of OGBench's data sets in world names: "cube-single-play-v0" starts anywhere, as in the data set."""
CAMERA = "front"
"""Default camera."""
ROBOT = (
    ("joint_pos", 6),
    ("joint_vel", 6),
    ("effector_pos", 3),
    ("effector_yaw_cos", 1),
    ("effector_yaw_sin", 1),
    ("gripper_opening", 1),
    ("gripper_contact", 1),
)
"""The robot's entries of OGBench's flat observation, with their sizes."""
GOAL = "goal_"
FIXED = ("mode", "ob_type", "terminate_at_goal", "reward_task_id", "render_mode", "width", "height", "env_type")
CHANGED = ("dof_damping", "site_pos", "geom_rgba", "mat_rgba")
"""Arrays of the model that an episode changes (locks, targets, colours) and a reset does not restore."""


def split_name(name: str) -> tuple[str, str]:
    """Split a world's name into OGBench's id and the style: "scene-play-v0" -> ("scene-v0", "play"), else style ""."""
    parts = name.split("-")
    styles = [part for part in parts if part in STYLES]
    return "-".join(part for part in parts if part not in STYLES), styles[0] if styles else ""


def ogbench_ids() -> list[str]:
    """Return the ids of OGBench's state-based manipulation tasks. Raises ConfigError when the extra is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        require_extra("ogbench.manipspace", "ogbench")
    return [
        name
        for name, spec in gymnasium.registry.items()
        if str(spec.entry_point).startswith("ogbench.manipspace.") and not name.startswith("visual-")
    ]


def require_id(env_id: str) -> None:
    """Raise ConfigError, suggesting the closest name, unless OGBench has the task, and when the extra is missing."""
    ids = ogbench_ids()
    if env_id not in ids:
        if env_id.startswith("visual-"):
            raise ConfigError(
                f"'{env_id}': use the task name without 'visual-'; for images set world.cameras=[front_pixels], with "
                "world.image_size=64."
            )
        raise ConfigError(f"OGBench has no manipulation task '{env_id}'.{did_you_mean(env_id, ids)}")


def open_inner(env_id: str, env_options: Mapping[str, Any]) -> Any:
    """Create OGBench's own environment and reset it once; env_options: its keyword arguments.

    Raises ConfigError on an unknown task or option, and when the extra is missing.
    """
    require_id(env_id)
    for name in env_options:
        if name in FIXED:
            raise ConfigError(
                f"'{name}' of OGBench cannot be set here: the task is in the world's name, the world ends episodes, "
                "and images are set with world.cameras."
            )
    try:
        return duplicate(compiled(env_id, tuple(sorted(env_options.items()))))
    except RobopolicyError:
        raise
    except Exception as error:  # foreign code
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"OGBench's '{env_id}' could not be created with the options {dict(env_options)}: "
            f"{type(error).__name__}: {text}"
        ) from error


@functools.lru_cache(maxsize=4)
def compiled(env_id: str, env_options: tuple[tuple[str, Any], ...]) -> Any:
    """Create an environment and compile its scene, which takes a second or more, once for all rows of a process."""
    spec = gymnasium.registry[env_id]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = repeatable(load_dotted(str(spec.entry_point), "Environment"))
        inner: Any = kind(**{**spec.kwargs, "terminate_at_goal": False, **dict(env_options)})
        inner.reset(seed=0, options={"task_id": 1})
    return inner


def duplicate(inner: Any) -> Any:
    """Copy an environment with its own model, data and arrays; parts that are only read, according to its sources, are
    shared.
    """
    twin = copy.copy(inner)
    for name, value in vars(inner).items():
        if isinstance(value, np.ndarray | spaces.Space | dict):
            setattr(twin, name, copy.deepcopy(value))
    twin._model = copy.deepcopy(inner._model)
    twin._data = mujoco.MjData(twin._model)
    twin.reset(seed=0, options={"task_id": 1})
    return twin


def repeatable(kind: type[gymnasium.Env]) -> type[gymnasium.Env]:
    """Return a subclass of `kind` with one seedable action space; OGBench creates a new one at every access."""

    class Repeatable(kind):
        action_space = spaces.Box(-1.0, 1.0, (5,), np.float32)

        def __init__(self, *args: Any, **options: Any):
            self.action_space = copy.deepcopy(type(self).action_space)
            super().__init__(*args, **options)

    return Repeatable


def open_ogbench(name: str, env_options: Mapping[str, Any]) -> gymnasium.Env:
    """Create one environment of the world `name`, without its prefix; env_options: of OGBench's own.

    Raises ConfigError on an unknown task or option, and when the extra is missing.
    """
    env_id, style = split_name(name)
    return OGBenchEnvironment(open_inner(env_id, env_options), scattered=bool(style))


class OGBenchEnvironment(gymnasium.Wrapper):
    """Adds seeding, named observations with their goal, and `info["success"]`; the world ends episodes.

    scattered: episodes start anywhere, with the distribution of OGBench's data sets, instead of near the task's start.
    The reward is OGBench's: 1 while the goal is reached, or minus the number of unmet parts for the single tasks, whose
    goal is not observed. Raises ConfigError when OGBench's observation differs from the expected one.
    """

    action_names = ("dx", "dy", "dz", "dyaw", "gripper")

    def __init__(self, inner: Any, scattered: bool = False):
        super().__init__(inner)
        self._scattered = scattered
        self.metadata = {"render_modes": [], "render_fps": 1.0 / inner.control_timestep()}
        self._fresh = {name: getattr(inner.model, name).copy() for name in CHANGED}
        self._entries = observed_entries(inner)
        self._goal_entries = goal_entries(inner)
        self.state_keys = tuple(name for name, _ in ROBOT)
        # Pairs, because gymnasium sorts the keys of a dictionary.
        self.observation_space = spaces.Dict(
            [(name, spaces.Box(-np.inf, np.inf, (size,))) for name, size in (*self._entries, *self._goal_entries)]
        )
        view = mujoco.mj_name2id(inner.model, mujoco.mjtObj.mjOBJ_CAMERA, CAMERA)
        camera_config = {"type": int(mujoco.mjtCamera.mjCAMERA_FIXED), "fixedcamid": view}
        inner.mujoco_renderer = SimpleNamespace(default_cam_config=camera_config)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        """Start the episode of `seed`; options: task_id, from 1 on, else the seed determines it (single tasks have
        one).

        Returns entries [n] by name, info. Raises ConfigError on other options.
        """
        inner: Any = self.env
        for name, array in self._fresh.items():
            getattr(inner.model, name)[...] = array
        inner.action_space.seed(seed)
        draws = np.random.default_rng(seed)
        reset_options = {"task_id": int(draws.integers(1, inner.num_tasks + 1)), **(options or {})}
        if set(reset_options) != {"task_id"} or not 1 <= reset_options["task_id"] <= inner.num_tasks:
            raise ConfigError(f"Options of an OGBench reset are task_id, 1 to {inner.num_tasks}, but got {options}.")
        flat, _ = inner.reset(seed=seed, options=reset_options)
        return self._shown(self._scatter() if self._scattered else flat), {"success": False}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        """Take a step.

        action: [5], the gripper's motion in x, y, z (1 is 5 cm), its turn (1 is 0.3 rad) and closing -> entries [n] by
        name, reward, False, False, info.
        """
        flat, reward, _, _, info = self.env.step(action)
        return self._shown(flat), float(reward), False, False, {"success": bool(info["success"])}

    def _scatter(self) -> np.ndarray:
        """Place arm and objects anywhere, as OGBench does to collect data, without changing the goal; returns its
        observation.
        """
        inner: Any = self.env
        targets = {name: copy.deepcopy(value) for name, value in vars(inner).items() if name.startswith("_target_")}
        arrays = inner.data.mocap_pos, inner.data.mocap_quat, inner.model.site_pos
        saved_arrays = [array.copy() for array in arrays]
        inner._mode = "data_collection"
        try:
            inner.initialize_episode()
        finally:
            inner._mode = "task"
        vars(inner).update(targets)
        for array, value in zip(arrays, saved_arrays, strict=True):
            array[...] = value
        # How OGBench's own start of an episode ends.
        inner.pre_step()
        mujoco.mj_forward(inner.model, inner.data)
        inner.post_step()
        inner._success = False
        return inner.compute_observation()

    def _shown(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        inner: Any = self.env
        return {**named(self._entries, flat), **named(self._goal_entries, inner._cur_goal_ob)}


Entries = list[tuple[str, int]]
"""Names of entries in OGBench's order, with their sizes."""


def named(entries: Entries, flat: np.ndarray) -> dict[str, np.ndarray]:
    """Split a flat observation [..., D] into entries by name, [..., n]; without entries the result is empty."""
    ends = np.cumsum([size for _, size in entries]).tolist()
    return {name: flat[..., end - size : end] for (name, size), end in zip(entries, ends, strict=True)}


def observed_entries(inner: Any) -> Entries:
    """Return the entries of OGBench's flat observation. Raises ConfigError when it has another size."""
    entries = list(ROBOT)
    for index in range(getattr(inner, "_num_cubes", 0)):
        block = f"block_{index}_"
        entries += [(block + "pos", 3), (block + "quat", 4), (block + "yaw_cos", 1), (block + "yaw_sin", 1)]
    for index in range(getattr(inner, "_num_buttons", 0)):
        entries += [(f"button_{index}_state", 2), (f"button_{index}_pos", 1), (f"button_{index}_vel", 1)]
    if has_drawer(inner):
        entries += [(name, 1) for name in ("drawer_pos", "drawer_vel", "window_pos", "window_vel")]
    shape = inner.compute_observation().shape
    if shape != (sum(size for _, size in entries),):
        raise ConfigError(f"OGBench's observation has shape {shape}, which is not supported: install ogbench 1.2.")
    return entries


def goal_entries(inner: Any) -> Entries:
    """Return the entries of OGBench's goal: a complete observation, or its short form (use_oracle_rep=true); none when
    the reward has a fixed task.
    """
    if inner._reward_task_id is not None:
        return []
    if not inner._use_oracle_rep:
        return [(GOAL + name, size) for name, size in observed_entries(inner)]
    entries = [(f"{GOAL}block_{index}_pos", 3) for index in range(getattr(inner, "_num_cubes", 0))]
    if buttons := getattr(inner, "_num_buttons", 0):
        entries.append((GOAL + "button_states", buttons))
    return entries + ([(GOAL + "drawer_pos", 1), (GOAL + "window_pos", 1)] if has_drawer(inner) else [])


def has_drawer(inner: Any) -> bool:
    """Whether the environment has a drawer and a window: OGBench's Scene."""
    return hasattr(inner, "_drawer_site_id")
