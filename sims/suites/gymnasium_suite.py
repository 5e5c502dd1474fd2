"""`GymnasiumWorld`: any gymnasium environment with continuous actions as a `World`, by name and configuration alone."""

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from robopolicy.core.errors import ConfigError, NonFiniteError, SpecError, did_you_mean
from robopolicy.core.randomness import numpy_generator
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Field, Observation, WorldSpec, validate_actions
from robopolicy.core.world import Rows, Snapshot, Step
from sims.engine import usable_threads
from sims.suites.environment import Description, MakeEnvironment, RowEnvironment, open_gymnasium, registered
from sims.suites.rewards import Reward, choose_reward
from sims.suites.vector import Images, Played, Pool

SEED_LIMIT = 2**31
"""Episode seeds are taken modulo this number, because some environments accept no larger ones."""


class GymnasiumWorld:
    """World, Snapshots (for environments that simulate with MuJoCo) and Renders for a gymnasium environment.

    name: of the world; make_environment: makes one environment without a time limit (importable in a fresh process when
    there are workers); batch_size: rows B; horizon: control steps until the time limit; instruction: the task in words;
    seed: of the generator that draws episode seeds when `reset` is given none; history: H frames; cameras: whose images
    (image_size x image_size) are part of the observation: entries of the observation that are images, cameras of the
    MuJoCo model, or "default", the environment's own view; workers: processes that share the rows, 0 for this process,
    None for one per usable core; terminate_on_success: False lets an episode run on;
    fps: control steps per second, default what the environment says; reward: None or "progress" (environments with
    goals: decrease of the distance to the goal times reward_scale, plus 1 at success), "environment" (its own reward),
    or "package.module:function", a potential (see `choose_reward`); success_key: entry of `info` (default is_success,
    else success); state_keys: entries of a dictionary observation that are the robot's own.
    `reset` options are handed to every started environment.
    """

    def __init__(
        self,
        name: str,
        make_environment: MakeEnvironment,
        batch_size: int,
        *,
        horizon: int,
        instruction: str,
        seed: int = 0,
        history: int = 1,
        cameras: Sequence[str] = (),
        image_size: int = 64,
        workers: int | None = 0,
        terminate_on_success: bool = True,
        fps: float | None = None,
        reward: str | Reward | None = None,
        reward_scale: float = 10.0,
        success_key: str | None = None,
        success_text: str = "the environment reports success",
        state_keys: Sequence[str] | None = None,
    ):
        if batch_size < 1 or history < 1 or horizon < 1:
            raise ConfigError(
                f"A world needs batch_size, history and horizon >= 1; got {batch_size}, {history} and {horizon}."
            )
        self._batch_size, self._history = batch_size, history
        row = partial(RowEnvironment, make_environment, state_keys, success_key)
        count = usable_threads() if workers is None else workers
        self.pool = Pool(name, row, batch_size, count, Images(tuple(cameras), image_size, history))
        try:
            description = self.pool.describe()
            self._reward = choose_reward(reward, reward_scale, description)
            fields = observation_fields(description, cameras, image_size)
            rate = fps if fps is not None else description.fps
            if rate is None:
                raise ConfigError(f"'{name}' does not say how many control steps make a second: give fps=NUMBER.")
        except BaseException:
            self.pool.close()
            raise
        self._layout = description.layout
        self._spec = WorldSpec(
            name=name,
            observation=fields,
            action=description.action,
            fps=rate,
            horizon=horizon,
            history=history,
            rewards=self._reward.names,
            instructions=(instruction,),
            success=success_text,
            terminate_on_success=terminate_on_success,
        )
        self._generator = numpy_generator(seed, f"sims/{name}/episode_seeds")
        self._arrays: dict[str, np.ndarray] | None = None

    @property
    def spec(self) -> WorldSpec:
        """Fields, ranges, rates and texts."""
        return self._spec

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return self._batch_size

    # -- episodes ------------------------------------------------------------------------------------------------

    def reset(
        self, rows: Rows = None, seeds: Sequence[int] | np.ndarray | None = None, options: Mapping | None = None
    ) -> Observation:
        """Start new episodes in `rows`; the first reset must cover every row. Returns all rows' observation."""
        index = self._rows(rows)
        if self._arrays is None and len(index) != self._batch_size:
            raise SpecError("The first reset must start every row: call reset() without rows.")
        if seeds is None:
            seeds = self._generator.integers(0, SEED_LIMIT, size=len(index))
        seeds = np.asarray(seeds, dtype=np.int64)
        if seeds.shape != (len(index),):
            raise SpecError(f"reset got {len(index)} row(s) but seeds of shape {seeds.shape}: give one seed per row.")
        if len(index) == 0:
            return self._observation()
        values, images = self.pool.reset(index, seeds % SEED_LIMIT, dict(options) if options else None)
        self._check_finite(values[:, None], index)
        fresh = {f"history/{key}": values[:, None, part] for key, part in self._layout.fields.items()}
        fresh |= {f"history/{IMAGE_PREFIX}{camera}": frame[:, None] for camera, frame in images.items()}
        fresh = {key: np.repeat(value, self._history, axis=1) for key, value in fresh.items()}
        fresh["steps"] = np.zeros(len(index), dtype=np.int64)
        for flag in ("success", "terminated", "truncated"):
            fresh[flag] = np.zeros(len(index), dtype=bool)
        if self._arrays is None:
            self._arrays = {
                name: np.empty((self._batch_size, *value.shape[1:]), value.dtype) for name, value in fresh.items()
            }
        for name, value in fresh.items():
            self._arrays[name][index] = value
        return self._observation()

    def step(self, actions: np.ndarray) -> Step:
        """Run a chunk [B, C, A] in the rows that have not ended; never resets."""
        arrays, spec = self._started(), self._spec
        actions = np.asarray(actions, dtype=np.float64)
        validate_actions(actions, spec.action, self._batch_size)
        chunk = actions.shape[1]
        running = ~(arrays["terminated"] | arrays["truncated"])
        limits = np.where(running, np.minimum(chunk, spec.horizon - arrays["steps"]), 0)
        actions = np.clip(actions, np.asarray(spec.action.low), np.asarray(spec.action.high))
        played = self.pool.step(actions, limits, spec.terminate_on_success)
        self._check_finite(played.values, np.arange(self._batch_size))
        valid = np.arange(chunk) < played.length[:, None]

        # The observation before the chunk, then after every step; a row that has ended stays at its last.
        at = self._history - 1 + np.minimum(np.arange(chunk + 1), played.length[:, None])
        window = played.length[:, None] + np.arange(self._history)
        path: dict[str, np.ndarray] = {}
        for key, part in self._layout.fields.items():
            joined = np.concatenate([arrays[f"history/{key}"], played.values[..., part]], axis=1)
            path[key] = np.take_along_axis(joined, at[..., None], axis=1)
            arrays[f"history/{key}"] = np.take_along_axis(joined, window[..., None], axis=1)
        self._shift_images(played)

        latched = arrays["success"][:, None] | np.logical_or.accumulate(played.success & valid, axis=1)
        first = latched & ~np.concatenate([arrays["success"][:, None], latched[:, :-1]], axis=1)
        rewards = self._reward.terms(played.reward, path, first, valid)
        arrays["steps"] = arrays["steps"] + played.length
        arrays["success"] = latched[:, -1]
        ended = played.terminated | (latched[:, -1] & spec.terminate_on_success)
        arrays["terminated"] = arrays["terminated"] | (running & ended)
        late = running & (played.truncated | (arrays["steps"] >= spec.horizon))
        arrays["truncated"] = arrays["truncated"] | (late & ~arrays["terminated"])
        return Step(
            observation=self._observation(),
            trace={key: np.ascontiguousarray(value[:, 1:]) for key, value in path.items()},
            rewards=rewards,
            valid=valid,
            terminated=arrays["terminated"].copy(),
            truncated=arrays["truncated"].copy(),
            success=arrays["success"].copy(),
        )

    def _shift_images(self, played: Played) -> None:
        """Append each row's new frames, at most H of them, to its image history."""
        arrays = self._started()
        fresh = np.minimum(played.length, self._history)
        window = fresh[:, None] + np.arange(self._history)
        for camera, frames in played.frames.items():
            key = f"history/{IMAGE_PREFIX}{camera}"
            new = np.arange(self._history) + (self._history - fresh)[:, None]
            order = np.minimum(new, self._history - 1)[..., None, None, None]
            joined = np.concatenate([arrays[key], np.take_along_axis(frames, order, axis=1)], axis=1)
            arrays[key] = np.take_along_axis(joined, window[..., None, None, None], axis=1)

    def _observation(self) -> Observation:
        """Return a copy of every row's history, [B, H, ...], and the instructions [B]."""
        arrays = self._started()
        observation = {key: arrays[f"history/{key}"].copy() for key in self._spec.observation}
        observation[TASK] = np.full(self._batch_size, self._spec.instructions[0])
        return observation

    # -- snapshots and images ----------------------------------------------------------------------------------

    def snapshot(self, rows: Rows = None) -> Snapshot:
        """Copy the full state of `rows`: physics, model, Python attributes with random generators, counters, history.

        Raises ConfigError where the environment does not simulate with MuJoCo.
        """
        index = self._rows(rows)
        own = {name: value[index] for name, value in self._started().items()}
        physics, attributes = self.pool.states(index)
        return Snapshot({**own, "physics": physics, "attributes": attributes})

    def restore(self, snapshot: Snapshot, rows: Rows = None) -> Observation:
        """Overwrite `rows` with `snapshot`, taken from this or a like world; returns all rows' observation."""
        arrays, index = self._started(), self._rows(rows)
        if len(snapshot) != len(index):
            raise SpecError(f"The snapshot has {len(snapshot)} row(s) but {len(index)} are to be restored.")
        for name, value in arrays.items():
            if name not in snapshot.arrays or snapshot.arrays[name].shape[1:] != value.shape[1:]:
                raise SpecError(
                    f"The snapshot does not fit this world ('{name}'): environment, history and cameras must agree."
                )
        self.pool.restore(index, snapshot.arrays["physics"], snapshot.arrays["attributes"])
        for name, value in arrays.items():
            value[index] = snapshot.arrays[name]
        return self._observation()

    def render(self, rows: Rows = None, camera: str | None = None, height: int = 240, width: int = 240) -> np.ndarray:
        """Return uint8 images [R, height, width, 3]; camera None is the view the environment itself renders from."""
        self._started()
        return self.pool.render(self._rows(rows), camera or "default", height, width)

    def close(self) -> None:
        """End the workers and free graphics; closing twice is harmless."""
        self.pool.close()

    def _check_finite(self, values: np.ndarray, rows: np.ndarray) -> None:
        if not np.isfinite(values).all():
            bad = rows[~np.isfinite(values).all(axis=(1, 2))][:5].tolist()
            raise NonFiniteError(
                f"The observation of '{self._spec.name}' is not finite in row(s) {bad}: its simulation diverged. Reset "
                "these rows; gentler actions avoid it."
            )

    def _started(self) -> dict[str, np.ndarray]:
        if self._arrays is None:
            raise SpecError("The world has not been started: call reset() first.")
        return self._arrays

    def _rows(self, rows: Rows) -> np.ndarray:
        """Return row indices [R], checked."""
        if rows is None:
            return np.arange(self._batch_size)
        index = np.asarray(rows, dtype=np.int64).reshape(-1)
        if len(index) and (index.min() < 0 or index.max() >= self._batch_size or len(np.unique(index)) != len(index)):
            raise SpecError(f"Rows {index.tolist()} must be distinct and lie in 0..{self._batch_size - 1}.")
        return index


def observation_fields(description: Description, cameras: Sequence[str], image_size: int) -> dict[str, Field]:
    """Return the world's observation fields. Raises ConfigError on an unknown camera."""
    for camera in cameras:
        if camera not in description.cameras:
            raise ConfigError(f"The environment has no camera '{camera}'.{did_you_mean(camera, description.cameras)}")
    layout, image = description.layout, Field((image_size, image_size, 3), "uint8", 0, 255)
    vectors = {key: Field((part.stop - part.start,), names=layout.names[key]) for key, part in layout.fields.items()}
    return {**vectors, **{IMAGE_PREFIX + camera: image for camera in cameras}}


def make_gymnasium_world(
    env_id: str,
    batch_size: int,
    *,
    horizon: int | None = None,
    instruction: str | None = None,
    env_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> GymnasiumWorld:
    """Return the registered environment `env_id` ("FetchPush-v4", or "package:Id-v0" to import its package first).

    horizon: default the registered time limit; instruction: default the words of the id; env_options: keyword arguments
    of the environment; options: of `GymnasiumWorld`. Raises ConfigError on an unknown id, camera or option.
    """
    check_options(options)
    limit = horizon if horizon is not None else registered(env_id).max_episode_steps
    if limit is None:
        raise ConfigError(f"'{env_id}' is registered without a time limit: give horizon=NUMBER of control steps.")
    return GymnasiumWorld(
        f"gymnasium:{env_id}",
        partial(open_gymnasium, env_id, dict(env_options or {})),
        batch_size,
        horizon=limit,
        instruction=words(env_id) if instruction is None else instruction,
        **options,
    )


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError, with the nearest name, on an option that `GymnasiumWorld` does not have."""
    known = set(inspect.signature(GymnasiumWorld).parameters) - {"name", "make_environment", "batch_size"}
    known |= {"env_options"}
    for name in options:
        if name not in known:
            raise ConfigError(f"Unknown option '{name}' of a gymnasium world.{did_you_mean(name, known)}")


def words(env_id: str) -> str:
    """Turn an id into words: "package:FetchPush-v4" -> "fetch push"."""
    name = re.sub(r"-v\d+$", "", env_id.rpartition(":")[2].rpartition("/")[2])
    return " ".join(re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", name)).lower()
