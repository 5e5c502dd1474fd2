"""One gymnasium environment as a row of a world: found by name, its observations laid out under LeRobot's keys.

This module runs inside worker processes, so it imports neither torch nor anything that does.
"""

import contextlib
import copy
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.registry import import_named
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field, Size
from sims.suites.families import FamilyMember, family_of
from sims.suites.mujoco_state import MujocoCamera, MujocoState, has_mujoco_state
from sims.suites.success import SUCCESS_KEYS, SuccessRule

ROBOT_KEYS = ("observation", "agent_pos", "state", "robot_state", "proprio")
"""Entries of a dictionary observation that are the robot's own: they become `observation.state`."""
GOAL_KEYS = ("achieved_goal", "desired_goal")

MakeEnvironment = Callable[[], gymnasium.Env]


def open_gymnasium(env_id: str, env_options: Mapping[str, Any]) -> gymnasium.Env:
    """Make a registered environment without time limit and checking wrappers (the world counts and checks itself).

    env_id: gymnasium's id, or "module:id" to import `module` first so that it can register; env_options: keyword
    arguments of the environment. Raises ConfigError on an unknown id or option.
    """
    family = family_of(env_id)
    env_options = {**family.env_options, **env_options} if family else env_options
    spec = copy.deepcopy(registered(env_id))
    spec.max_episode_steps, spec.order_enforce = None, False
    try:
        environment = gymnasium.make(spec, disable_env_checker=True, **env_options)
        if not has_mujoco_state(environment) and "rgb_array" in environment.metadata.get("render_modes", ()):
            environment.close()
            environment = gymnasium.make(spec, disable_env_checker=True, **{"render_mode": "rgb_array", **env_options})
    except Exception as error:  # an environment is foreign code
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"'{env_id}' could not be made with options {dict(env_options)}: {type(error).__name__}: {text}"
        ) from error
    return FamilyMember(environment, family) if family else environment


def registered(env_id: str) -> EnvSpec:
    """Return the registered spec, importing the module named in the id, or the package of the id's family.

    Raises ConfigError when there is no such module or environment, or the family's extra is missing.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        import_named(module, f"Environment '{env_id}'")
    elif name not in gymnasium.registry and (family := family_of(name)) is not None:
        family.register()
    if name not in gymnasium.registry:
        raise ConfigError(
            f"Gymnasium knows no environment '{name}'.{did_you_mean(name, gymnasium.registry)} If a package registers "
            f"it on import, name that package first: 'gymnasium:PACKAGE:{name}'."
        )
    return gymnasium.registry[name]


@dataclass(frozen=True)
class Layout:
    """How a gymnasium observation becomes one float32 vector, fields by LeRobot key, and camera images.

    parts: (path into the observation, slice of the vector); fields: key -> slice; names: key -> one per element;
    images: camera -> path; sizes: camera -> (height, width) of these images, "image" among them where LeRobot means it.
    """

    size: int
    parts: tuple[tuple[tuple[str, ...], slice], ...]
    fields: dict[str, slice]
    names: dict[str, tuple[str, ...]]
    images: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: dict[str, Size] = field(default_factory=dict)

    def write(self, observation: Any, out: np.ndarray) -> None:
        """Write the numbers of `observation`, an array or nested dictionaries of arrays, into `out` [size]."""
        for path, place in self.parts:
            value = observation
            for key in path:
                value = value[key]
            out[place] = value if getattr(value, "ndim", 0) == 1 else np.ravel(value)


def observation_layout(
    space: spaces.Space, state_keys: Sequence[str] | None = None, element_names: Sequence[str] = ()
) -> Layout:
    """Lay out an observation space; state_keys: which entries are the robot's own (default ROBOT_KEYS); element_names:
    of a flat observation's numbers, () for none.

    Box -> observation.state. Dict: the robot's entries -> observation.state, every other vector (goals, objects) ->
    observation.environment_state in the space's order, uint8 images of 1, 3 or 4 channels -> cameras named after their
    key; other images are left out. Raises ConfigError on an empty space, on an entry that is no Box, and when
    state_keys names what the space lacks.
    """
    leaves = dict(_leaves(space, ()))
    seen = [path for path, box in leaves.items() if _is_image(box) and channel_axis(box.shape) is not None]
    images = {path[-1] if path else "pixels": path for path in seen}
    vectors = {path: box for path, box in leaves.items() if not _is_image(box)}
    if not vectors and not images:
        raise ConfigError(f"The observation space {space} has neither numbers nor images of 1, 3 or 4 channels.")
    known = {path[0] for path in vectors if path}
    for key in state_keys or ():
        if key not in known:
            raise ConfigError(f"state_keys names '{key}', which the observation lacks.{did_you_mean(key, known)}")
    robot = set(state_keys or ROBOT_KEYS)
    if not known & robot:
        robot = known - {"environment_state", *GOAL_KEYS}
    own = [path for path in vectors if not path or path[0] in robot]
    parts, fields, names, start = [], {}, {}, 0
    for key, paths in ((STATE, own), (ENVIRONMENT_STATE, [path for path in vectors if path not in own])):
        begin, elements = start, []
        for path in paths:
            size = int(np.prod(vectors[path].shape))
            parts.append((path, slice(start, start + size)))
            numbered = [f"{'.'.join(path) or 'observation'}[{index}]" for index in range(size)]
            elements += element_names if not path and len(element_names) == size else numbered
            start += size
        if elements:
            fields[key], names[key] = slice(begin, start), tuple(elements)
    sizes = {camera: _pixels(leaves[path].shape) for camera, path in images.items()}
    if LONE not in images and LONE_ENTRY in images:
        sizes[LONE] = sizes[LONE_ENTRY]
    return Layout(start, tuple(parts), fields, names, images, sizes)


def _leaves(space: spaces.Space, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], spaces.Box]]:
    if isinstance(space, spaces.Box):
        return [(path, space)]
    if isinstance(space, spaces.Dict):
        return [leaf for key, item in space.spaces.items() for leaf in _leaves(item, (*path, key))]
    raise ConfigError(
        f"Observation entry '{'.'.join(path) or 'observation'}' is a {type(space).__name__} space; a world needs Box "
        "entries. Wrap the environment in gymnasium.wrappers.FlattenObservation and register the result."
    )


def _is_image(box: spaces.Box) -> bool:
    return box.dtype == np.uint8 and len(box.shape) == 3


@dataclass(frozen=True)
class Description:
    """What an environment says about itself; fps is None where it does not say.

    reports_success: whether anybody says when an episode has succeeded; repeats: whether an episode begins the same way
    again with the same seed; draws: whether it can be looked at.
    """

    layout: Layout
    action: Field
    fps: float | None
    cameras: tuple[str, ...]
    is_goal_environment: bool
    reports_success: bool
    repeats: bool
    draws: bool


class RowEnvironment:
    """An environment with vector observations, success flag, images and (for MuJoCo) its full state.

    success, success_key: see `SuccessRule`. seed_globals: seed Python's and numpy's global generators as well, for
    environments that draw from them: each has their state for itself, whatever its neighbours draw. increase: `step`
    returns the increase of the environment's reward since the step before, 0 in the first, for rewards that say how far
    the task has come. An environment may have attributes `state_keys` and `element_names` (see `observation_layout`),
    which count where no state_keys are given. notes: what the user should know of what happened, until `take_notes`
    takes it. Raises ConfigError unless actions are a one-dimensional Box, on a bad `success`, and where
    `observation_layout` does.
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
        own_keys, names = (_attribute(self.environment, name) for name in ("state_keys", "element_names"))
        self.layout = observation_layout(self.environment.observation_space, state_keys or own_keys or None, names)
        space = self.environment.action_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ConfigError(f"A world needs a one-dimensional Box of continuous actions; this one has {space}.")
        self._action_space = space
        self.action_dtype = space.dtype
        self._images: dict[str, np.ndarray] = {}
        self.state = MujocoState(self.environment, (self._paid,)) if has_mujoco_state(self.environment) else None
        self._camera = MujocoCamera(self.environment, self.state) if self.state else None

    def describe(self) -> Description:
        """Return the description, from which the parent process builds its spec."""
        environment, space = self.environment, self._action_space
        inner: Any = environment.unwrapped
        rate = environment.metadata.get("render_fps")
        step_time = getattr(inner, "dt", None) if self.state else _dm_control_step(inner)
        cameras = self._camera.names if self._camera else (("default",) if environment.render_mode else ())
        reports, repeats = self._tried()
        return Description(
            layout=self.layout,
            action=Field(tuple(space.low.shape), low=tuple(map(float, space.low)), high=tuple(map(float, space.high))),
            fps=float(1.0 / step_time) if step_time else (float(rate) if rate else None),
            cameras=(*self.layout.images, *cameras),
            is_goal_environment=set(GOAL_KEYS) <= {path[0] for path, _ in self.layout.parts if path},
            reports_success=reports,
            repeats=repeats,
            draws=self._camera is not None or bool(environment.render_mode) or bool(self.layout.images),
        )

    def _tried(self) -> tuple[bool, bool]:
        """Begin an episode twice, and return whether success is reported, and whether both went alike."""
        space = self._action_space
        seen: list[np.ndarray] = []
        known: set[str] = set()
        try:
            for _ in range(2):
                out = np.zeros((2, self.layout.size), np.float32)
                self.reset(0, out[0])
                still = np.clip(np.zeros(space.shape), space.low, space.high).astype(self.action_dtype)
                with self._own_globals():
                    observation, *_, info = self.environment.step(still)
                known |= set(info)
                self.layout.write(observation, out[1])
                seen.append(out)
        except Exception:  # what is wrong shows again where the environment is used, with its own words
            return True, True
        return self._rule.known or not known.isdisjoint(SUCCESS_KEYS), bool(np.array_equal(*seen, equal_nan=True))

    def reset(self, seed: int, out: np.ndarray, options: dict | None = None) -> None:
        """Start the episode of `seed` and write its first observation into `out` [D]."""
        self._paid.total, self._paid.last = 0.0, None
        with self._own_globals(int(seed)):
            observation, _ = self.environment.reset(seed=int(seed), options=options)
        self._take(observation, out)

    @contextlib.contextmanager
    def _own_globals(self, seed: int | None = None) -> Iterator[None]:
        """With seed_globals, let this episode's state stand in for that of the global generators; seed: begin anew."""
        if not self._seed_globals:
            yield
            return
        theirs = random.getstate(), np.random.get_state()  # noqa: NPY002 (the environment draws from it)
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
            random.setstate(theirs[0])
            np.random.set_state(theirs[1])  # noqa: NPY002

    def step(self, action: np.ndarray, out: np.ndarray, last: bool = False) -> tuple[float, bool, bool, bool]:
        """Act, write the observation into `out` and return reward, terminated, truncated, success.

        action: [A], of the environment's dtype, which it may keep; out: [D], the layout's size; last: whether the
        world's time limit ends the episode here. Raises as `SuccessRule` does.
        """
        with self._own_globals():
            observation, reward, terminated, truncated, info = self.environment.step(action)
        self._take(observation, out)
        paid = float(reward)
        self._paid.total += paid
        success = self._rule(
            info,
            lambda: {key: out[part] for key, part in self.layout.fields.items()},
            self._paid.total,
            terminated=bool(terminated),
            over=bool(terminated or truncated or last),
        )
        if self._increase:
            before, self._paid.last = self._paid.last, paid
            paid = 0.0 if before is None else paid - before
        return paid, bool(terminated), bool(truncated), success

    def _note(self, text: str) -> None:
        self._notes.setdefault(text, False)

    def take_notes(self) -> tuple[str, ...]:
        """Return what the user should know that was not taken yet; nothing comes twice."""
        new = tuple(text for text, taken in self._notes.items() if not taken)
        self._notes |= dict.fromkeys(new, True)
        return new

    def _take(self, observation: Any, out: np.ndarray) -> None:
        self.layout.write(observation, out)
        for camera, path in self.layout.images.items():
            image = observation
            for key in path:
                image = image[key]
            self._images[camera] = image

    def image(self, camera: str, height: int, width: int) -> np.ndarray:
        """Return uint8 [height, width, 3].

        Raises ConfigError when MuJoCo has no such camera or graphics context, or the environment draws no images.
        """
        entry = entry_of(camera, (*self._images, *(self._camera.names if self._camera else ())))
        if entry in self._images:
            return resized(self._images[entry], height, width)
        if self._camera is not None:
            return self._camera.image(camera, height, width)
        image = self.environment.render()
        if not isinstance(image, np.ndarray):
            raise ConfigError("The environment draws no images: it has no 'rgb_array' render mode.")
        return resized(image, height, width)

    def close(self) -> None:
        """Close the environment and its graphics."""
        if self._camera is not None:
            self._camera.close()
        self.environment.close()


def _dm_control_step(environment: Any) -> float | None:
    """Return the seconds of a control step where an environment wraps one of dm_control's; None where it does not."""
    timestep = getattr(getattr(environment, "_env", None), "control_timestep", None)
    return float(timestep()) if callable(timestep) else None  # pyright: ignore[reportArgumentType]


def _attribute(environment: gymnasium.Env, name: str) -> Sequence[str]:
    """Return what an environment, or a wrapper of it, says under `name`, () where it says nothing."""
    return environment.get_wrapper_attr(name) if environment.has_wrapper_attr(name) else ()


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return `image` as uint8 [height, width, 3], by nearest neighbour.

    It is [h, w, C], or [C, h, w] of one or three channels C. One (grey) is repeated; of four the last (how opaque a
    pixel is) is left out. Raises ConfigError on any other shape.
    """
    axis = channel_axis(image.shape)
    if axis is None:
        raise ConfigError(f"The environment draws {list(image.shape)}: an image has 1, 3 or 4 channels.")
    image = np.moveaxis(image, axis, -1)[..., :3]
    # The middle of each new pixel falls into one old pixel, whose colour it takes.
    rows = (np.arange(height) + 0.5) * image.shape[0] / height
    columns = (np.arange(width) + 0.5) * image.shape[1] / width
    pixels = image[rows.astype(int)][:, columns.astype(int)]
    return np.ascontiguousarray(np.broadcast_to(pixels, (height, width, 3)), dtype=np.uint8)


LONE, LONE_ENTRY = "image", "pixels"
"""LeRobot calls an environment's only picture, its entry "pixels", `observation.image`."""


def entry_of(camera: str, known: Collection[str]) -> str:
    """Return the name that the environment has for a camera, of those it knows."""
    return LONE_ENTRY if camera == LONE and LONE not in known and LONE_ENTRY in known else camera


def _pixels(shape: Sequence[int]) -> Size:
    """Return (height, width) of an image's shape, whichever axis holds its channels."""
    axis = channel_axis(shape)
    height, width = shape[:2] if axis == -1 else shape[1:]
    return height, width


def channel_axis(shape: Sequence[int]) -> int | None:
    """Return where an image of this shape, [h, w, C] or [C, h, w], has its channels; None where it is no image."""
    if len(shape) != 3:
        return None
    if 3 in (shape[-1], shape[0]):
        return -1 if shape[-1] == 3 else 0
    if shape[-1] in (1, 4):
        return -1
    return 0 if shape[0] == 1 else None
