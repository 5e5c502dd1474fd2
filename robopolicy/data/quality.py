"""Datasets of graded quality: whose actions are recorded, how much they are disturbed, and where in the dataset.

An action is clip(expert + gaussian * half the action range * N(0, 1)), or with chance `random` a uniform one. Both grow
along one path, `level` in [0, 1]: gaussian = level, random = level ** 2, from the undisturbed expert (0) to uniform
actions alone (1), so that "medium" is one number, found by bisection of measured success. As D4RL does it (Fu et al.
2020) with half-trained agents, but from any controller or policy. All chance of an episode comes from one seed of its
own: a recording does not depend on how many rows are played side by side, and trials at two levels share their draws.
Axes: E episode, T control step (up to the horizon), B row, R selected rows, C chunk step, A action dimension.
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
"""Which levels of disturbance must be found before a dataset is recorded."""

VERSION = "gen-v1"
"""Of the generator: datasets of other versions are other datasets."""

EXPERT_SUCCESS = 0.95
"""What a dataset of experts reaches."""
MEDIUM_SUCCESS = (0.3, 0.5)
"""Between which a medium dataset lies; the middle is aimed at."""

EXPERT_LEVELS = (0.1, 0.05)
"""Little noise for experts, the more the better: states beside the narrow path are seen too. None where it costs."""
_CLOSE = 0.02
"""A trial this near to the success aimed at ends the bisection."""
_SEGMENT = (5, 25)
"""Shortest and longest segment of play, in control steps."""
_EXPERT_SHARE = _HELD_SHARE = 1 / 3
"""Of the segments of play; the rest are uniform actions. Of four mixtures tried on four tasks this one covers most."""

SEGMENTS = ("expert", "uniform", "held")
"""What chose an action, by the number in the column behaviour.segment: the expert with gaussian noise, a uniform draw
of this step, a uniform draw kept for a whole segment.
"""
GAUSSIAN = "behaviour.gaussian"
RANDOM = "behaviour.random"
SEGMENT = "behaviour.segment"
TRUNCATED = "next.truncated"
COLUMNS = (GAUSSIAN, RANDOM, SEGMENT, TRUNCATED)
"""Columns that a dataset of graded quality has beside the usual ones."""


@dataclass(frozen=True)
class Disturbance:
    """gaussian: standard deviation of noise on every action, as a share of half its range; random: share of control
    steps whose action is uniform instead.
    """

    gaussian: float
    random: float

    @staticmethod
    def at(level: float) -> "Disturbance":
        """Return the disturbance at `level` of the path from the expert (0) to uniform actions (1).

        Raises ConfigError outside of [0, 1].
        """
        if not 0 <= level <= 1:
            raise ConfigError(f"A level of disturbance is between 0 and 1, not {level}.")
        return Disturbance(float(level), float(level) ** 2)

    @property
    def text(self) -> str:
        """For people."""
        return f"sigma {self.gaussian:.3f}, random share {self.random:.3f}"


@dataclass(frozen=True)
class Trial:
    """Success that was measured at a level."""

    level: float
    success: float
    episodes: int


def expert_level(trial: Callable[[float], Trial], undisturbed: float) -> float:
    """Return the largest of EXPERT_LEVELS at which success stays, 0 where each costs some.

    undisturbed: the expert's success without noise; a level is taken that keeps two points above EXPERT_SUCCESS (so
    that a recording on other seeds stays above it), or all of the expert's success.
    """
    enough = min(EXPERT_SUCCESS + 0.02, undisturbed)
    if undisturbed < EXPERT_SUCCESS:
        return 0.0
    return next((level for level in EXPERT_LEVELS if trial(level).success >= enough), 0.0)


def medium_level(trial: Callable[[float], Trial], undisturbed: float, uniform: float, most: int = 12) -> float:
    """Return the level whose measured success is nearest to the middle of MEDIUM_SUCCESS, by bisection.

    trial: level -> what was measured there; undisturbed, uniform: success at the levels 0 and 1; most: trials. Nothing
    is assumed but that success at the ends lies on either side: of several crossings one is found. Raises DataError
    where they do not, and where success jumps over the band, naming what was measured.
    """
    low, high = MEDIUM_SUCCESS
    aim = (low + high) / 2
    if low <= undisturbed <= aim:
        return 0.0
    if not uniform < aim < undisturbed:
        raise DataError(
            f"Success of {low:.0%} to {high:.0%} cannot be had: without noise it is {undisturbed:.0%}, of uniform "
            f"actions {uniform:.0%}. Give a better actor or a harder task."
        )
    good = 0.0
    bad = 1.0
    found = list[Trial]()
    for _ in range(most):
        done = trial((good + bad) / 2)
        found.append(done)
        if abs(done.success - aim) <= _CLOSE:
            break
        good, bad = (done.level, bad) if done.success > aim else (good, done.level)
    best = min(found, key=lambda each: abs(each.success - aim))
    if not low <= best.success <= high:
        raise DataError(
            f"No noise gives success of {low:.0%} to {high:.0%}: it falls at once from more to less at {good:.4f} to "
            f"{bad:.4f} of the way to uniform actions ({Disturbance.at(best.level).text}: {best.success:.0%})."
        )
    return best.level


@dataclass(frozen=True)
class Schedule:
    """What disturbs every control step of E episodes.

    gaussian, random: [E, T] float32, see Disturbance; source: [E, T] int64, the step whose uniform draw is used, an
    earlier one where a random action is held; seeds: [E] int64, of the episodes' own draws.
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
        """Return the schedule of some of the episodes, by index."""
        index = np.asarray(episodes, dtype=np.int64)
        return Schedule(*(each[index] for each in (self.gaussian, self.random, self.source, self.seeds)))

    def segments(self) -> Array:
        """Return what chooses the action of every step, [E, T] int64, as SEGMENTS counts."""
        uniform = _chances(self.seeds, self.horizon) < self.random
        held = self.source != np.arange(self.horizon)
        first = np.roll(held, -1, axis=1)  # the step that a held draw is of begins its segment
        first[:, -1:] = False
        return np.where(uniform, np.where(held | first, 2, 1), 0).astype(np.int64)


def schedule(
    quality: Quality, seeds: Array, horizon: int, *, expert: float | None = None, medium: float | None = None
) -> Schedule:
    """Return how the episodes of a dataset are disturbed.

    seeds: [E] int64, one an episode; horizon: T; expert, medium: the levels found, where `quality` needs them. "replay"
    anneals from uniform actions to medium over the episodes, "mixed" takes experts and mediums in turn, "play" draws
    segments of 5 to 25 steps: a third of them the expert's, a third uniform, a third one uniform action held. Raises
    DataError where a level is missing.
    """
    needed = {"expert": expert, "medium": medium}
    absent = [name for name in NEEDED[quality] if needed[name] is None]
    if absent:
        raise DataError(f"Quality '{quality}' needs the level of {absent[0]} noise, which has not been found.")
    good = float(expert or 0.0)
    half = float(medium or 0.0)
    place = np.arange(len(seeds))
    levels = {
        "random": np.ones(len(seeds)),
        "expert": np.full(len(seeds), good),
        "medium": np.full(len(seeds), half),
        "replay": np.linspace(1.0, half, len(seeds)),
        "mixed": np.where(place % 2 == 0, good, half),
        "play": np.full(len(seeds), good),
    }[quality]
    plan = fixed(levels, seeds, horizon)
    return _played(plan) if quality == "play" else plan


def fixed(levels: Array, seeds: Array, horizon: int) -> Schedule:
    """Return a schedule of one level for each episode, levels [E] in [0, 1] and seeds [E], over `horizon` steps T."""
    found = [Disturbance.at(float(level)) for level in levels]
    shape = (len(seeds), horizon)

    def spread(values: list[float]) -> Array:
        return np.broadcast_to(np.asarray(values, np.float32)[:, None], shape)

    return Schedule(
        gaussian=spread([each.gaussian if each.random < 1 else 0.0 for each in found]),
        random=spread([each.random for each in found]),
        source=np.broadcast_to(np.arange(horizon), shape),
        seeds=np.asarray(seeds, np.int64),
    )


def _played(base: Schedule) -> Schedule:
    """Return `base`, cut into segments, two thirds of which uniform actions replace."""
    shortest, longest = _SEGMENT
    most = base.horizon // shortest + 1
    draws = uniforms(_of_kind(base.seeds, 1), 2 * most)
    lengths = shortest + (draws[:, :most] * (longest - shortest + 1)).astype(np.int64)
    ends = np.cumsum(lengths, axis=1)
    step = np.arange(base.horizon)
    segment = (step[None, :, None] >= ends[:, None, :]).sum(2)  # [E, T]
    chosen = np.take_along_axis(draws[:, most:], segment, axis=1)
    begin = np.take_along_axis(ends - lengths, segment, axis=1)
    return replace(
        base,
        gaussian=np.where(chosen < _EXPERT_SHARE, base.gaussian, 0.0).astype(np.float32),
        random=np.where(chosen < _EXPERT_SHARE, base.random, 1.0).astype(np.float32),
        source=np.where(chosen >= 1 - _HELD_SHARE, begin, base.source),
    )


def _of_kind(seeds: Array, kind: int) -> Array:
    """Return other seeds [E] for another kind of draw."""
    return seeds ^ np.int64(kind << 54)


def _chances(seeds: Array, horizon: int) -> Array:
    return uniforms(_of_kind(seeds, 2), horizon)


class Disturbances:
    """Disturbs the actions of rows that play the episodes of a schedule.

    Whoever plays starts episodes in the order of their seeds (`record`, and `evaluate_policy` on ascending seeds), so
    rows take the next ones at every reset; batch_size: B. Raises ConfigError where an action has no finite bounds.
    """

    def __init__(self, plan: Schedule, batch_size: int, action: Field):
        self._plan, self._size = plan, action.size
        self._low = np.broadcast_to(np.asarray(action.low, dtype=np.float64), action.shape)
        self._high = np.broadcast_to(np.asarray(action.high, dtype=np.float64), action.shape)
        if not (np.isfinite(self._low).all() and np.isfinite(self._high).all()):
            raise ConfigError("Graded quality needs actions with finite bounds, between which uniform ones are drawn.")
        horizon = plan.horizon
        self._next, self._episode = 0, np.zeros(batch_size, np.int64)
        self._time = np.zeros(batch_size, np.int64)
        self._noise = np.zeros((batch_size, horizon, self._size))
        self._fresh = np.zeros((batch_size, horizon, self._size))
        self._chance = np.zeros((batch_size, horizon))

    def start(self, rows: Rows = None) -> None:
        """Let `rows` [R], all of them for None, play the next episodes. Raises DataError where none is left."""
        from scipy.special import ndtri  # who disturbs actions, pays for its import

        given = np.arange(len(self._episode)) if rows is None else np.asarray(rows)
        index = given[: len(self._plan) - self._next]  # a last wave has spare rows, which nobody looks at
        if not len(index):
            raise DataError(f"All of {len(self._plan)} episodes of the schedule have been played.")
        episodes = self._next + np.arange(len(index))
        self._next += len(index)
        self._episode[index], self._time[given] = episodes, 0
        seeds, shape = self._plan.seeds[episodes], (len(index), self._plan.horizon, self._size)
        self._chance[index] = _chances(seeds, shape[1])
        self._fresh[index] = uniforms(_of_kind(seeds, 3), shape[1] * shape[2]).reshape(shape)
        drawn = uniforms(_of_kind(seeds, 4), shape[1] * shape[2]).reshape(shape)
        self._noise[index] = ndtri(np.maximum(drawn, 2.0**-54))

    def apply(self, actions: Array) -> Array:
        """Return the next chunk of actions [B, C, A] disturbed within their range, float64."""
        rows = np.arange(len(actions))[:, None]
        step = np.minimum(self._time[:, None] + np.arange(actions.shape[1]), self._plan.horizon - 1)
        episode = self._episode[:, None]
        gaussian, random = self._plan.gaussian[episode, step], self._plan.random[episode, step]
        source = self._plan.source[episode, step]
        self._time = self._time + actions.shape[1]
        half = 0.5 * (self._high - self._low)
        shape = actions.shape
        noise = self._noise[rows, step].reshape(shape)
        fresh = self._low + 2 * half * self._fresh[rows, source].reshape(shape)
        uniform = (self._chance[rows, step] < random)[..., None]
        noisy = np.where(uniform, fresh, actions + gaussian[..., None] * half * noise)
        return np.clip(noisy, np.minimum(self._low, actions), np.maximum(self._high, actions))


class DisturbedController:
    """A controller whose actions are disturbed as a schedule says."""

    def __init__(self, controller: Controller, disturbances: Disturbances):
        self._controller, self._disturbances = controller, disturbances

    def reset(self, rows: Rows = None) -> None:
        """Let `rows` [R] play the next episodes of the schedule, all of them for None."""
        self._controller.reset(rows)
        self._disturbances.start(rows)

    def begin(self, seeds: Array, rows: Rows = None) -> None:
        """Give the controller the seeds [R] of the episodes in `rows` [R], if it wants them."""
        begin_episodes(self._controller, seeds, rows)

    def act(self, observation: Observation) -> Array:
        """Return disturbed actions [B, A] for an observation [B, H, ...]; the controller sees every step."""
        return self._disturbances.apply(np.asarray(self._controller.act(observation), np.float64)[:, None])[:, 0]


class DisturbedPolicy:
    """A policy whose action chunks are disturbed as a schedule says; its decisions have no log-probabilities."""

    def __init__(self, policy: Policy, disturbances: Disturbances):
        self._policy, self._disturbances = policy, disturbances

    @property
    def spec(self) -> PolicySpec:
        """The policy's."""
        return self._policy.spec

    def reset(self, rows: Rows = None) -> None:
        """Let `rows` [R] play the next episodes of the schedule, all of them for None."""
        self._policy.reset(rows)
        self._disturbances.start(rows)

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the policy's chunk [B, C, A], disturbed; see `Policy.act`."""
        actions = self._policy.act(observation, generator, deterministic=deterministic).actions
        disturbed = self._disturbances.apply(actions.detach().cpu().double().numpy())
        return Decision(torch.from_numpy(disturbed).to(actions))


class Idle:
    """A controller that does nothing, under actions that are all uniform; action: of the world, [A]."""

    def __init__(self, action: Field):
        self._size = action.size

    def reset(self, rows: Rows = None) -> None:
        """Forget nothing of `rows` [R]."""

    def act(self, observation: Observation) -> Array:
        """Return zeros [B, A] for an observation [B, H, ...]."""
        return np.zeros((len(next(iter(observation.values()))), self._size))


def columns(episodes: Episodes, plan: Schedule) -> dict[str, Tensor]:
    """Return COLUMNS for the steps of `episodes`, each [N], which were all recorded under `plan` in its order.

    Raises DataError where their number differs, or the episodes do not say how they ended.
    """
    if len(episodes) != len(plan) or episodes.terminated is None:
        raise DataError(f"{len(episodes)} episodes do not pair with a schedule of {len(plan)}, or lack `terminated`.")
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
    """Return the hash of a generator's settings, 16 hexadecimal digits: equal settings, equal datasets."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def dataset_name(world: str, quality: str) -> str:
    """Return the name of a dataset, "gen-v1/push_t-medium"."""
    return f"{VERSION}/{world.replace('/', '-').replace(':', '-')}-{quality}"


def read_quality(folder: Path) -> dict[str, Any]:
    """Return what a dataset says of how it was made: name, quality, generator, hash, anchors, measured.

    Raises DataError where it says nothing, or is damaged.
    """
    path = recover_folder(Path(folder)) / QUALITY
    if not os.path.lexists(path):
        raise DataError(
            f"{folder} does not say how good its episodes are: robopolicy collect collect.quality=medium writes data "
            "that does."
        )
    found = read_object(path, DataError)
    if not {"name", "quality", "anchors"} <= set(found):
        raise DataError(f"{path} holds no name, quality and anchors: restore it from a copy.")
    return found


def read_behaviour(folder: Path) -> dict[str, Tensor]:
    """Return COLUMNS of a dataset, each [N], in the order of `read_dataset`'s steps; DataError where it lacks them."""
    return read_columns(folder, COLUMNS)
