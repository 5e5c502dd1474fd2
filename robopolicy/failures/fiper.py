"""FIPER's two signs of a failure: new observations and undecided actions (arXiv:2510.09459).

Novelty is the error of a network that imitates a random one on familiar embeddings (random network distillation).
Entropy is that of the action chunks that the policy samples for one observation. Both are means over a short window;
an alarm needs both. Here the entropy is that of independent Gaussians, one per number of the chunk, the familiar
embeddings are those of the demonstrations and successful rollouts, and both signs are scaled by successful rollouts and
then share one threshold (of their minimum), where the paper has an estimator of its own and a threshold for each.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from robopolicy.core.arrays import Array
from robopolicy.core.errors import DataError
from robopolicy.failures.detector import Rollout, Seen, require_demonstrations
from robopolicy.failures.networks import Mlp

LEAST_STD = 1e-3
"""Least deviation of sampled actions, in that of the demonstrations."""


class FiperDetector:
    """`FailureDetector` by novelty and entropy; window: number of decisions that are averaged."""

    reads_chunks = True
    learns_from_rollouts = True

    def __init__(self, window: int = 3, outputs: int = 16):
        self.window, self.outputs = window, outputs

    def fit(self, demonstrations: Sequence[Array], rollouts: Sequence[Rollout], decisions: int) -> None:
        """Implement `FailureDetector.fit`: demonstrations [L, D] each; of the rollouts the successful ones."""
        require_demonstrations(demonstrations)
        good = [each for each in rollouts if each.success]
        if not good:
            raise DataError("FIPER needs successful rollouts, and there is none: detect.episodes=NUMBER.")
        familiar = np.concatenate([*demonstrations, *(each.embedding for each in good)])
        self._target, self._copy = (Mlp(familiar.shape[1], self.outputs, seed) for seed in (0, 1))
        for network in (self._target, self._copy):
            network.standardise(familiar)
        with torch.no_grad():
            target_outputs = self._target(familiar)
        self._copy.fit(lambda: (self._copy(familiar) - target_outputs).square().mean())
        signs = np.concatenate([smoothed(self._signs(each.embedding, each.chunks), self.window) for each in good])
        self._middle = np.median(signs, axis=0)
        self._scale = np.maximum(np.quantile(signs, 0.95, axis=0) - self._middle, 1e-9)

    @torch.no_grad()
    def _signs(self, embedding: Array, chunks: Array) -> Array:
        """Return logarithm of novelty, and entropy up to a constant, [n, 2], for [n, D] and [n, S, K]."""
        novelty = (self._copy(embedding) - self._target(embedding)).square().mean(-1).double().numpy()
        return np.stack([np.log(novelty + 1e-12), chunk_entropy(chunks)], axis=-1)

    def start(self, batch_size: int) -> None:
        """Implement `FailureDetector.start`."""
        self._last, self._count = np.zeros((batch_size, self.window, 2)), np.zeros(batch_size, dtype=np.int64)

    def reset(self, rows: Array) -> None:
        """Implement `FailureDetector.reset`: rows [R]."""
        self._count[rows] = 0

    def watch(self, seen: Seen, rows: Array) -> Array:
        """Implement `FailureDetector.watch`: rows [R] -> [R]."""
        self._last[rows, self._count[rows] % self.window] = self._signs(seen.embedding, seen.chunks)
        self._count[rows] += 1
        filled_mask = np.arange(self.window) < self._count[rows, None]
        means = (self._last[rows] * filled_mask[..., None]).sum(1) / filled_mask.sum(1, keepdims=True)
        return ((means - self._middle) / self._scale).min(1)

    def state(self) -> Mapping[str, Any]:
        """Implement `FailureDetector.state`."""
        scales = {"window": self.window, "middle": self._middle, "scale": self._scale}
        return {**scales, "target": self._target.state(), "copy": self._copy.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Implement `FailureDetector.restore`."""
        self.window = int(state["window"])
        self._middle, self._scale = np.asarray(state["middle"]), np.asarray(state["scale"])
        self._target, self._copy = Mlp.restored(state["target"]), Mlp.restored(state["copy"])


def chunk_entropy(chunks: Array) -> Array:
    """Return the mean over a chunk's numbers of log standard deviation over the samples: chunks [n, S, K] -> [n]."""
    return np.log(chunks.astype(np.float64).std(1) + LEAST_STD).mean(-1)


def smoothed(signs: Array, window: int) -> Array:
    """Return the means of the last `window` of signs [n, 2], fewer at the start."""
    total = np.cumsum(np.pad(signs, ((1, 0), (0, 0))), axis=0)
    end = np.arange(1, len(signs) + 1)
    begin = np.maximum(end - window, 0)
    return (total[end] - total[begin]) / (end - begin)[:, None]
