"""World in trials: several episodes of one scene, so that what the first ones find helps in the later ones.

world.options.trial_episodes=2 plays every scene twice. A trial counts as one episode for whoever plays it, with the
time limits of its episodes together; each of them begins in the same state, and success is that of the last one.
`observation.trial` is added: the last action, its reward, and whether an episode begins. A policy with a history
(`policy.kind=memory`) remembers: its window of the last H frames goes on from one episode of the trial to the next.
Leave out of policy.observation_keys what it shall find out. Source: episodes of a trial as in ReLIC, arXiv:2410.02751,
and RL^2, arXiv:1611.02779. Axes: B row, R selected rows, C chunk step, A action dimension, H history frame.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from robopolicy.core.action_bounds import clip_if_bounded
from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.history import initial_window, shift_window
from robopolicy.core.randomness import numpy_generator
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Field, Observation
from robopolicy.core.world import Rows, Snapshots, Step, World
from robopolicy.core.wrapped_world import WrappedSnapshots, WrappedWorld, step_by_step

EPISODES_OPTION = "trial_episodes"
"""Name of the option of a world."""
TRIAL = "observation.trial"
"""Key of the last action, its reward, and whether an episode begins, [A + 2]."""
MOST_EPISODES = 1000


def without_trials(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a world's options without that of trials."""
    return {name: value for name, value in options.items() if name != EPISODES_OPTION}


def with_trials_of(options: Mapping[str, Any], world: World) -> World:
    """Return `world` in trials of as many episodes as its options say; the world itself without the option.

    Raises ConfigError for other values, and a world with cameras, whose images are not remembered.
    """
    episodes = options.get(EPISODES_OPTION)
    if episodes is None:
        return world
    try:
        if type(episodes) is not int or not 1 <= episodes <= MOST_EPISODES:
            raise ConfigError(f"{EPISODES_OPTION} is {episodes}: it must be an integer from 1 to {MOST_EPISODES}.")
        if any(key.startswith(IMAGE_PREFIX) for key in world.spec.observation) or len(world.spec.action.shape) != 1:
            raise ConfigError(
                f"{EPISODES_OPTION} needs observations and actions that are vectors: set world.cameras=[]."
            )
    except BaseException:
        world.close()
        raise
    kind = TrialSnapshots if isinstance(world, Snapshots) else TrialWorld
    return kind(world, episodes, int(options.get("seed", 0)))


class TrialWorld(WrappedWorld):
    """A `World` whose episodes are trials; create it with `with_trials_of`.

    episodes: of the world per trial; seed: of the trials' seeds when `reset` is given none. The control step after the
    end of an episode resets the scene, whatever its action is.
    """

    def __init__(self, world: World, episodes: int, seed: int):
        spec, size = world.spec, world.spec.action.size
        names = (*(spec.action.names or (f"action_{place}" for place in range(size))), "reward", "begins")
        fields = {**spec.observation, TRIAL: Field((size + 2,), names=names)}
        super().__init__(world, replace(spec, observation=fields, horizon=episodes * (spec.horizon + 1) - 1))
        self.episodes = episodes
        self._random = numpy_generator(seed, "trials")
        rows = world.batch_size
        self._seeds, self._number = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._over, self._won = np.zeros(rows, bool), np.zeros(rows, bool)
        self._due = np.zeros(rows, bool)
        self._windows = {
            key: np.zeros((rows, spec.history, *field.shape), np.float32)
            for key, field in fields.items()
            if key != TASK
        }

    def reset(
        self, rows: Rows = None, seeds: Sequence[int] | Array | None = None, options: Mapping[str, Any] | None = None
    ) -> Observation:
        """Start new trials in `rows` [R], one seed each; see `World.reset`."""
        index = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self._seeds[index] = self._random.integers(2**50, size=len(index)) if seeds is None else np.asarray(seeds)
        self._number[index] = 0
        for flags in (self._over, self._won, self._due):
            flags[index] = False
        observation = self.world.reset(rows, self._seeds[index], options)
        for key, frames in self._newest(observation).items():
            self._windows[key][index] = initial_window(frames[index], self.spec.history)
        return self._seen(observation)

    def step(self, actions: Array) -> Step:
        """Execute a chunk [B, C, A]; raises as the world does."""
        return step_by_step(self, actions, self._control)

    def _control(self, action: Array) -> Step:
        """Execute one control step [B, 1, A], or begin an episode."""
        begins, over = self._due & ~self._over, self._over.copy()
        step = self.world.step(action)
        runs = step.valid & ~over[:, None]
        ended = step.ended & runs[:, 0]
        self._number += ended
        self._over |= ended & (self._number >= self.episodes)
        self._won |= ended & self._over & step.success
        self._due = ended & ~self._over
        observation = step.observation
        if begins.any():
            again = np.flatnonzero(begins)
            observation = self.world.reset(again, self._seeds[again])
        valid = runs | begins[:, None]
        rewards = {name: np.where(runs, reward, 0.0) for name, reward in step.rewards.items()}
        newest = self._newest(observation)
        frame = np.concatenate([clip_if_bounded(self.spec, action)[:, 0], step.reward, np.zeros_like(step.reward)], -1)
        newest[TRIAL][runs[:, 0], 0] = frame[runs[:, 0]]
        for key, window in self._windows.items():
            self._windows[key] = shift_window(window, newest[key].astype(np.float32), valid[:, 0].astype(int))
        return replace(
            step,
            observation=self._seen(observation),
            trace={key: window[:, -1:].copy() for key, window in self._windows.items()},
            rewards=rewards,
            valid=valid,
            terminated=self._over.copy(),
            truncated=np.zeros_like(self._over),
            success=self._won.copy(),
        )

    def _newest(self, observation: Observation) -> dict[str, Array]:
        """Return the newest frame [B, 1, *shape] of every field, as at the begin of an episode."""
        rows = self.batch_size
        begin = np.zeros((rows, 1, self.spec.action.size + 2), np.float32)
        begin[..., -1] = 1.0
        return {key: begin if key == TRIAL else np.asarray(observation[key])[:, -1:] for key in self._windows}

    def _seen(self, observation: Observation) -> Observation:
        """Return the windows [B, H, ...] with the instructions of an observation."""
        texts = {TASK: observation[TASK]} if TASK in observation else {}
        return {**{key: window.copy() for key, window in self._windows.items()}, **texts}


class TrialSnapshots(TrialWorld, WrappedSnapshots):
    """A `TrialWorld` whose rows can be saved and restored."""

    prefix = "trial/"

    @property
    def origin(self) -> str:
        """Description of the worlds whose snapshots fit."""
        return f"a world with trial_episodes={self.episodes}"

    @property
    def own_arrays(self) -> Mapping[str, Array]:
        """Arrays of trials: seeds, numbers of the running episodes, outcomes [B], and windows [B, H, ...]."""
        arrays = {"seeds": self._seeds, "number": self._number, "over": self._over, "won": self._won, "due": self._due}
        return {**arrays, **{f"window/{key}": window for key, window in self._windows.items()}}

    def restored(self, observation: Observation, rows: Array) -> Observation:
        """Return the observation [B, H, ...] after a restore."""
        return self._seen(observation)
