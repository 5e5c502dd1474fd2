"""`GymnasiumWorld`: any gymnasium environment with continuous actions as a `World`, by name and settings alone."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from robopolicy.core.action_bounds import clip_if_bounded
from robopolicy.core.episode_rows import EpisodeRows, require_sizes
from robopolicy.core.errors import (
    CameraError,
    ConfigError,
    NonFiniteError,
    RobopolicyWarning,
    did_you_mean,
    extra_conflict,
)
from robopolicy.core.history import select, shifted_indices
from robopolicy.core.machine import usable_threads
from robopolicy.core.randomness import numpy_generator
from robopolicy.core.registry import named_arguments, require_types
from robopolicy.core.spec import (
    IMAGE_PREFIX,
    Field,
    ImageSize,
    Observation,
    WorldSpec,
    image_fields,
    image_sizes,
    least_return,
    validate_actions,
)
from robopolicy.core.world import Rows, Snapshot, Step
from sims.suites.environment import (
    Description,
    MakeEnvironment,
    RowEnvironment,
    control_rate,
    open_gymnasium,
    registered,
)
from sims.suites.families import family_of
from sims.suites.layout import entry_of
from sims.suites.rewards import INCREASE, Reward, choose_reward
from sims.suites.success import TERMINATED, UNEXPECTED
from sims.suites.vector import Images, Played, Pool

SEED_LIMIT = 2**31
"""Episode seeds are taken modulo this number, because some environments do not accept larger ones."""


class GymnasiumWorld:
    """World with snapshots (for environments simulated with MuJoCo) and rendering for a gymnasium environment.

    name: of the world; make_environment: creates one environment without a time limit (importable in a fresh process
    when there are workers); batch_size: rows B; horizon: control steps until the time limit; instruction: the task in
    words; seed: of the generator of episode seeds when `reset` is given none; history: H frames; cameras: cameras whose
    images (image_size: see `core.spec.image_sizes`) are part of the observation: its image entries, cameras of the
    MuJoCo model, or "default", the environment's own view; workers: processes that share the rows, 0 for this process,
    None for one per usable core; terminate_on_success: False continues an episode; fps: control steps per second,
    default the rate that the environment reports; reward: None or "progress" (environments with goals: decrease of the
    distance to the goal times reward_scale, plus 1 at success), "environment" (its own reward), "increase" (the
    increase of its own reward times reward_scale, plus 1 at success), or "package.module:function", a potential (see
    `choose_reward`); success: "package.module:function", observation arrays [n] by key -> whether the task is done,
    "return >= NUMBER" or "return so far >= NUMBER", of the environment's own rewards, or "terminated"; without it
    success_key: entry of `info` (default the first of SUCCESS_KEYS), see `SuccessRule`; seed_globals: seed Python's and
    numpy's global generators with every episode; clip_actions: whether actions are clipped to the declared bounds or
    passed unchanged (many environments declare bounds only formally); state_keys: entries of a dictionary observation
    that are the robot's own; own_task: whether to use the task text that the environment reports in every episode, if
    any (see `instruction_of`); `instruction` is used otherwise. available_cameras: name -> description of the view;
    open_gripper: see `core.faults.HasGripper`. repeats: whether the same seed gives the same start again; draws:
    whether it can be rendered; when success is not reported, spec.reports_success is False. `reset` options are passed
    to every started environment. Raises ConfigError on an unknown camera, reward, success or state key, sizes below 1,
    and an unknown control rate.
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
        image_size: ImageSize | None = None,
        workers: int | None = 0,
        terminate_on_success: bool = True,
        fps: float | None = None,
        reward: str | Reward | None = None,
        reward_scale: float = 10.0,
        success: str | None = None,
        success_key: str | None = None,
        success_text: str = "the environment reports success",
        seed_globals: bool = False,
        clip_actions: bool = False,
        state_keys: Sequence[str] | None = None,
        own_task: bool = False,
    ):
        arguments = {name: value for name, value in locals().items() if name != "batch_size"}
        require_types(GymnasiumWorld, arguments, "world.options.")
        require_sizes(batch_size=batch_size, history=history, horizon=horizon)
        if workers is not None and workers < 0:
            raise ConfigError(f"world.options.workers={workers} must be at least 0, or null for one per CPU core.")
        self._batch_size, self._history = batch_size, history
        increase = reward == INCREASE
        row = partial(RowEnvironment, make_environment, state_keys, success_key, success, seed_globals, increase)
        count = usable_threads() if workers is None else workers
        self.pool = Pool(name, row, batch_size, count, Images(tuple(cameras), image_size, history))
        try:
            description = self.pool.describe()
            self._reward = choose_reward(reward, reward_scale, description)
            fields = observation_fields(description, cameras, image_size)
            rate = _rate(name, description.fps if fps is None else control_rate(fps))
        except BaseException:
            self.pool.close()
            raise
        for note in first_notes(name, description, seed_globals):
            warnings.warn(note, RobopolicyWarning, stacklevel=2)
        self.repeats = description.repeats
        self.draws = description.draws
        self.available_cameras = description.cameras
        self.open_gripper = description.open_gripper
        self._layout, self._told = description.layout, set[str]()
        self._instruction, tasks = instruction, description.tasks if own_task else ()
        self._own_task = bool(tasks)
        scores_return = success is not None and least_return(success) is not None
        self._spec = WorldSpec(
            name=name,
            observation=fields,
            action=description.action,
            fps=rate,
            horizon=horizon,
            history=history,
            rewards=self._reward.names,
            instructions=tasks or (instruction,),
            success=criterion(success, success_text) if description.reports_success else "",
            reports_success=description.reports_success,
            # A return is known where the episode ends, so it ends none: values go on behind a time limit.
            terminate_on_success=terminate_on_success and not scores_return,
            clips_actions=clip_actions,
        )
        draws = numpy_generator(seed, f"sims/{name}/episode_seeds")
        self._episodes = EpisodeRows(self._spec, batch_size, lambda count: draws.integers(0, SEED_LIMIT, size=count))

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
        """Start new episodes in `rows`, the first time in every row. Returns all rows' observation [B, H, ...].

        Raises SpecError on invalid rows or seeds, NonFiniteError when the environment starts with NaN or infinity.
        """
        index, seeds = self._episodes.reset_rows(rows, seeds)
        if len(index) == 0:
            return self._episodes.observation()
        values, tasks, images = self.pool.reset(index, seeds % SEED_LIMIT, dict(options) if options else None)
        self._check_finite(values[:, None], index)
        instructions = [task if task and self._own_task else self._instruction for task in tasks]
        frames = {key: values[:, None, part] for key, part in self._layout.fields.items()}
        frames |= {IMAGE_PREFIX + name: each[:, None] for name, each in images.items()}
        self._episodes.start(index, frames, instruction=self._episodes.instruction_index(instructions))
        return self._episodes.observation()

    def step(self, actions: np.ndarray) -> Step:
        """Run a chunk [B, C, A] in the rows that have not ended; never resets.

        Raises SpecError on a wrong shape or before the first reset, NonFiniteError on non-finite actions, observations
        or rewards.
        """
        episodes, spec = self._episodes, self._spec
        index = episodes.running_index
        actions = np.asarray(actions, dtype=np.float64)
        validate_actions(actions, spec.action, self._batch_size)
        chunk = actions.shape[1]
        remaining = spec.horizon - episodes.arrays["steps"][index]
        if not len(remaining):
            return episodes.idle(chunk)
        remaining = episodes.scatter(index, remaining)
        results = self.pool.step(clip_if_bounded(spec, actions), remaining, spec.terminate_on_success)
        self._tell(results.notes)
        self._check_finite(results.values, np.arange(self._batch_size))

        ends = {}
        if results.terminated.any() or results.truncated.any():
            last = np.arange(chunk) == results.length[index, None] - 1
            ends["terminated"] = results.terminated[index, None] & last
            ends["truncated"] = results.truncated[index, None] & last
        advanced = episodes.advance(index, results.success[index], **ends)
        length = advanced.length if advanced.length.min() < chunk else None
        values = results.values[index]
        frames = {key: values[..., part] for key, part in self._layout.fields.items()}
        trace = episodes.trace(index, frames, length)
        path = {}
        if self._reward.potential is not None:
            before = {key: episodes.arrays[f"history/{key}"][:, -1:] for key in frames}
            path = {key: np.concatenate([before[key], value], axis=1) for key, value in trace.items()}
        episodes.move_history(index, frames, length)
        if results.frames:
            self._move_images(results)
        valid, first = episodes.scatter(index, advanced.live), episodes.scatter(index, advanced.first)
        return episodes.step(trace, self._reward.terms(results.reward, path, first, valid), valid)

    def _move_images(self, played: Played) -> None:
        """Append each row's new frames, at most H of them, to its image history.

        New frames are at the end of the played frames [B, H, ...], so they already have their place in the shifted
        history; old frames move forward by the number of new ones.
        """
        window = shifted_indices(np.minimum(played.length, self._history), self._history)
        index = np.where(window < self._history, window, self._history + np.arange(self._history))
        for camera, frames in played.frames.items():
            history = self._episodes.arrays[f"history/{IMAGE_PREFIX}{camera}"]
            history[:] = select(np.concatenate([history, frames], axis=1), index)

    # -- snapshots and images ----------------------------------------------------------------------------------

    def snapshot(self, rows: Rows = None) -> Snapshot:
        """Copy the full state of `rows`: physics, model, Python attributes with random generators, counters, history.

        Arrays [R, ...]; physics [R, N] contains data and model, attributes [R] Python objects. Raises ConfigError when
        the environment is not simulated with MuJoCo, SpecError on invalid rows and before the first reset.
        """
        own_arrays = self._episodes.snapshot(rows)
        physics, attributes = self.pool.states(self._episodes.index(rows))
        return Snapshot({**own_arrays, "physics": physics, "attributes": attributes})

    def restore(self, snapshot: Snapshot, rows: Rows = None) -> Observation:
        """Overwrite `rows` with `snapshot`, taken from this or an equal world; returns all rows' observation [B, H,
        ...].

        Raises SpecError when the snapshot does not match the rows and this world.
        """
        index = self._episodes.validate_snapshot(snapshot, rows)
        self.pool.restore(index, snapshot.arrays["physics"], snapshot.arrays["attributes"])
        self._episodes.restore(snapshot, rows)
        return self._episodes.observation()

    def render(self, rows: Rows = None, camera: str | None = None, height: int = 240, width: int = 240) -> np.ndarray:
        """Return uint8 images [R, height, width, 3]; camera None is the view the environment itself renders from.

        Raises SpecError on invalid rows and before the first reset, ConfigError when `RowEnvironment.image` does.
        """
        self._episodes.require_started()
        return self.pool.render(self._episodes.index(rows), camera or "default", height, width)

    def close(self) -> None:
        """Stop the workers and free graphics; closing twice is harmless."""
        self.pool.close()

    def _tell(self, notes: Sequence[str]) -> None:
        """Issue each message for the user as a warning, once."""
        for note in notes:
            expected = self._spec.reports_success and note.startswith(UNEXPECTED)
            if note not in self._told and not expected:
                self._told.add(note)
                warnings.warn(f"'{self._spec.name}': {note}", RobopolicyWarning, stacklevel=3)

    def _check_finite(self, values: np.ndarray, rows: np.ndarray) -> None:
        """Raise NonFiniteError, naming the rows [R], unless values [R, C, D] are finite."""
        if not np.isfinite(values).all():
            bad_mask = ~np.isfinite(values)
            elements = [name for names in self._layout.names.values() for name in names]
            bad_elements = [elements[place] for place in np.flatnonzero(bad_mask.any(axis=(0, 1)))]
            rest_text = f" and {len(bad_elements) - 5} more" if len(bad_elements) > 5 else ""
            raise NonFiniteError(
                f"The observation of '{self._spec.name}' is not finite in row(s) "
                f"{rows[bad_mask.any(axis=(1, 2))][:5].tolist()}: {', '.join(bad_elements[:5])}{rest_text}. If a "
                f"sensor returns these values, replace them in the environment, for example with numpy.nan_to_num. If "
                f"the simulation diverged, reset these rows; gentler actions avoid this."
            )


def _rate(name: str, rate: float | None) -> float:
    """Return the control rate of the environment `name`; raises ConfigError when none is reported."""
    if rate is None:
        raise ConfigError(
            f"The frame rate of '{name}' (control steps per second, above 0) is unknown: set "
            "world.options.fps=NUMBER (in Python: fps=NUMBER)."
        )
    return rate


def criterion(success: str | None, text: str) -> str:
    """Return the success criterion in words; text: used when the environment itself reports success."""
    return "the environment terminates the episode" if success == TERMINATED else success or text


def first_notes(name: str, description: Description, seed_globals: bool) -> list[str]:
    """Return messages for the user about an environment before its first episode."""
    notes = []
    if not description.repeats:
        remedy = (
            "It uses a random generator that neither reset(seed) nor world.options.seed_globals=true seeds: its "
            "reset should call super().reset(seed=seed) and use self.np_random."
            if seed_globals
            else "If it uses Python's or numpy's global random generators, set world.options.seed_globals=true."
        )
        notes.append(
            f"Resetting '{name}' twice with the same seed gives different episodes, so paired comparisons of two "
            f"policies are unreliable. {remedy}"
        )
    if description.layout.notes:
        notes.append(f"Observation of '{name}': {'; '.join(description.layout.notes)}.")
    return notes


def observation_fields(
    description: Description, cameras: Sequence[str], image_size: ImageSize | None
) -> dict[str, Field]:
    """Return the world's observation fields. Raises CameraError on an unknown camera, ConfigError when
    no observation is left.
    """
    for camera in cameras:
        if entry_of(camera, description.cameras) not in description.cameras:
            nearest = did_you_mean(camera, description.cameras)
            raise CameraError(f"The environment has no camera '{camera}'.{nearest}", description.cameras)
    layout = description.layout
    vectors = {key: Field((part.stop - part.start,), names=layout.names[key]) for key, part in layout.fields.items()}
    fields = {**vectors, **image_fields(image_sizes(cameras, image_size, layout.sizes))}
    if not fields:
        picture_names = ", ".join(layout.pictures)
        raise ConfigError(
            f"The environment has only image observations ({picture_names}), and no camera is selected: set "
            f"world.cameras=[{picture_names}] (in Python: cameras=...)."
        )
    return fields


def make_gymnasium_world(
    env_id: str,
    batch_size: int,
    *,
    horizon: int | None = None,
    instruction: str | None = None,
    env_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> GymnasiumWorld:
    """Build the world of the registered environment `env_id` ("FetchPush-v4", or "package:Id-v0" to import its package
    first).

    horizon: default the registered time limit; instruction: default the task that the environment reports, or the words
    of the id; env_options: keyword arguments of the environment; options: of `GymnasiumWorld`, by default those of the
    id's family (see `FAMILIES`). Raises ConfigError on an unknown id, camera or option.
    """
    check_options(options, make_gymnasium_world)
    family = family_of(env_id)
    if family and (conflict := extra_conflict(family.extra)):
        warnings.warn(f"'{env_id}' may fail:{conflict}", RobopolicyWarning, stacklevel=2)
    overrides = {"horizon": horizon, "instruction": instruction}
    settings = {
        "horizon": registered(env_id).max_episode_steps,
        "instruction": (family and family.instruction(env_id)) or words(env_id),
        "own_task": instruction is None and family is None,  # what families call a task is no sentence
        **(family.options if family else {}),
        **{name: value for name, value in overrides.items() if value is not None},
        **options,
    }
    if settings["horizon"] is None:
        raise ConfigError(
            f"'{env_id}' is registered without a time limit: set world.options.horizon=NUMBER of control steps (in "
            "Python: horizon=NUMBER)."
        )
    return GymnasiumWorld(
        f"gymnasium:{env_id}", partial(open_gymnasium, env_id, dict(env_options or {})), batch_size, **settings
    )


def check_options(options: Mapping[str, Any], make: Callable[..., Any]) -> None:
    """Raise ConfigError, suggesting the closest name, on an option that neither `GymnasiumWorld` nor `make`, the
    suite's function, has.
    """
    own_names = [name for name, is_required in named_arguments(make).items() if not is_required]
    option_names = {name for name, is_required in named_arguments(GymnasiumWorld).items() if not is_required}
    option_names |= {"horizon", "instruction", *own_names}
    for name in options:
        if name not in option_names:
            raise ConfigError(f"Unknown option '{name}' of a gymnasium world.{did_you_mean(name, option_names)}")


def words(env_id: str) -> str:
    """Turn an id into words: "package:FetchPush-v4" -> "fetch push"."""
    name = re.sub(r"-v\d+$", "", env_id.rpartition(":")[2].rpartition("/")[2])
    return " ".join(re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", name)).lower()
