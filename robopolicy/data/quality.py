"""Dataset quality levels (D4RL style): add noise to an expert's actions, by episode and step.

An action is clip(expert + gaussian * half the action range * N(0, 1)), or with probability `random` a uniform one. Both
follow one path, `level` in [0, 1]: gaussian = level, random = level ** 2, from the pure expert (0) to uniform actions
(1), so "medium" is one number, found by bisection of measured success. Similar to D4RL (Fu et al. 2020) with
half-trained agents, but from any controller or policy. All randomness of an episode comes from its own seed: a
recording does not depend on the number of parallel rows, and trials at two levels share their draws. Axes: E episode, T
control step (up to the horizon), B row, R selected rows, C chunk step, A action dimension.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.randomness import uniforms
from robopolicy.core.spec import Field, Observation, PolicySpec
from robopolicy.core.storage import read_object, recover_folder
from robopolicy.core.world import Controller, Rows, begin_episodes
from robopolicy.data.lerobot_format import QUALITY
from robopolicy.data.lerobot_reading import read_columns

Quality = Literal["random", "expert", "medium", "replay", "mixed", "play"]

NEEDED: Mapping[Quality, tuple[str, ...]] = {
    "random": (),
    "expert": ("expert",),
    "medium": ("medium",),
    "replay": ("medium",),
    "mixed": ("expert", "medium"),
    "play": ("expert",),
}
"""Disturbance levels to calibrate before recording, by quality."""

VERSION = "gen-v1"
"""Generator version; datasets of different versions are not comparable."""

EXPERT_SUCCESS = 0.95
"""Minimum success of an expert dataset."""
MEDIUM_SUCCESS = (0.3, 0.5)
"""Success band of a medium dataset; the middle is the target."""

EXPERT_LEVELS = (0.1, 0.05)
"""Noise levels for experts, largest first; noise also covers states near the expert's path. None is used if it reduces
success.
"""
_CLOSE = 0.02
"""Tolerance around the target success that ends the bisection."""
_SEGMENT = (5, 25)
"""Minimum and maximum length of a play segment, in control steps."""
_EXPERT_SHARE = _HELD_SHARE = 1 / 3
"""Fraction of expert segments in play data; the rest are uniform actions. Of four mixtures evaluated on four tasks this
one has the best coverage.
"""

SEGMENTS = ("expert", "uniform", "held")
"""Source of an action, by code in the column behaviour.segment: expert with gaussian noise, a uniform draw at this
step, a uniform draw held for a segment.
"""
GAUSSIAN = "behaviour.gaussian"
RANDOM = "behaviour.random"
SEGMENT = "behaviour.segment"
TRUNCATED = "next.truncated"
COLUMNS = (GAUSSIAN, RANDOM, SEGMENT, TRUNCATED)
"""Additional columns of a dataset with a quality level."""


@dataclass(frozen=True)
class Disturbance:
    """Noise on an actor at one level. gaussian: standard deviation of noise on every action, as a fraction of half its
    range; random: fraction of control steps with a uniform action instead.
    """

    gaussian: float
    random: float

    @staticmethod
    def at(level: float) -> "Disturbance":
        """Return the disturbance at `level`, from the pure expert (0) to uniform actions (1).

        Raises ConfigError outside of [0, 1].
        """
        if not 0 <= level <= 1:
            raise ConfigError(f"A noise level must be between 0 and 1, not {level}.")
        return Disturbance(float(level), float(level) ** 2)

    @property
    def text(self) -> str:
        """Human-readable description."""
        return f"Gaussian sigma {self.gaussian:.3f}, fraction of random actions {self.random:.3f}"


@dataclass(frozen=True)
class Trial:
    """Measured success at one level."""

    level: float
    success: float
    episodes: int


def expert_level(trial: Callable[[float], Trial], undisturbed: float) -> float:
    """Return the largest of EXPERT_LEVELS that does not reduce success, 0 if all do.

    undisturbed: the expert's success without noise. A level qualifies if its success is at least two points above
    EXPERT_SUCCESS (so that a recording on other seeds stays above it), or equal to the expert's.
    """
    enough = min(EXPERT_SUCCESS + 0.02, undisturbed)
    if undisturbed < EXPERT_SUCCESS:
        return 0.0
    return next((level for level in EXPERT_LEVELS if trial(level).success >= enough), 0.0)


def medium_level(trial: Callable[[float], Trial], undisturbed: float, uniform: float, most: int = 12) -> float:
    """Find the level whose measured success is closest to the middle of MEDIUM_SUCCESS, by bisection.

    trial: level -> measured success; undisturbed, uniform: success at levels 0 and 1; most: maximum number of trials.
    Only assumes that the end points lie on either side of the target; of several crossings one is found. Raises
    DataError, naming the measurements, when they do not, or when success jumps across the band.
    """
    low, high = MEDIUM_SUCCESS
    aim = (low + high) / 2
    if low <= undisturbed <= aim:
        return 0.0
    if not uniform < aim < undisturbed:
        raise DataError(
            f"No noise level gives success between {low:.0%} and {high:.0%}: it is {undisturbed:.0%} without noise "
            f"and {uniform:.0%} with uniform random actions. Use a better actor or a harder task."
        )
    lower_level = 0.0
    upper_level = 1.0
    trials = list[Trial]()
    for _ in range(most):
        done = trial((lower_level + upper_level) / 2)
        trials.append(done)
        if abs(done.success - aim) <= _CLOSE:
            break
        lower_level, upper_level = (done.level, upper_level) if done.success > aim else (lower_level, done.level)
    best = min(trials, key=lambda each: abs(each.success - aim))
    if not low <= best.success <= high:
        raise DataError(
            f"No noise level gives success between {low:.0%} and {high:.0%}: success drops from above to below this "
            f"range between level {lower_level:.4f} and {upper_level:.4f} (0: expert, 1: uniform random actions; "
            f"{Disturbance.at(best.level).text}: {best.success:.0%})."
        )
    return best.level


@dataclass(frozen=True)
class Schedule:
    """Disturbance of every control step of E episodes.

    gaussian, random: [E, T] float32, see Disturbance; source: [E, T] int64, the step whose uniform draw is used (an
    earlier one if a random action is held); seeds: [E] int64, seeds of the episodes' draws.
    """

    gaussian: Array
    random: Array
    source: Array
    seeds: Array

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def horizon(self) -> int:
        """Number of control steps T."""
        return self.gaussian.shape[1]

    def select(self, episodes: Sequence[int]) -> "Schedule":
        """Return the schedule of the selected episodes, by index."""
        index = np.asarray(episodes, dtype=np.int64)
        return Schedule(*(each[index] for each in (self.gaussian, self.random, self.source, self.seeds)))

    def segments(self) -> Array:
        """Return the source of every step's action, [E, T] int64, encoded as in SEGMENTS."""
        uniform = _chances(self.seeds, self.horizon) < self.random
        is_held = self.source != np.arange(self.horizon)
        first = np.roll(is_held, -1, axis=1)  # the step that a held draw is of begins its segment
        first[:, -1:] = False
        return np.where(uniform, np.where(is_held | first, 2, 1), 0).astype(np.int64)


def schedule(
    quality: Quality, seeds: Array, horizon: int, *, expert: float | None = None, medium: float | None = None
) -> Schedule:
    """Return the disturbance schedule for the episodes of a dataset.

    seeds: [E] int64, one per episode; horizon: T; expert, medium: calibrated levels, if `quality` needs them. "replay"
    anneals from uniform actions to medium over the episodes, "mixed" alternates expert and medium, "play" draws
    segments of 5 to 25 steps: one third expert, one third uniform, one third one uniform action held. Raises DataError
    when a level is missing.
    """
    level_of = {"expert": expert, "medium": medium}
    missing_levels = [name for name in NEEDED[quality] if level_of[name] is None]
    if missing_levels:
        raise DataError(
            f"Quality '{quality}' needs the noise level '{missing_levels[0]}', which has not been determined."
        )
    good_level = float(expert or 0.0)
    half = float(medium or 0.0)
    place = np.arange(len(seeds))
    levels = {
        "random": np.ones(len(seeds)),
        "expert": np.full(len(seeds), good_level),
        "medium": np.full(len(seeds), half),
        "replay": np.linspace(1.0, half, len(seeds)),
        "mixed": np.where(place % 2 == 0, good_level, half),
        "play": np.full(len(seeds), good_level),
    }[quality]
    plan = fixed(levels, seeds, horizon)
    return _played(plan) if quality == "play" else plan


def fixed(levels: Array, seeds: Array, horizon: int) -> Schedule:
    """Return a schedule with one level per episode, levels [E] in [0, 1] and seeds [E], over `horizon` steps T."""
    disturbances = [Disturbance.at(float(level)) for level in levels]
    shape = (len(seeds), horizon)

    def spread(values: list[float]) -> Array:
        return np.broadcast_to(np.asarray(values, np.float32)[:, None], shape)

    return Schedule(
        gaussian=spread([each.gaussian if each.random < 1 else 0.0 for each in disturbances]),
        random=spread([each.random for each in disturbances]),
        source=np.broadcast_to(np.arange(horizon), shape),
        seeds=np.asarray(seeds, np.int64),
    )


def _played(base: Schedule) -> Schedule:
    """Split `base` into segments and replace two thirds of them by uniform actions."""
    shortest, longest = _SEGMENT
    segment_limit = base.horizon // shortest + 1
    draws = uniforms(_of_kind(base.seeds, 1), 2 * segment_limit)
    lengths = shortest + (draws[:, :segment_limit] * (longest - shortest + 1)).astype(np.int64)
    ends = np.cumsum(lengths, axis=1)
    step = np.arange(base.horizon)
    segment = (step[None, :, None] >= ends[:, None, :]).sum(2)  # [E, T]
    draws_of_segments = np.take_along_axis(draws[:, segment_limit:], segment, axis=1)
    begin = np.take_along_axis(ends - lengths, segment, axis=1)
    return replace(
        base,
        gaussian=np.where(draws_of_segments < _EXPERT_SHARE, base.gaussian, 0.0).astype(np.float32),
        random=np.where(draws_of_segments < _EXPERT_SHARE, base.random, 1.0).astype(np.float32),
        source=np.where(draws_of_segments >= 1 - _HELD_SHARE, begin, base.source),
    )


def _of_kind(seeds: Array, kind: int) -> Array:
    """Derive different seeds [E] for another kind of draw."""
    return seeds ^ np.int64(kind << 54)


def _chances(seeds: Array, horizon: int) -> Array:
    return uniforms(_of_kind(seeds, 2), horizon)


class Disturbances:
    """Applies the disturbances of a schedule to the actions of parallel rows.

    Episodes must start in the order of their seeds (as in `record`, and `evaluate_policy` with ascending seeds),
    because rows take the next ones at every reset; batch_size: B. Raises ConfigError if an action has no finite bounds.
    """

    def __init__(self, plan: Schedule, batch_size: int, action: Field):
        self._plan, self._size = plan, action.size
        self._low = np.broadcast_to(np.asarray(action.low, dtype=np.float64), action.shape)
        self._high = np.broadcast_to(np.asarray(action.high, dtype=np.float64), action.shape)
        if not (np.isfinite(self._low).all() and np.isfinite(self._high).all()):
            raise ConfigError(
                "Dataset quality levels need actions with finite bounds, because uniform random actions are "
                "drawn from them."
            )
        horizon = plan.horizon
        self._next, self._episode = 0, np.zeros(batch_size, np.int64)
        self._time = np.zeros(batch_size, np.int64)
        self._noise = np.zeros((batch_size, horizon, self._size))
        self._fresh = np.zeros((batch_size, horizon, self._size))
        self._chance = np.zeros((batch_size, horizon))

    def start(self, rows: Rows = None) -> None:
        """Assign the next episodes to `rows` [R] (None: all). Raises DataError if none is left."""
        from scipy.special import ndtri  # who disturbs actions, pays for its import

        row_indices = np.arange(len(self._episode)) if rows is None else np.asarray(rows)
        index = row_indices[: len(self._plan) - self._next]  # a last wave has spare rows, which nobody looks at
        if not len(index):
            raise DataError(f"All {len(self._plan)} episodes of the schedule have been played.")
        episodes = self._next + np.arange(len(index))
        self._next += len(index)
        self._episode[index], self._time[row_indices] = episodes, 0
        seeds, shape = self._plan.seeds[episodes], (len(index), self._plan.horizon, self._size)
        self._chance[index] = _chances(seeds, shape[1])
        self._fresh[index] = uniforms(_of_kind(seeds, 3), shape[1] * shape[2]).reshape(shape)
        numbers = uniforms(_of_kind(seeds, 4), shape[1] * shape[2]).reshape(shape)
        self._noise[index] = ndtri(np.maximum(numbers, 2.0**-54))

    def apply(self, actions: Array) -> Array:
        """Disturb the next chunk of actions [B, C, A] within their range; returns float64."""
        rows = np.arange(len(actions))[:, None]
        step = np.minimum(self._time[:, None] + np.arange(actions.shape[1]), self._plan.horizon - 1)
        episode = self._episode[:, None]
        gaussian, random = self._plan.gaussian[episode, step], self._plan.random[episode, step]
        source = self._plan.source[episode, step]
        self._time = self._time + actions.shape[1]
        half = 0.5 * (self._high - self._low)
        shape = actions.shape
        noise = self._noise[rows, step].reshape(shape)
        random_actions = self._low + 2 * half * self._fresh[rows, source].reshape(shape)
        uniform = (self._chance[rows, step] < random)[..., None]
        noisy = np.where(uniform, random_actions, actions + gaussian[..., None] * half * noise)
        return np.clip(noisy, np.minimum(self._low, actions), np.maximum(self._high, actions))


class DisturbedController:
    """A controller whose actions are disturbed according to a schedule."""

    def __init__(self, controller: Controller, disturbances: Disturbances):
        self._controller, self._disturbances = controller, disturbances

    def reset(self, rows: Rows = None) -> None:
        """Assign the next episodes of the schedule to `rows` [R] (None: all)."""
        self._controller.reset(rows)
        self._disturbances.start(rows)

    def begin(self, seeds: Array, rows: Rows = None) -> None:
        """Pass the seeds [R] of the episodes in `rows` [R] to the controller, if it accepts them."""
        begin_episodes(self._controller, seeds, rows)

    def act(self, observation: Observation) -> Array:
        """Return disturbed actions [B, A] for an observation [B, H, ...]; the controller reads every step."""
        return self._disturbances.apply(np.asarray(self._controller.act(observation), np.float64)[:, None])[:, 0]


class DisturbedPolicy:
    """A policy whose action chunks are disturbed according to a schedule; they have no log-probabilities."""

    def __init__(self, policy: Policy, disturbances: Disturbances):
        self._policy, self._disturbances = policy, disturbances

    @property
    def spec(self) -> PolicySpec:
        """Spec of the policy."""
        return self._policy.spec

    def reset(self, rows: Rows = None) -> None:
        """Assign the next episodes of the schedule to `rows` [R] (None: all)."""
        self._policy.reset(rows)
        self._disturbances.start(rows)

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the policy's chunk [B, C, A] with disturbances; see `Policy.act`."""
        actions = self._policy.act(observation, generator, deterministic=deterministic).actions
        disturbed = self._disturbances.apply(actions.detach().cpu().double().numpy())
        return Decision(torch.from_numpy(disturbed).to(actions))


class Idle:
    """A controller that returns zeros, used when all actions are uniform; action: the world's action field, [A]."""

    def __init__(self, action: Field):
        self._size = action.size

    def reset(self, rows: Rows = None) -> None:
        """No memory to clear for `rows` [R]."""

    def act(self, observation: Observation) -> Array:
        """Return zeros [B, A] for an observation [B, H, ...]."""
        return np.zeros((len(next(iter(observation.values()))), self._size))


def columns(episodes: Episodes, plan: Schedule) -> dict[str, Tensor]:
    """Return COLUMNS for the steps of `episodes`, each [N], all recorded under `plan` in its order.

    Raises DataError if their number differs, or the episodes do not record how they ended.
    """
    if len(episodes) != len(plan) or episodes.terminated is None:
        raise DataError(f"{len(episodes)} episodes do not match a schedule of {len(plan)}, or lack `terminated`.")
    lengths = episodes.lengths.cpu().numpy()
    episode = np.repeat(np.arange(len(lengths)), lengths)
    step = np.arange(len(episode)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    truncated = torch.zeros(len(episode), dtype=torch.bool)
    truncated[episodes.lengths.cpu().cumsum(0) - 1] = ~episodes.terminated.cpu()
    return {
        GAUSSIAN: torch.from_numpy(plan.gaussian[episode, step]),
        RANDOM: torch.from_numpy(plan.random[episode, step]),
        SEGMENT: torch.from_numpy(plan.segments()[episode, step]),
        TRUNCATED: truncated,
    }


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Return the hash of a generator's settings, 16 hexadecimal digits: equal settings give equal datasets."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def dataset_name(world: str, quality: str) -> str:
    """Return the dataset name, such as "gen-v1/push_t-medium"."""
    return f"{VERSION}/{world.replace('/', '-').replace(':', '-')}-{quality}"


def read_quality(folder: Path) -> dict[str, Any]:
    """Return a dataset's description of its generation: name, quality, generator, hash, anchors, measured.

    Raises DataError if it is missing or damaged.
    """
    path = recover_folder(Path(folder)) / QUALITY
    if not os.path.lexists(path):
        raise DataError(
            f"{folder} records no dataset quality: create such data with robopolicy collect collect.quality=medium."
        )
    description = read_object(path, DataError)
    if not {"name", "quality", "anchors"} <= set(description):
        raise DataError(f"{path} lacks name, quality or anchors (reference scores): restore it from a copy.")
    return description


def read_behaviour(folder: Path) -> dict[str, Tensor]:
    """Return COLUMNS of a dataset, each [N], in the order of `read_dataset`'s steps; DataError if they are missing."""
    return read_columns(folder, COLUMNS)
