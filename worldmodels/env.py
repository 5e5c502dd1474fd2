"""`ImaginedWorld`: any `WorldModel` as a `World`, so that trainer, evaluator and ranker run unchanged in imagination.

Three ends of a rollout are kept apart: `terminated` (the model predicts the task's end: no bootstrap), `truncated` (the
task's time limit: bootstrap) and `horizon_end` (imagination was truncated: bootstrap, never a real end).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from robopolicy.core.action_bounds import clip_if_bounded
from robopolicy.core.episode_rows import Advanced, EpisodeRows, require_sizes
from robopolicy.core.errors import ConfigError, NonFiniteError
from robopolicy.core.history import repeat_last_valid
from robopolicy.core.randomness import derive_keys, numpy_generator
from robopolicy.core.returns import SUCCESS
from robopolicy.core.spec import TASK, Observation, WorldSpec, check_finite, validate_actions
from robopolicy.core.world import Rows, Snapshot, Step
from worldmodels.protocol import ChunkModel, Context, DecoderFree, Imagined, Latent, Starts, WorldModel, merge_steps
from worldmodels.readout import inner_model

PENALTY = "uncertainty"
"""Name of the reward term of the uncertainty penalty."""


@dataclass(frozen=True)
class Truncation:
    """Criteria for truncating imagination before the task's time limit.

    steps: after this number of imagined steps (None: never); uncertainty: once a step's uncertainty exceeds this (None:
    never). Both set `horizon_end`.
    """

    steps: int | None = None
    uncertainty: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ConfigError(
                f"steps={self.steps} is not a valid imagination horizon: use 1 or more, or null for no limit."
            )


@dataclass(frozen=True)
class StateCriterion:
    """A task's own criterion of success, in place of a model's prediction.

    succeeded: vectors by key, [R, C, *shape] each, and `task`, texts [R, 1] -> [R, C] bool, as `sims.task.Task`
    defines it; keys: vectors that it reads; bonus: the reward for reaching success.
    """

    succeeded: Callable[[Mapping[str, np.ndarray]], np.ndarray]
    keys: tuple[str, ...]
    bonus: float

    def applied(self, future: Imagined, texts: np.ndarray) -> Imagined:
        """Return imagined steps [R, C, ...] of episodes with instructions `texts` [R] with this success and its
        reward.
        """
        vectors = {key: future.observation[key].cpu().numpy().astype(np.float64) for key in self.keys}
        success = torch.from_numpy(np.asarray(self.succeeded({**vectors, TASK: texts[:, None]}))).to(future.success)
        rewards = dict(future.rewards)
        if SUCCESS in rewards:
            rewards[SUCCESS] = self.bonus * success.to(rewards[SUCCESS].dtype)
        # A model may count its own success as an end of the task.
        return replace(future, success=success, rewards=rewards, terminated=future.terminated & ~future.success)


class ImaginedWorld:
    """`World` with snapshots, on top of a world model.

    model: its outputs are the observation, or its latent if it has no decoder (`DecoderFree`). starts: initial states
    of episodes by seed; the true simulator's starts pair imagined with real episodes, contexts of a dataset start
    anywhere in it. batch_size: rows B; history: H frames; truncation: when imagination is truncated. penalty: penalty
    per unit of uncertainty, a separate reward term (MOPO, Yu et al. 2020, arXiv:2005.13239). debounce: number of
    consecutive predicted-success steps required for success. seed: of the generator of episode seeds when `reset` is
    given none. criterion: decides success from the imagined vectors, instead of the model. noises: number of times that
    the same actions are imagined, each under noise of its own; the policy sees the first, and an episode succeeds once
    all have, so that success does not hang on the model's noise (after RAW-Dream, arXiv:2605.12334). If success is
    defined by an episode's return (`WorldSpec.least_return`), it is the imagined return at the end; an episode
    truncated before has not succeeded. Raises ConfigError on sizes below 1 and a negative penalty.
    """

    def __init__(
        self,
        model: WorldModel,
        starts: Starts,
        batch_size: int,
        *,
        history: int = 1,
        truncation: Truncation | None = None,
        penalty: float = 0.0,
        debounce: int = 1,
        seed: int = 0,
        criterion: StateCriterion | None = None,
        noises: int = 1,
    ):
        require_sizes(batch_size=batch_size, history=history, debounce=debounce, noises=noises)
        if noises > 1 and model.spec.least_return is not None:
            raise ConfigError(f"noises={noises} needs success that a step shows, and here an episode's return decides.")
        if penalty < 0:
            raise ConfigError(f"penalty={penalty} must be at least 0: it is the penalty per unit of uncertainty.")
        self.model, self._starts = model, starts
        self._truncation = truncation or Truncation()
        self._penalty, self._debounce = penalty, debounce
        self._criterion = criterion
        self._batch_size = batch_size
        rewards = (*model.spec.rewards, PENALTY) if penalty else model.spec.rewards
        self._spec = replace(model.spec, name=f"imagined {model.spec.name}", rewards=rewards, history=history)
        generator = numpy_generator(seed, f"imagined/{self._spec.name}/episode_seeds")
        self._episodes = EpisodeRows(
            self._spec, batch_size, lambda count: generator.integers(0, 2**62, count), cuts=True
        )
        self._latents: list[Latent] = [{} for _ in range(noises)]

    @property
    def spec(self) -> WorldSpec:
        """Spec of the imitated world, with this history."""
        return self._spec

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return self._batch_size

    def reset(
        self, rows: Rows = None, seeds: Sequence[int] | np.ndarray | None = None, options: Mapping | None = None
    ) -> Observation:
        """Start new episodes in `rows`, the first time in every row; returns all rows' observation [B, H, ...].

        Raises ConfigError on any option, SpecError on invalid rows or seeds.
        """
        if options:
            raise ConfigError(f"An imagined world takes no reset options, got {sorted(options)}.")
        index, episode_seeds = self._episodes.reset_rows(rows, seeds)
        context = self._starts(episode_seeds)
        starts = [self.model.initial(context, seeds) for seeds in self._noise_seeds(episode_seeds)]
        pairs = zip(self._latents, starts, strict=True)
        self._latents = [_scatter(latent, start, index, self._batch_size) for latent, start in pairs]
        instruction = 0 if context.task is None else self._episodes.instruction_index(context.task)
        rows_and_noises = len(index), len(starts)
        counters = {"streak": np.zeros(rows_and_noises, dtype=np.int64), "paid": np.zeros(len(index))}
        if len(starts) > 1:
            counters["succeeded"] = np.zeros(rows_and_noises, dtype=bool)
        self._episodes.start(index, self._first_frames(context, starts[0]), instruction=instruction, own=counters)
        return self._episodes.observation()

    def step(self, actions: np.ndarray) -> Step:
        """Imagine a chunk [B, C, A] in the rows that have not ended; never resets.

        Raises SpecError on a wrong shape or before the first reset, NonFiniteError on non-finite actions or
        imagination.
        """
        episodes, arrays = self._episodes, self._episodes.arrays
        actions = np.asarray(actions)
        validate_actions(actions, self._spec.action, self._batch_size)
        executed_actions = clip_if_bounded(self._spec, actions)
        index, shape = episodes.running_index, actions.shape[:2]
        rewards = {name: np.zeros(shape) for name in self._spec.rewards}
        valid, uncertainty = np.zeros(shape, dtype=bool), np.zeros(shape)
        trace = {key: np.repeat(arrays[f"history/{key}"][:, -1:], shape[1], 1) for key in self._spec.observation}
        if isinstance(index, slice) or len(index):
            limit = min(self._spec.horizon, self._truncation.steps or self._spec.horizon)
            # The row with the most steps left decides how many are imagined; the others' surplus steps are not valid.
            count = min(shape[1], limit - int(arrays["steps"][index].min()))
            futures = [self._imagine(executed_actions[:, :count], index, noise) for noise in range(len(self._latents))]
            if self._criterion is not None:
                texts = np.array([self._spec.meaning(text) for text in episodes.instructions()[index]])
                futures = [self._criterion.applied(each, texts) for each in futures]
            if self._spec.least_return is None:
                futures = [self._debounced(index, each, noise) for noise, each in enumerate(futures)]
            future = futures[0] if len(futures) == 1 else self._agreed(index, futures)
            progress = self._advance(index, future)
            path = self._seen(index, future, progress)
            for key, frames in path.items():
                # Steps of the chunk that nobody imagined repeat the last frame.
                trace[key][index] = frames[:, self._spec.history :][:, np.minimum(np.arange(shape[1]), count - 1)]
            episodes.update_history(index, path, progress.length)
            valid[index, :count] = progress.live
            uncertainty[index, :count] = np.where(progress.live, future.uncertainty.cpu().numpy(), 0.0)
            for name in self.model.spec.rewards:
                rewards[name][index, :count] = np.where(progress.live, future.rewards[name].cpu().numpy(), 0.0)
        if self._penalty:
            rewards[PENALTY] = -self._penalty * uncertainty
        return episodes.step(trace, rewards, valid, uncertainty)

    def snapshot(self, rows: Rows = None) -> Snapshot:
        """Copy the state [R, ...] of `rows`: latent, history, counters and flags.

        Raises SpecError on invalid rows and before the first reset.
        """
        arrays, index = self._episodes.snapshot(rows), self._episodes.index(rows)
        latents = {
            f"{_prefix(noise)}{name}": value.cpu().numpy()[index]
            for noise, latent in enumerate(self._latents)
            for name, value in latent.items()
        }
        return Snapshot(latents | arrays)

    def restore(self, snapshot: Snapshot, rows: Rows = None) -> Observation:
        """Overwrite `rows` with a snapshot and return all rows' observation [B, H, ...].

        Raises SpecError when the snapshot does not match the rows and this world.
        """
        index = self._episodes.restore(snapshot, rows)
        for noise, latents in enumerate(self._latents):
            latent = {
                name.removeprefix(_prefix(noise)): torch.from_numpy(np.ascontiguousarray(value))
                for name, value in snapshot.arrays.items()
                if name.startswith(_prefix(noise))
            }
            self._latents[noise] = _scatter(latents, latent, index, self._batch_size)
        return self._episodes.observation()

    def close(self) -> None:
        """Do nothing; no resources are open."""

    def _first_frames(self, context: Context, latent: Latent) -> dict[str, np.ndarray]:
        """Return the first frames of episodes, key -> [R, T, *shape]: those of the context or, without a decoder, the
        latent as one frame.
        """
        if not isinstance(self.model, DecoderFree):
            return {key: context.observation[key] for key in self._spec.observation}
        decoded = self.model.show(latent)
        frames = {key: decoded[key].cpu().numpy()[:, None] for key in self._spec.observation}
        for key, frame in frames.items():
            check_finite(f"the first {key}", frame)
        return frames

    def _noise_seeds(self, episode_seeds: np.ndarray) -> list[np.ndarray]:
        """Return the seeds [R] of the model's noise, for each of the `noises`; the first are those of the episodes."""
        return [episode_seeds, *(derive_keys(noise, episode_seeds) for noise in range(1, len(self._latents)))]

    def _agreed(self, index: slice | np.ndarray, futures: Sequence[Imagined]) -> Imagined:
        """Return the first of several outcomes [R, C, ...] of the same actions in the rows `index`, with success from
        the step on by which all have succeeded.
        """
        first, succeeded = futures[0], self._episodes.arrays["succeeded"]
        by_now = np.stack([future.success.cpu().numpy() for future in futures], -1)
        by_now = np.logical_or.accumulate(by_now, axis=1) | succeeded[index, None]
        succeeded[index] = by_now[:, -1]
        success = torch.from_numpy(by_now.all(-1)).to(first.success)
        rewards = dict(first.rewards)
        if SUCCESS in rewards:
            bonus = self._criterion.bonus if self._criterion else getattr(inner_model(self.model), "success_bonus", 0.0)
            rewards[SUCCESS] = bonus * success.to(rewards[SUCCESS].dtype)
        return replace(first, success=success, rewards=rewards)

    def _imagine(self, actions: np.ndarray, index: slice | np.ndarray, noise: int) -> Imagined:
        """Return the outcome of a chunk [B, C, A] in the running rows `index` [R] under one of the noises: [R, C, ...],
        including steps after an episode's end.
        """
        latents, all_rows = self._latents[noise], isinstance(index, slice)
        device = next(iter(latents.values())).device
        rows = torch.from_numpy(np.arange(self._batch_size)[index]).to(device)
        latent = latents if all_rows else {name: value[rows] for name, value in latents.items()}
        chunk, outcomes = torch.from_numpy(actions[index]).to(device), list[Imagined]()
        with torch.no_grad():
            if isinstance(self.model, ChunkModel):
                latent, outcomes = self.model.generate(latent, chunk)
            else:
                for action in chunk.unbind(1):
                    latent, outcome = self.model.imagine(latent, action)
                    outcomes.append(outcome)
        self._latents[noise] = latent if all_rows else _scatter(latents, latent, rows.cpu().numpy(), self._batch_size)
        return merge_steps(outcomes, lambda steps: torch.stack(steps, 1))

    def _advance(self, index: slice | np.ndarray, future: Imagined) -> Advanced:
        """Count the steps of an imagined chunk [R, C] in the rows `index`, and mark ended episodes."""
        uncertainty, terminated = future.uncertainty.cpu().numpy(), future.terminated.cpu().numpy()
        success_return = self._spec.least_return
        success = (
            future.success.cpu().numpy() if success_return is None else self._earned(index, future, success_return)
        )
        advanced = self._episodes.advance(index, success, terminated=terminated, cut=self._cut(index, uncertainty))
        # Rows that ended go on being imagined and may leave the data; only steps that count must be finite.
        if not np.isfinite(uncertainty[advanced.live]).all():
            raise NonFiniteError("The world model's uncertainty is not finite: train it longer or check its data.")
        return advanced

    def _debounced(self, index: slice | np.ndarray, future: Imagined, noise: int) -> Imagined:
        """Return a chunk [R, C], imagined in the rows `index` under one of the noises, with success and its reward
        where success has lasted long enough.
        """
        success, streak = future.success.cpu().numpy(), self._episodes.arrays["streak"]
        # How many of the latest steps looked successful, after each of them: those since the latest that did not, or
        # since the chunk's beginning, where what was seen before it counts as well.
        place = np.arange(1, success.shape[1] + 1)
        last_failure = np.maximum.accumulate(np.where(success, 0, place), axis=1)
        streaks = place - last_failure + np.where(last_failure == 0, streak[index, noise, None], 0)
        streak[index, noise] = streaks[:, -1]  # of a row that ends in the chunk nobody asks again
        lasting = torch.from_numpy(streaks >= self._debounce).to(future.success)
        rewards = dict(future.rewards)
        if SUCCESS in rewards:
            rewards[SUCCESS] = torch.where(lasting, rewards[SUCCESS], 0.0)
        # What is not believed yet must not end the episode either.
        return replace(future, success=lasting, rewards=rewards, terminated=future.terminated & ~future.success)

    def _earned(self, index: slice | np.ndarray, future: Imagined, least: float) -> np.ndarray:
        """Return a mask of a chunk's steps [R, C] after which an episode is over with a return of at least `least`."""
        arrays = self._episodes.arrays
        terms = [future.rewards[name].cpu().numpy() for name in self.model.spec.rewards if name != SUCCESS]
        returns = arrays["paid"][index, None] + np.cumsum(np.sum(terms, axis=0, dtype=np.float64), axis=1)
        steps = arrays["steps"][index, None] + np.arange(1, returns.shape[1] + 1)
        arrays["paid"][index] = returns[:, -1]  # of a row that ends in the chunk nobody asks again
        # Only the return at the end counts: one that is reached on the way may be lost again.
        return (returns >= least) & (future.terminated.cpu().numpy() | (steps >= self._spec.horizon))

    def _seen(self, index: slice | np.ndarray, future: Imagined, moved: Advanced) -> dict[str, np.ndarray]:
        """Return the history of the rows `index` and the following frames, key -> [R, H + C, *shape]; the last frame of
        an ended episode repeats.
        """
        frames = {
            key: repeat_last_valid(future.observation[key].cpu().numpy(), moved.length)
            for key in self._spec.observation
        }
        for key, frame in frames.items():
            check_finite(f"imagined {key}", frame)
            frames[key] = frame.astype(self._spec.observation[key].dtype, copy=False)
        return self._episodes.extended_history(index, frames)

    def _cut(self, index: slice | np.ndarray, uncertainty: np.ndarray) -> np.ndarray:
        """Return a mask of a chunk's steps after which imagination is truncated in the rows `index`, shaped like
        uncertainty [R, C].
        """
        steps = self._episodes.arrays["steps"][index, None] + np.arange(1, uncertainty.shape[1] + 1)
        truncated = np.zeros(uncertainty.shape, dtype=bool)
        if self._truncation.steps is not None:
            truncated |= steps >= self._truncation.steps
        if self._truncation.uncertainty is not None:
            truncated |= uncertainty > self._truncation.uncertainty
        return truncated


def _prefix(noise: int) -> str:
    """Return the prefix of the names of a latent in snapshots."""
    return f"latent_{noise}/" if noise else "latent/"


def _scatter(whole: Latent, part: Latent, index: np.ndarray, rows: int) -> Latent:
    """Return `whole` with rows `index` replaced by `part`; allocated on first use."""
    result = {}
    for name, value in part.items():
        # A copy: the tensor may be shared with a latent that a caller or a snapshot still holds.
        target = whole[name].clone() if name in whole else value.new_zeros((rows, *value.shape[1:]))
        target[torch.from_numpy(np.asarray(index))] = value.to(target.device, target.dtype)
        result[name] = target
    return result
