"""A robopolicy world as a gymnasium `VectorEnv`, with the attributes that LeRobot requires of environments."""

from collections.abc import Mapping, Sequence
from typing import Any, overload

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE, TASK, Field, Observation, WorldSpec
from robopolicy.core.world import World, can_render

NEW_ROLLOUT = "lerobot_new_rollout"
"""Reset option of LeRobot's rollouts: rows that have ended are ignored until the next reset."""

RAW_NAMES = {STATE: "agent_pos", ENVIRONMENT_STATE: "environment_state"}
"""robopolicy's keys -> those of LeRobot's environments; images are below "pixels"."""


def raw_key(key: str) -> str:
    """Return the name in an environment's observation for the policy's observation key `key`."""
    return RAW_NAMES.get(key, key.removeprefix("observation."))


class WorldVectorEnvironment(VectorEnv[dict[str, Any], np.ndarray, np.ndarray]):
    """All rows of a world as one vector environment, stepped together; B row, A action dimension.

    Rows that end are reset in the same step (SAME_STEP), except in a rollout of LeRobot's, where they stay as they are.
    `call` and `get_attr` support _max_episode_steps, task (the world's name), task_description (the row's instruction)
    and render, like a vector of single environments.
    """

    def __init__(self, world: World):
        self.world, spec = world, world.spec
        self.num_envs = world.batch_size
        self.metadata = {
            "autoreset_mode": AutoresetMode.SAME_STEP,
            "render_fps": round(spec.fps),
            "render_modes": ["rgb_array"],
        }
        self.render_mode = "rgb_array"
        self.single_action_space = _box(spec.action)
        self.single_observation_space = _observation_space(spec)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self._tasks = [spec.instructions[0]] * self.num_envs
        self._resting = False

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode in every row; seed: one per row, or that of the first row, from which the others count up.

        Raises ConfigError where only some rows have a seed.
        """
        reset_options = dict(options or {})
        self._resting = bool(reset_options.pop(NEW_ROLLOUT, False))
        if isinstance(seed, int):
            seed = range(seed, seed + self.num_envs)
        seeds = [] if seed is None else [each for each in seed if each is not None]
        if len(seeds) not in (0, self.num_envs):
            raise ConfigError(f"{len(seeds)} seeds for {self.num_envs} rows: pass one seed per row, or none.")
        return self._shown(self.world.reset(seeds=seeds or None, options=reset_options or None)), {}

    def step(self, actions: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Run one control step [B, A] of every row; info contains is_success [B], and final_info where rows ended."""
        step = self.world.step(np.asarray(actions, dtype=np.float64)[:, None])
        ended_rows, observation = step.ended, step.observation
        info: dict[str, Any] = {"is_success": step.success.copy()}
        if ended_rows.any():
            info["final_info"] = {"is_success": step.success & ended_rows, "_is_success": ended_rows}
            info["_final_info"] = ended_rows
            if not self._resting:
                info |= {"final_obs": self._shown(observation), "_final_obs": ended_rows}
                observation = self.world.reset(rows=np.flatnonzero(ended_rows))
        truncated = ended_rows & ~step.terminated
        return self._shown(observation), step.reward[:, 0], step.terminated.copy(), truncated, info

    def call(self, name: str, *args: Any, **kwargs: Any) -> Sequence[Any]:
        """Return the value of attribute `name` in every row; images are rendered on access."""
        return Pictures(self.world) if name == "render" else self.get_attr(name)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every row; raises AttributeError if rows have no such attribute."""
        if name == "task_description":
            return tuple(self._tasks)
        attributes = {"_max_episode_steps": self.world.spec.horizon, "task": self.world.spec.name}
        if name not in attributes:
            raise AttributeError(f"'{self.world.spec.name}' has no '{name}'.")
        return (attributes[name],) * self.num_envs

    def render(self) -> tuple[np.ndarray, ...]:
        """Return an image [height, width, 3] uint8 of every row."""
        return tuple(Pictures(self.world))

    def close_extras(self, **kwargs: Any) -> None:
        """Close the world."""
        self.world.close()

    def _shown(self, observation: Observation) -> dict[str, Any]:
        """Return the newest frame of every field, by LeRobot's raw names."""
        self._tasks = [str(text) for text in observation[TASK]]
        pixels = {
            key.removeprefix(IMAGE_PREFIX): observation[key][:, -1].copy()
            for key in self.world.spec.observation
            if key.startswith(IMAGE_PREFIX)
        }
        vectors = {
            raw_key(key): observation[key][:, -1].copy()
            for key in self.world.spec.observation
            if not key.startswith(IMAGE_PREFIX)
        }
        return {**vectors, "pixels": pixels} if pixels else vectors


class Pictures(Sequence[np.ndarray]):
    """The default view of every row, rendered on access: LeRobot records videos of at most ten rows.

    Worlds that cannot be rendered give black images, because LeRobot's video recording cannot be disabled.
    """

    def __init__(self, world: World):
        self.world = world

    def __len__(self) -> int:
        return self.world.batch_size

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        indices = np.arange(len(self))[index]
        rows = np.atleast_1d(indices)
        images = self.world.render(rows) if can_render(self.world) else np.zeros((len(rows), 240, 240, 3), np.uint8)
        return list(images) if isinstance(index, slice) else images[0]


def _box(field: Field) -> Box:
    low, high = (
        np.broadcast_to(np.asarray(bound, np.float32), field.shape).copy() for bound in (field.low, field.high)
    )
    return Box(low.astype(field.dtype), high.astype(field.dtype), field.shape, np.dtype(field.dtype).type)


def _observation_space(spec: WorldSpec) -> Dict:
    spaces: dict[str, gymnasium.Space[Any]] = {}
    cameras: dict[str, gymnasium.Space[Any]] = {}
    for key, field in spec.observation.items():
        if key.startswith(IMAGE_PREFIX):
            cameras[key.removeprefix(IMAGE_PREFIX)] = Box(0, 255, field.shape, np.uint8)
        else:
            spaces[raw_key(key)] = _box(field)
    return Dict({**spaces, "pixels": Dict(cameras)} if cameras else spaces)
