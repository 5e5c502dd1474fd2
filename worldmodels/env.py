"""`ImaginedWorld`: any `WorldModel` as a `World`, so that trainer, evaluator and ranker run in imagination unchanged.

The three ends of a rollout stay apart: `terminated` (the model says the task ended: no bootstrap), `truncated` (the
task's time limit: bootstrap) and `horizon_end` (imagination was cut: bootstrap, never a real end).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError, NonFiniteError
from robopolicy.core.randomness import numpy_generator
from robopolicy.core.spec import TASK, Observation, WorldSpec, check_finite, validate_actions
from robopolicy.core.world import Rows, Snapshot, Step
from worldmodels.protocol import ChunkModel, Context, DecoderFree, Imagined, Latent, Starts, WorldModel, combined

PENALTY = "uncertainty"
"""Name of the reward term that an uncertain step costs."""


@dataclass(frozen=True)
class Truncation:
    """When imagination is cut before the task's time limit.

    steps: after this many imagined steps (None: never); uncertainty: once a step's uncertainty exceeds this (None:
    never). Both give `horizon_end`.
    """

    steps: int | None = None
    uncertainty: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"Imagination of {self.steps} steps is none: use 1 or more, or null for no cut.")


class ImaginedWorld:
    """World and Snapshots over a world model.

    model: what it shows is the observation, which is the latent where a model has no decoder (`DecoderFree`); starts:
    where episodes begin, by seed: the true simulator's starts pair imagined with real episodes, contexts of a dataset
    start anywhere in it; batch_size: rows B; history: H frames; truncation: when imagination is cut; penalty:
    price of a unit of uncertainty, a reward term of its own (MOPO, Yu et al. 2020, arXiv:2005.13239); debounce:
    consecutive steps that must look successful before success is believed; seed: of the generator that draws episode
    seeds when `reset` is given none.
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
    ):
        if batch_size < 1 or history < 1 or debounce < 1 or penalty < 0:
            raise ConfigError("An imagined world needs batch_size, history and debounce >= 1 and a penalty >= 0.")
        self.model, self._starts = model, starts
        self._truncation = truncation or Truncation()
        self._penalty, self._debounce = penalty, debounce
        self._batch_size = batch_size
        rewards = (*model.spec.rewards, PENALTY) if penalty else model.spec.rewards
        self._spec = replace(model.spec, name=f"imagined {model.spec.name}", rewards=rewards, history=history)
        self._generator = numpy_generator(seed, f"imagined/{self._spec.name}/episode_seeds")
        self._latent: Latent = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._frames: dict[str, np.ndarray] = {}

    @property
    def spec(self) -> WorldSpec:
        """The spec of the world that is imitated, with this history."""
        return self._spec

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return self._batch_size

    def reset(
        self, rows: Rows = None, seeds: Sequence[int] | np.ndarray | None = None, options: Mapping | None = None
    ) -> Observation:
        """Start new episodes in `rows`; it takes no options. See `core.world.World`."""
        if options:
            raise ConfigError(f"An imagined world takes no reset options, got {sorted(options)}.")
        if not self._arrays:
            if rows is not None and len(np.unique(np.asarray(rows))) < self._batch_size:
                raise ConfigError("The first reset starts every row: call reset() before resetting some of them.")
            self._allocate()
        index = np.arange(self._batch_size) if rows is None else np.asarray(rows, dtype=np.int64)
        chosen = self._generator.integers(0, 2**62, len(index)) if seeds is None else np.array(seeds, np.int64)
        if len(chosen) != len(index):
            raise ConfigError(f"{len(index)} rows need as many seeds, got {len(chosen)}.")
        context = self._starts(chosen)
        latent = self.model.initial(context, chosen)
        self._latent = _scatter(self._latent, latent, index, self._batch_size)
        for key, known in self._first_frames(context, latent).items():
            self._frames[key][index] = known[:, np.maximum(np.arange(-self._spec.history, 0), -known.shape[1])]
        self._arrays["task"][index] = self._spec.instructions[0] if context.task is None else context.task
        for name in ("steps", "streak", "success", "terminated", "truncated", "horizon_end"):
            self._arrays[name][index] = 0
        return self._observation()

    def step(self, actions: np.ndarray) -> Step:
        """Imagine a chunk [B, C, A]. See `core.world.World`."""
        if not self._arrays:
            raise ConfigError("Reset the world before stepping it.")
        actions = np.asarray(actions)
        validate_actions(actions, self._spec.action, self._batch_size)
        clipped = np.clip(actions, self._spec.action.low, self._spec.action.high)
        shape = actions.shape[:2]
        rewards = {name: np.zeros(shape) for name in self._spec.rewards}
        valid, uncertainty = np.zeros(shape, dtype=bool), np.zeros(shape)
        trace = {key: np.zeros((*shape, *field.shape), field.dtype) for key, field in self._spec.observation.items()}
        future = self._imagine(clipped)
        for index in range(shape[1]):
            active = ~self._ended()
            if active.any():
                valid[:, index] = active
                imagined = next(future)
                self._take(imagined, active)
                for name in self.model.spec.rewards:
                    rewards[name][:, index] = np.where(active, imagined.rewards[name].cpu().numpy(), 0.0)
                uncertainty[:, index] = np.where(active, imagined.uncertainty.cpu().numpy(), 0.0)
            for key in trace:
                trace[key][:, index] = self._frames[key][:, -1]
        if self._penalty:
            rewards[PENALTY] = -self._penalty * uncertainty
        flags = {name: self._arrays[name].copy() for name in ("terminated", "truncated", "success", "horizon_end")}
        return Step(self._observation(), trace, rewards, valid, **flags, uncertainty=uncertainty)

    def snapshot(self, rows: Rows = None) -> Snapshot:
        """Copy the state of `rows`: latent, history, counters and flags."""
        index = np.arange(self._batch_size) if rows is None else np.asarray(rows)
        arrays = {f"latent/{name}": value.cpu().numpy()[index] for name, value in self._latent.items()}
        arrays |= {f"frames/{key}": value[index] for key, value in self._frames.items()}
        return Snapshot(arrays | {f"array/{name}": value[index] for name, value in self._arrays.items()})

    def restore(self, snapshot: Snapshot, rows: Rows = None) -> Observation:
        """Overwrite `rows` with a snapshot and return the observation of all rows."""
        index = np.arange(self._batch_size) if rows is None else np.asarray(rows)
        if len(snapshot) != len(index):
            raise ConfigError(f"The snapshot holds {len(snapshot)} rows, {len(index)} were to be restored.")
        latent: Latent = {}
        for name, value in snapshot.arrays.items():
            kind, key = name.split("/", 1)
            if kind == "latent":
                latent[key] = torch.from_numpy(np.ascontiguousarray(value))
            else:
                (self._frames if kind == "frames" else self._arrays)[key][index] = value
        self._latent = _scatter(self._latent, latent, index, self._batch_size)
        return self._observation()

    def close(self) -> None:
        """Nothing is held open."""

    def _allocate(self) -> None:
        rows = self._batch_size
        fields = self._spec.observation.items()
        self._frames = {key: np.zeros((rows, self._spec.history, *item.shape), item.dtype) for key, item in fields}
        width = max(len(text) for text in self._spec.instructions)
        self._arrays = {"task": np.full(rows, "", dtype=f"<U{max(1, width)}")}
        self._arrays |= {name: np.zeros(rows, dtype=np.int64) for name in ("steps", "streak")}
        self._arrays |= {
            name: np.zeros(rows, dtype=bool) for name in ("success", "terminated", "truncated", "horizon_end")
        }

    def _first_frames(self, context: Context, latent: Latent) -> dict[str, np.ndarray]:
        """Return the frames that episodes begin with, key -> [R, T, *shape]: those of the context, or what the latent
        shows where there is no decoder, as one frame.
        """
        if not isinstance(self.model, DecoderFree):
            return {key: context.observation[key] for key in self._spec.observation}
        shown = self.model.show(latent)
        frames = {key: shown[key].cpu().numpy()[:, None] for key in self._spec.observation}
        for key, frame in frames.items():
            check_finite(f"the first {key}", frame)
        return frames

    def _imagine(self, actions: np.ndarray) -> Iterator[Imagined]:
        """Yield what the steps of a chunk [B, C, A] lead to for rows that have not ended; together where models can."""
        chunk = torch.from_numpy(actions).to(next(iter(self._latent.values())).device)
        generate, parts = (
            (self.model.generate, (chunk,)) if isinstance(self.model, ChunkModel) else (self._one, chunk.split(1, 1))
        )
        for part in parts:
            index = np.flatnonzero(~self._ended())
            everyone, rows = len(index) == self._batch_size, torch.from_numpy(index).to(chunk.device)
            before = self._latent if everyone else {name: value[rows] for name, value in self._latent.items()}
            with torch.no_grad():
                latent, found = generate(before, part if everyone else part[rows])
            self._latent = latent if everyone else _scatter(self._latent, latent, index, self._batch_size)
            yield from found if everyone else (_spread(step, rows, self._batch_size) for step in found)

    def _one(self, latent: Latent, actions: Tensor) -> tuple[Latent, list[Imagined]]:
        """Imagine the only step of a chunk [B, 1, A]."""
        latent, imagined = self.model.imagine(latent, actions[:, 0])
        return latent, [imagined]

    def _take(self, imagined: Imagined, active: np.ndarray) -> None:
        """Keep an imagined step in the active rows."""
        for key, frames in self._frames.items():
            frame = imagined.observation[key].cpu().numpy()
            check_finite(f"imagined {key}", frame[active])
            frames[active] = np.concatenate([frames[active, 1:], frame[active, None].astype(frames.dtype)], axis=1)
        arrays = self._arrays
        arrays["steps"] += active
        seen = imagined.success.cpu().numpy()
        arrays["streak"][active] = np.where(seen, arrays["streak"] + 1, 0)[active]
        arrays["success"] |= active & (arrays["streak"] >= self._debounce)
        ended = imagined.terminated.cpu().numpy() & ~seen
        if self._spec.terminate_on_success:
            ended = ended | arrays["success"]
        arrays["terminated"] |= active & ended
        running = active & ~arrays["terminated"]
        arrays["truncated"] |= running & (arrays["steps"] >= self._spec.horizon)
        arrays["horizon_end"] |= running & ~arrays["truncated"] & self._cut(imagined.uncertainty.cpu().numpy())

    def _cut(self, uncertainty: np.ndarray) -> np.ndarray:
        if not np.isfinite(uncertainty).all():
            raise NonFiniteError("The world model's uncertainty is not finite: train it longer or check its data.")
        cut = np.zeros(self._batch_size, dtype=bool)
        if self._truncation.steps is not None:
            cut |= self._arrays["steps"] >= self._truncation.steps
        if self._truncation.uncertainty is not None:
            cut |= uncertainty > self._truncation.uncertainty
        return cut

    def _ended(self) -> np.ndarray:
        return self._arrays["terminated"] | self._arrays["truncated"] | self._arrays["horizon_end"]

    def _observation(self) -> Observation:
        return {key: value.copy() for key, value in self._frames.items()} | {TASK: self._arrays["task"].copy()}


def _spread(imagined: Imagined, rows: Tensor, count: int) -> Imagined:
    """Return what was imagined in some `rows` for all `count` of them, zeros in the others."""

    def spread(parts: list[Tensor]) -> Tensor:
        return parts[0].new_zeros((count, *parts[0].shape[1:])).index_copy(0, rows, parts[0])

    return combined([imagined], spread)


def _scatter(whole: Latent, part: Latent, index: np.ndarray, rows: int) -> Latent:
    """Return `whole` with rows `index` replaced by `part`; made on first use."""
    result = {}
    for name, value in part.items():
        target = whole[name].clone() if name in whole else value.new_zeros((rows, *value.shape[1:]))
        target[torch.from_numpy(np.asarray(index))] = value.to(target.device, target.dtype)
        result[name] = target
    return result
