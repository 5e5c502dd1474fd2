"""Detectors around a policy: embeds what it observes, samples its chunks, records rollouts, and watches it act.

Axes: B row of a batch, R rows that decide now, S sampled chunk, D embedding, C chunk step, A action, H history frame.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.candidates import repeat_observation, rows_of_observation
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import CheckpointError, DataError
from robopolicy.core.player import PlayedStep, PolicyOutput
from robopolicy.core.policy import EncodesObservation, Policy, TensorObservation, innermost
from robopolicy.core.randomness import EpisodeGenerator, derive_keys
from robopolicy.core.storage import recover_folder, write_folder_atomic
from robopolicy.core.tensors import load_tree, save_tree, to_arrays, to_tensors
from robopolicy.evaluation.episode_batches import episode_batches
from robopolicy.evaluation.success import EvaluationResult
from robopolicy.failures.detector import Calibrated, Rollout, Seen, load_detector
from robopolicy.rl.offline.decisions import observations_at

EMBEDDING = "embedding"
"""Name of the files of an embedding's scales."""


class Observer:
    """What detectors read of a policy: its own embedding of observations, and chunks that it samples.

    policy: acts, with `spec.chunk` control steps per decision; encoder: its form with `encode`; samples: chunks S per
    decision, 0 for none. A policy that reads no images has its embedding standardised, one without `encode` is given
    its standardised vectors; `fit` takes the scales from demonstrations.
    """

    def __init__(self, policy: Policy, encoder: Policy, samples: int):
        self.policy, self.samples = policy, samples
        inner_encoder = innermost(encoder)
        self._encoder = inner_encoder if isinstance(inner_encoder, EncodesObservation) else None
        self._keys = [key for key, field in policy.spec.observation.items() if field.dtype != "uint8"]
        self._is_blind = not policy.spec.cameras
        if self._encoder is None and not self._is_blind:
            raise DataError(
                f"{type(inner_encoder).__name__} reads images and has no encode(observation), which detectors need: "
                "see EncodesObservation in robopolicy/core/policy.py."
            )
        self._middle, self._scale = np.zeros(1), np.ones(1)
        self._action = np.ones(1)

    def fit(self, episodes: Episodes) -> list[Array]:
        """Take the scales from demonstrations; return their embeddings, one vector per decision, [L, D] each."""
        vectors = [self._raw(observation) for observation in self._decisions(episodes)]
        all_vectors = np.concatenate(vectors)
        if self._is_blind or self._encoder is None:
            self._middle, self._scale = all_vectors.mean(0), np.maximum(all_vectors.std(0), 1e-3)
        self._action = np.maximum(episodes.actions.numpy().std(0), 1e-3)
        return [self._scaled(each) for each in vectors]

    def _decisions(self, episodes: Episodes) -> Iterator[TensorObservation]:
        """Yield the observations at every decision of each episode."""
        spec = self.policy.spec
        for first, length in zip(episodes.frame_starts.tolist(), episodes.lengths.tolist(), strict=True):
            frames = first + torch.arange(0, length, spec.chunk)
            yield observations_at(episodes, frames, spec.history, list(spec.observation))

    @torch.no_grad()
    def _raw(self, observation: TensorObservation) -> Array:
        """Return unscaled embeddings [R, D] float32 of observations [R, H, ...]."""
        if self._encoder is not None:
            parts = [value for _, value in sorted(self._encoder.encode(observation).items())]
            parts = [part if part.ndim == 2 else part.flatten(1, -2).mean(1) for part in parts]
        else:
            parts = [cast(Tensor, observation[key]).flatten(1) for key in self._keys]
        return torch.cat([part.float() for part in parts], -1).cpu().numpy()

    def _scaled(self, vectors: Array) -> Array:
        return ((vectors - self._middle) / self._scale).astype(np.float32)

    def see(self, observation: TensorObservation, generator: torch.Generator) -> Seen:
        """Embed R observations [R, H, ...] and sample their chunks; generator: of the samples.

        An `EpisodeGenerator` has R x S rows, the samples of a row one after the other.
        """
        embedding = self._scaled(self._raw(observation))
        if not self.samples:
            return Seen(embedding, np.zeros((len(embedding), 0, 0), dtype=np.float32))
        repeated = repeat_observation(observation, self.samples)
        actions = self.policy.act(repeated, generator, deterministic=True).actions.cpu().numpy() / self._action
        return Seen(embedding, actions.reshape(len(embedding), self.samples, -1).astype(np.float32))

    def state(self) -> dict[str, Any]:
        """Return the scales."""
        return {"middle": self._middle, "scale": self._scale, "action": self._action, "samples": self.samples}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state`."""
        self._middle, self._scale, self._action = (np.asarray(state[name]) for name in ("middle", "scale", "action"))
        self.samples = int(state["samples"])


class Recorder:
    """Records what detectors read while `evaluate_policy` plays; pass its `watch`, then call `rollouts`.

    seeds: [E] of the episodes, batch_size: rows of the world; seed: of the sampled chunks, which depend on the episode.
    """

    def __init__(self, observer: Observer, seeds: Array, batch_size: int, seed: int):
        self._observer = observer
        self._seeds, self._seed = seeds, seed
        self._batches = list(episode_batches(seeds, batch_size))
        self._now = -1
        self._seen: list[list[Seen]] = [[] for _ in seeds]

    def watch(self, played: PlayedStep[object] | None) -> None:
        """Take a decision of the rows that run; None: another batch begins."""
        if played is None:
            self._now += 1
            self._decision = 0
            return
        assert isinstance(played.info, PolicyOutput)
        index = self._batches[self._now]
        rows = np.flatnonzero(played.running[: len(index)])
        observation = rows_of_observation(played.info.seen, rows.tolist())
        generator = EpisodeGenerator(self._seed)
        if samples := self._observer.samples:
            keys = np.repeat(self._seeds[index[rows]], samples), np.tile(np.arange(samples), len(rows))
            generator.begin(derive_keys(self._decision, *keys))
        with generator.decision() if samples else nullcontext():
            seen = self._observer.see(observation, generator)
        self._decision += 1
        for place, row in enumerate(rows):
            self._seen[index[row]].append(Seen(seen.embedding[place], seen.chunks[place]))

    def rollouts(self, result: EvaluationResult) -> list[Rollout]:
        """Return the episodes in the order of the seeds; result: of the same evaluation."""
        begins = np.zeros(len(self._seeds), dtype=np.int64) if result.fault_begins is None else result.fault_begins
        faults = result.faults or ("",) * len(self._seeds)
        return [
            Rollout(
                np.stack([seen.embedding for seen in self._seen[place]]),
                np.stack([seen.chunks for seen in self._seen[place]]),
                bool(result.success[place]),
                int(result.lengths[place]),
                faults[place],
                int(begins[place]),
            )
            for place in range(len(self._seeds))
        ]


class Watcher:
    """Calibrated detectors of one policy, as a server uses them: start, then `watch` at every decision.

    observer: embeds and samples; detectors: by name.
    """

    def __init__(self, observer: Observer, detectors: Mapping[str, Calibrated]):
        self.observer, self.detectors = observer, dict(detectors)

    def start(self, batch_size: int) -> None:
        """Begin to watch `batch_size` rows."""
        for each in self.detectors.values():
            each.start(batch_size)

    def reset(self, rows: Array) -> None:
        """Begin new episodes in the rows [R]."""
        for each in self.detectors.values():
            each.reset(rows)

    def watch(
        self, observation: TensorObservation, rows: Array, generator: torch.Generator
    ) -> dict[str, tuple[Array, Array]]:
        """Read the observations [R, H, ...] that the rows [R] decide from; return index [R] and alarm [R] by name."""
        seen = self.observer.see(observation, generator)
        return {name: each.watch(seen, rows) for name, each in self.detectors.items()}

    def save(self, folder: Path) -> None:
        """Write all detectors into `folder`, atomically, in place of those that were there."""

        def fill(new: Path) -> None:
            save_tree(new, EMBEDDING, to_tensors(self.observer.state()))
            for name, each in self.detectors.items():
                each.save(new / name.replace(":", "-"))

        write_folder_atomic(folder, fill)


def load_watcher(
    folder: Path, policy: Policy, encoder: Policy, fitted_for: Mapping[str, Any], names: Sequence[str] = ()
) -> Watcher:
    """Load the detectors that `Watcher.save` wrote, all or those with these names.

    folder: of all detectors, or of one. Raises CheckpointError when there are none or a name is missing, and as
    `load_detector` does.
    """
    if not names and (folder.parent / f"{EMBEDDING}.json").is_file():
        folder, names = folder.parent, (folder.name,)
    folder = recover_folder(folder)
    if not (folder / f"{EMBEDDING}.json").is_file():
        raise CheckpointError(f"{folder} contains no failure detectors: calibrate some, robopolicy detect CHECKPOINT.")
    observer = Observer(policy, encoder, 0)
    observer.restore(to_arrays(load_tree(folder, EMBEDDING)))
    parts = sorted(path for path in folder.iterdir() if path.is_dir())
    stored_names = [path.name for path in parts]
    file_names = [name.replace(":", "-") for name in names] or stored_names
    for name in file_names:
        if name not in stored_names:
            raise CheckpointError(f"{folder} has no detector '{name}'. It has: {', '.join(stored_names)}.")
    detectors = [load_detector(path, fitted_for) for path in parts if path.name in file_names]
    return Watcher(observer, {each.name: each for each in detectors})
