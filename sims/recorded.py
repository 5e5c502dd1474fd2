"""Recorded demonstrations as a world: episodes follow the recording, and the reward is agreement with its actions.

For policies with demonstrations but no simulator: group and step advantages, ratios and clipping work unchanged. An
episode follows one demonstration. At every control step the policy's action is compared with the demonstrated one. If
they differ, the demonstrated action replaces it (a patch), which is allowed a limited number of times before the
episode fails.

Source: UI-S1, semi-online reinforcement learning, arXiv:2509.11543 (patches keep a rollout on the expert's trajectory).
Use it with the advantage step_groups, which compares equal steps of the same demonstration.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from robopolicy.core.episode_rows import EpisodeRows
from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import derive_seed, uniforms
from robopolicy.core.spec import IMAGE_PREFIX, Field, Observation, WorldSpec, validate_actions
from robopolicy.core.world import Rows, Snapshot, Step


class DemonstratedWorld:
    """Rows that follow recorded episodes; an episode's seed selects the demonstration.

    observation: key -> frames [F, *shape], the episodes concatenated, each with one frame more than actions; actions:
    [N, A]; lengths: [E] actions per episode; tasks: instruction of each episode; tolerance: maximum deviation of an
    action element, as a fraction of half its range; patches: number of control steps that may disagree. Raises
    ConfigError when there is no episode, and on an invalid tolerance, patches, batch_size or history.
    """

    def __init__(
        self,
        observation_fields: Mapping[str, Field],
        action_field: Field,
        fps: float,
        observation: Mapping[str, np.ndarray],
        actions: np.ndarray,
        lengths: np.ndarray,
        tasks: Sequence[str],
        batch_size: int,
        *,
        history: int = 1,
        tolerance: float = 0.2,
        patches: int = 4,
        seed: int = 0,
    ):
        if not len(lengths):
            raise ConfigError("There is no demonstration to compare with: the dataset has no episode.")
        if tolerance <= 0 or patches < 0:
            raise ConfigError(f"tolerance={tolerance} must be positive, and patches={patches} at least 0.")
        self._batch = batch_size
        self._seed = seed
        self._fresh = 0
        self._spec = WorldSpec(
            name="demonstrations",
            observation=dict(observation_fields),
            action=action_field,
            fps=fps,
            horizon=int(lengths.max()),
            history=history,
            rewards=("agreement",),
            instructions=tuple(dict.fromkeys(tasks)),
            success=f"The policy followed the demonstration to its end, with at most {patches} deviations.",
        )
        self._frames = {key: np.asarray(observation[key]) for key in observation_fields}
        self._actions, self._lengths = np.asarray(actions, dtype=np.float64), np.asarray(lengths)
        self._instruction = np.array([self._spec.instructions.index(text) for text in tasks])
        self._first = self._lengths.cumsum() - self._lengths
        self._patches = patches
        half = (np.broadcast_to(action_field.high, action_field.shape) - action_field.low) / 2
        self._allowed = tolerance * np.where(np.isfinite(half), half, self._actions.std(0) + 1e-6)
        self._episodes = EpisodeRows(self._spec, batch_size, self._draw)

    @property
    def spec(self) -> WorldSpec:
        """Fields of the recording; its instructions; the reward term `agreement`, 1 for every step that agrees."""
        return self._spec

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self._batch

    def reset(
        self,
        rows: Rows = None,
        seeds: Sequence[int] | np.ndarray | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Observation:
        """Select demonstrations by the seeds and return all rows' observation [B, H, ...].

        options: {"task": [R] indices} selects among those with that instruction, -1 for any. Raises SpecError on
        invalid rows or seeds.
        """
        index, seeds = self._episodes.reset_rows(rows, seeds)
        draws = uniforms(seeds, 1)[:, 0]
        tasks = np.broadcast_to(-1 if options is None else options.get("task", -1), len(index))
        demonstrations = np.zeros(len(index), dtype=np.int64)
        for place, task in enumerate(tasks):
            candidates = np.flatnonzero(self._instruction == task) if task >= 0 else np.arange(len(self._lengths))
            demonstrations[place] = candidates[int(draws[place] * len(candidates))]
        first = self._frames_at(demonstrations, np.zeros((len(index), 1), dtype=np.int64))
        own_arrays = {"episode": demonstrations, "patched": np.zeros(len(index), dtype=np.int64)}
        self._episodes.start(index, first, instruction=self._instruction[demonstrations], own=own_arrays)
        return self._episodes.observation()

    def step(self, actions: np.ndarray) -> Step:
        """Compare a chunk [B, C, A] with the recording. Raises SpecError or NonFiniteError on invalid actions."""
        episodes = self._episodes
        index = self._episodes.running_index
        spec = self._spec
        actions = np.asarray(actions, dtype=np.float64)
        validate_actions(actions, spec.action, self._batch)
        actions, chunk = np.clip(actions[index], spec.action.low, spec.action.high), actions.shape[1]
        if not len(actions):
            return episodes.idle(chunk)
        arrays = episodes.arrays
        episode, length = arrays["episode"][index], self._lengths[arrays["episode"][index], None]
        # [R, C] control steps of the recording; those after its end repeat its last action.
        time = arrays["steps"][index, None] + np.arange(chunk)
        error = np.abs(actions - self._actions[self._first[episode, None] + np.minimum(time, length - 1)])
        matches = (error <= self._allowed + 1e-9).reshape(*time.shape, -1).all(-1)
        failed = arrays["patched"][index, None] + np.cumsum(~matches, axis=1) > self._patches
        advanced = episodes.advance(index, (time + 1 >= length) & ~failed, terminated=failed)
        arrays["patched"][index] += (~matches & advanced.live).sum(axis=1)

        frames = self._frames_at(episode, np.minimum(time + 1, length))
        vectors = {key: value for key, value in frames.items() if not key.startswith(IMAGE_PREFIX)}
        trace = episodes.trace(index, vectors, advanced.length)
        episodes.update_history(index, episodes.extended_history(index, frames), advanced.length)
        rewards = {"agreement": episodes.scatter(index, (matches & advanced.live).astype(np.float64))}
        return episodes.step(trace, rewards, episodes.scatter(index, advanced.live))

    def snapshot(self, rows: Rows = None) -> Snapshot:
        """Copy each row's demonstration, position and observation history, [R, ...].

        Raises SpecError on invalid rows and before the first reset.
        """
        return Snapshot(self._episodes.snapshot(rows))

    def restore(self, snapshot: Snapshot, rows: Rows = None) -> Observation:
        """Overwrite `rows` and return all rows' observation [B, H, ...]. Raises SpecError when the snapshot does not
        match.
        """
        self._episodes.restore(snapshot, rows)
        return self._episodes.observation()

    def close(self) -> None:
        """Do nothing; no background work exists."""

    def _draw(self, count: int) -> np.ndarray:
        """Return new episode seeds [count]."""
        self._fresh += count
        return derive_seed(self._seed, "resets") % 2**51 + self._fresh - count + np.arange(count)

    def _frames_at(self, episode: np.ndarray, time: np.ndarray) -> dict[str, np.ndarray]:
        """Return the frames of demonstrations `episode` [R] at `time` [R, n] control steps, key -> [R, n, *shape]."""
        place = (self._first[episode] + episode)[:, None] + time  # an episode has one frame more than actions
        return {key: value[place] for key, value in self._frames.items()}
