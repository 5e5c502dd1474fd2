"""One gymnasium environment as a row of a world: creation by name, observations mapped to LeRobot's keys.

This module runs inside worker processes, so neither it nor its imports load torch.
"""

import contextlib
import copy
import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from robopolicy.core.errors import ConfigError, SpecError, did_you_mean, extra_conflict
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.registry import import_named
from robopolicy.core.spec import Field
from sims.suites.families import family_of
from sims.suites.layout import (
    CHOICES,
    GOAL_KEYS,
    OWN_VIEW,
    Layout,
    distinct_names,
    entry_of,
    instruction_of,
    kind_of,
    observation_layout,
    resized,
)
from sims.suites.mujoco_state import MujocoCamera, MujocoState, has_mujoco_state
from sims.suites.success import SUCCESS_KEYS, SuccessRule, to_array, to_bool

MakeEnvironment = Callable[[], gymnasium.Env]
OLD = (
    "reset(*, seed, options) must return (observation, info), and step (observation, reward, terminated, truncated, "
    "info), with info a dictionary; wrap an environment with gym's old interface, for example in "
    "shimmy.GymV21CompatibilityV0(env=...)"
)
"""Description of gymnasium's interface, for error messages."""
NO_BOUND = 1e30
"""Action bounds of at least this size count as unbounded: float32 cannot represent their range."""
TASKS_TRIED = 32
"""Number of episodes started to find all task texts when an environment reports several."""


def open_gymnasium(env_id: str, env_options: Mapping[str, Any]) -> gymnasium.Env:
    """Create a registered environment without time limit and checking wrappers (the world does both itself).

    env_id: gymnasium's id, or "module:id" to import `module` first so that it can register; env_options: keyword
    arguments of the environment. Raises ConfigError on an unknown id or option.
    """
    family = family_of(env_id)
    env_options = {**family.env_options, **env_options} if family else env_options
    spec = copy.deepcopy(registered(env_id))
    spec.max_episode_steps, spec.order_enforce = None, False
    try:
        with warnings.catch_warnings():
            if family:
                warnings.simplefilter("ignore")  # about the package's own code
            environment = gymnasium.make(spec, disable_env_checker=True, **env_options)
            draws = "rgb_array" in (environment.metadata or {}).get("render_modes", ())
            if draws and not has_mujoco_state(environment) and takes_render_mode(type(environment.unwrapped)):
                environment.close()
                options = {"render_mode": "rgb_array", **env_options}
                environment = gymnasium.make(spec, disable_env_checker=True, **options)
    except Exception as error:  # an environment is foreign code
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ").removesuffix(".")
        conflict = extra_conflict(family.extra) if family else ""
        raise ConfigError(
            f"'{env_id}' could not be created with the options {dict(env_options)}: {text}.{conflict}"
        ) from error
    return family.wrapped(environment) if family else environment


def takes_render_mode(kind: type) -> bool:
    """Whether an environment class accepts a render mode; some that declare one do not."""
    if kind.__init__ is object.__init__:
        return False
    parameters = inspect.signature(kind.__init__).parameters.values()
    return any(each.name == "render_mode" or each.kind is each.VAR_KEYWORD for each in parameters)


def registered(env_id: str) -> EnvSpec:
    """Return the registered spec, importing the module named in the id, or the package of the id's family.

    Raises ConfigError when the module or environment does not exist, or the family's extra is missing.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        import_named(module, f"Environment '{env_id}'")
    elif name not in gymnasium.registry and (family := family_of(name)) is not None:
        family.register()
    if name not in gymnasium.registry:
        raise ConfigError(
            f"Gymnasium has no environment '{name}'. If a package registers it on import, put that package first: "
            f"'gymnasium:PACKAGE:{name}'.{did_you_mean(name, gymnasium.registry)}"
        )
    return gymnasium.registry[name]


@dataclass(frozen=True)
class Description:
    """Properties of an environment; fps is None when it does not report one.

    cameras: name -> description of the view; reports_success: whether success of an episode is reported; repeats:
    whether the same seed gives the same start again; draws: whether it can be rendered; tasks: task texts that it
    reports; open_gripper: action element -> value that opens the gripper.
    """

    layout: Layout
    action: Field
    fps: float | None
    cameras: dict[str, str]
    is_goal_environment: bool
    reports_success: bool
    repeats: bool
    draws: bool
    tasks: tuple[str, ...] = ()
    open_gripper: dict[int, float] = field(default_factory=dict[int, float])


class RowEnvironment:
    """An environment with vector observations, success flag, images and (for MuJoCo) full state access.

    success, success_key: see `SuccessRule`. seed_globals: also seed Python's and numpy's global generators, for
    environments that draw from them; each has its own global state, independent of its neighbours. increase: `step`
    returns the increase of the environment's reward since the previous step (0 in the first), for rewards that measure
    progress. An environment may have attributes `state_keys` and `element_names` (see `observation_layout`), used when
    no state_keys are given, `action_names`, `task_descriptions` (the texts of all its tasks), `open_gripper` (action
    element -> value that opens the gripper) and `painter` (draws its images, see `MujocoCamera`). notes: messages for
    the user, until `take_notes` returns them. task: task text of the episode, "" when the environment reports none.
    Raises ConfigError unless actions are a Box of floats, on an invalid `success`, and the errors of
    `observation_layout`.
    """

    def __init__(
        self,
        make: MakeEnvironment,
        state_keys: Sequence[str] | None = None,
        success_key: str | None = None,
        success: str | None = None,
        seed_globals: bool = False,
        increase: bool = False,
    ) -> None:
        self._notes: dict[str, bool] = {}  # text -> whether it was taken
        self._rule = SuccessRule(success, success_key, self._note)
        self._seed_globals, self._increase = seed_globals, increase
        # Sum of the rewards of this episode, and the last of them: part of a snapshot.
        self._paid = SimpleNamespace(total=0.0, last=None, drawn=None)
        self.environment = make()
        self._action_space = continuous(getattr(self.environment, "action_space", None))
        own_keys, names = (_attribute(self.environment, name) for name in ("state_keys", "element_names"))
        self.layout = observation_layout(
            getattr(self.environment, "observation_space", None),
            state_keys or own_keys or None,
            distinct_names(names, "element_names"),
        )
        self.action_dtype = self._action_space.dtype
        self.task = ""
        self._images: dict[str, np.ndarray] = {}
        self.state = MujocoState(self.environment, (self._paid,)) if has_mujoco_state(self.environment) else None
        own_camera = _attribute(self.environment, "painter")
        self._camera = own_camera or (MujocoCamera(self.environment, self.state) if self.state else None)

    def describe(self) -> Description:
        """Return the description, from which the parent process builds its spec."""
        environment = self.environment
        inner: Any = environment.unwrapped
        rate = control_rate((environment.metadata or {}).get("render_fps"))
        step_time = getattr(inner, "dt", None) if self.state else _dm_control_step(inner)
        space = self._action_space
        low, high = (tuple(map(unbounded_box, np.ravel(bound).tolist())) for bound in (space.low, space.high))
        names = distinct_names(_attribute(environment, "action_names"), "action_names")
        own_cameras = self._camera.names if self._camera else ((OWN_VIEW,) if environment.render_mode else ())
        picture_cameras = {
            camera: f"{' x '.join(map(str, picture.size))}, '{picture.name}' of the observation"
            for camera, picture in self.layout.pictures.items()
        }
        if names and len(names) != len(low):
            self._note(
                f"action_names has {len(names)} names, but the action has {len(low)} elements: the names are ignored."
            )
        reports, repeats, tasks = self._tried()
        return Description(
            layout=self.layout,
            action=Field((len(low),), low=low, high=high, names=names if len(names) == len(low) else ()),
            fps=1.0 / seconds if (seconds := control_rate(step_time)) else rate,
            cameras={**dict.fromkeys(own_cameras, "rendered at any size"), **picture_cameras},
            is_goal_environment=self._has_goals(),
            reports_success=reports,
            repeats=repeats,
            draws=self._camera is not None or bool(environment.render_mode) or bool(self.layout.pictures),
            tasks=tasks,
            open_gripper=dict(_attribute(environment, "open_gripper") or {}),
        )

    def _has_goals(self) -> bool:
        """Whether the observation has a desired and an achieved goal of equal size."""
        parts = [part for part in self.layout.parts if part.path]
        sizes = [sum(part.place.stop - part.place.start for part in parts if part.path[0] == key) for key in GOAL_KEYS]
        return 0 < sizes[0] == sizes[1]

    def _tried(self) -> tuple[bool, bool, tuple[str, ...]]:
        """Start an episode twice; return whether success is reported, whether both were identical, and the tasks."""
        space = self._action_space
        runs: list[list[np.ndarray]] = []
        info_keys: set[str] = set()
        try:
            for _ in range(2):
                out = np.zeros((2, self.layout.size), np.float32)
                self.reset(0, out[0])
                pictures = list(self._images.values())
                zero_action = np.clip(np.zeros(space.shape), space.low, space.high).astype(self.action_dtype)
                observation, *_, info = self._acted(zero_action)
                info_keys |= {key for key, value in info.items() if value is not None}
                self._take(observation, out[1])
                runs.append([out, *pictures, *self._images.values()])
            repeats = all(np.array_equal(*pair, equal_nan=True) for pair in zip(*runs, strict=True))
            return self._rule.known or not info_keys.isdisjoint(SUCCESS_KEYS), repeats, self._tasks()
        except Exception:  # what is wrong shows again where the environment is used, with its own words
            return True, True, ()

    def _tasks(self) -> tuple[str, ...]:
        """Return the tasks that the environment lists in `task_descriptions`, or reports in episodes; () for none."""
        if listed := _attribute(self.environment, "task_descriptions"):
            return tuple(map(str, listed))
        tasks, out = dict.fromkeys([self.task]), np.zeros(self.layout.size, np.float32)
        if self.task:
            for seed in range(1, TASKS_TRIED):
                self.reset(seed, out)
                tasks[self.task] = None
                if seed > 3 and len(tasks) == 1:  # one task, as most have
                    break
        return tuple(each for each in tasks if each)

    def reset(self, seed: int, out: np.ndarray, options: dict | None = None) -> None:
        """Start the episode of `seed` and write its first observation into `out` [D].

        Raises SpecError when the environment does not follow gymnasium's interface, and on an invalid observation.
        """
        self._paid.total, self._paid.last = 0.0, None
        try:
            with self._own_globals(int(seed)):
                result = self.environment.reset(seed=int(seed), **({} if options is None else {"options": options}))
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise SpecError(f"reset takes no seed ({error}): {OLD}.") from error
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise SpecError(f"reset returned {_described(result)}: {OLD}.")
        observation, info = result
        self._take(observation, out)
        self.task = instruction_of(info, observation, self.layout.texts, partial(_attribute, self.environment))

    @contextlib.contextmanager
    def _own_globals(self, seed: int | None = None) -> Iterator[None]:
        """With seed_globals, swap in this episode's state of the global generators; seed: seed them anew."""
        if not self._seed_globals:
            yield
            return
        outer_states = random.getstate(), np.random.get_state()  # noqa: NPY002 (the environment draws from it)
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
        elif self._paid.drawn is not None:
            random.setstate(self._paid.drawn[0])
            np.random.set_state(self._paid.drawn[1])  # noqa: NPY002
        try:
            yield
        finally:
            self._paid.drawn = random.getstate(), np.random.get_state()  # noqa: NPY002
            random.setstate(outer_states[0])
            np.random.set_state(outer_states[1])  # noqa: NPY002

    def step(self, action: np.ndarray, out: np.ndarray, last: bool = False) -> tuple[float, bool, bool, bool]:
        """Take a step, write the observation into `out` and return reward (NaN when it is not a number), terminated,
        truncated, success.

        action: [A], of the environment's dtype, which it may store; out: [D], the layout's size; last: whether the
        world's time limit ends the episode here. Raises SpecError when the environment does not follow gymnasium's
        interface, and the errors of `SuccessRule`.
        """
        observation, reward, terminated, truncated, info = self._acted(action)
        self._take(observation, out)
        self._paid.total += reward
        success = self._rule(
            info,
            lambda: {key: out[part] for key, part in self.layout.fields.items()},
            self._paid.total,
            terminated=terminated,
            over=terminated or truncated or last,
        )
        if self._increase:
            before, self._paid.last = self._paid.last, reward
            reward = 0.0 if before is None else reward - before
        return reward, terminated, truncated, success

    def _acted(self, action: np.ndarray) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
        """Execute an action, [A], and return the environment's result: observation, reward, terminated, truncated,
        info.
        """
        with self._own_globals():
            done = self.environment.step(action.reshape(self._action_space.shape))
        if not isinstance(done, tuple) or len(done) != 5:
            raise SpecError(f"step returned {_described(done)}: {OLD}.")
        observation, reward, terminated, truncated, info = done
        ends = [
            each if isinstance(each, bool) else to_bool(each, f"'{name}' of step", "step must return True or False")
            for name, each in (("terminated", terminated), ("truncated", truncated))
        ]
        return observation, _one_number(reward), ends[0], ends[1], info if isinstance(info, Mapping) else {}

    def _note(self, text: str) -> None:
        self._notes.setdefault(text, False)

    def take_notes(self) -> tuple[str, ...]:
        """Return the new messages for the user; each is returned only once."""
        new = tuple(text for text, was_taken in self._notes.items() if not was_taken)
        self._notes |= dict.fromkeys(new, True)
        return new

    def _take(self, observation: Any, out: np.ndarray) -> None:
        self.layout.write(observation, out)
        self._images = {camera: self.layout.picture(camera, observation) for camera in self.layout.pictures}

    def image(self, camera: str, height: int, width: int) -> np.ndarray:
        """Return uint8 [height, width, 3].

        Raises ConfigError when MuJoCo has no such camera or graphics context, or the environment renders no images, and
        SpecError when an image does not match its declared space.
        """
        if camera == OWN_VIEW and self._camera is None and not self.environment.render_mode and self._images:
            camera = next(iter(self._images))  # it draws no view of its own
        camera = entry_of(camera, (*self._images, *(self._camera.names if self._camera else ())))
        if camera in self._images:
            return resized(self.layout.pictures[camera].pixels(self._images[camera]), height, width)
        if self._camera is not None:
            return self._camera.image(camera, height, width)
        image = self.environment.render()
        if not isinstance(image, np.ndarray):
            raise ConfigError(
                f"The environment renders no images: render() returned {kind_of(image)}. It needs the render mode "
                "'rgb_array' and must return an array [height, width, 3]."
            )
        return resized(image, height, width)

    def close(self) -> None:
        """Close the environment and its graphics."""
        if self._camera is not None:
            self._camera.close()
        self.environment.close()


def continuous(space: spaces.Space | None) -> spaces.Box:
    """Return the action space if policies can use it (a Box of floats); raises ConfigError for any other."""
    if isinstance(space, spaces.Box) and space.dtype.kind == "f" and np.prod(space.shape):
        if (space.low > space.high).any():
            raise ConfigError(f"Its action_space {space} has lower bounds above its upper bounds: exchange them.")
        return space
    wrapped = "gymnasium.wrappers.TransformAction(env, FUNCTION, gymnasium.spaces.Box(-1, 1, (NUMBER,)))"
    if isinstance(space, spaces.Dict | spaces.Tuple):
        problem = "has several parts"
        wrapped += ", whose FUNCTION may use gymnasium.spaces.unflatten"
    elif isinstance(space, (*CHOICES, spaces.Box)):
        problem = "is an integer choice" if np.prod(space.shape or (1,)) else "is empty"
    else:
        problem = "is not a vector of numbers"
    raise ConfigError(
        f"Its action {problem}, {' '.join(str(space).split())[:120]}, but policies here output continuous numbers: "
        f"wrap it, {wrapped}, and register the result."
    )


def unbounded_box(bound: float) -> float:
    """Return an action bound, replaced by infinity when its size means none, such as the largest float32."""
    return float(bound) if abs(bound) < NO_BOUND else float(np.copysign(np.inf, bound))


def control_rate(value: Any) -> float | None:
    """Return the reported control steps per second, None unless it is a finite number above 0."""
    try:
        rate = float(value)
    except (TypeError, ValueError):
        return None
    return rate if 0 < rate < np.inf else None


def _one_number(reward: Any) -> float:
    """Return a reward, or NaN when it is not one number; the error is raised only where the reward is used."""
    if isinstance(reward, float):
        return float(reward)
    try:
        value = to_array(reward)
    except (TypeError, ValueError):
        return np.nan
    return float(value.item()) if value.size == 1 and value.dtype.kind in "biuf" else np.nan


def _described(returned: Any) -> str:
    return f"{len(returned)} values" if isinstance(returned, tuple) else f"one value, {kind_of(returned)}"


def _dm_control_step(environment: Any) -> float | None:
    """Return the seconds of a control step when an environment wraps one of dm_control's; None otherwise."""
    timestep = getattr(getattr(environment, "_env", None), "control_timestep", None)
    return float(timestep()) if callable(timestep) else None  # pyright: ignore[reportArgumentType]


def _attribute(environment: gymnasium.Env, name: str) -> Any:
    """Return the attribute `name` of an environment or of one of its wrappers, None when there is none."""
    return environment.get_wrapper_attr(name) if environment.has_wrapper_attr(name) else None


keep_former_names(__name__, {"boundless": "unbounded_box"})
