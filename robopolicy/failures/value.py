"""A success head on the policy's own embeddings, learned from rollouts of both outcomes (as SAFE, arXiv:2506.09937)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from robopolicy.core.arrays import Array
from robopolicy.core.errors import DataError
from robopolicy.failures.detector import Rollout, Seen
from robopolicy.failures.nearest import ClockDetector
from robopolicy.failures.networks import Mlp


class ValueDetector(ClockDetector):
    """The index is the mean, over the decisions so far, of the predicted chance that the episode fails.

    The head reads one embedding and not the time; every episode, and both outcomes, have the same weight in its loss.
    """

    learns_from_rollouts = True

    def fit(self, demonstrations: Sequence[Array], rollouts: Sequence[Rollout], decisions: int) -> None:
        """Implement `FailureDetector.fit`: rollouts of both outcomes."""
        failed = np.array([not each.success for each in rollouts])
        if len(set(failed.tolist())) < 2:
            raise DataError("A success head needs successful and failed rollouts: detect.episodes=NUMBER.")
        vectors = np.concatenate([each.embedding for each in rollouts])
        lengths = np.array([len(each.embedding) for each in rollouts])
        share = np.where(failed, 0.5 / failed.sum(), 0.5 / (~failed).sum()) / lengths
        label, weight = (torch.from_numpy(np.repeat(each, lengths)).float() for each in (failed, share))
        self._head = Mlp(vectors.shape[1], 1, seed=0)
        self._head.standardise(vectors)

        def loss() -> torch.Tensor:
            each = binary_cross_entropy_with_logits(self._head(vectors)[:, 0], label, reduction="none")
            return (each * weight).sum()

        self._head.fit(loss, steps=200, decay=0.1)

    def start(self, batch_size: int) -> None:
        """Implement `FailureDetector.start`."""
        super().start(batch_size)
        self._count = np.zeros(batch_size)

    def reset(self, rows: Array) -> None:
        """Implement `FailureDetector.reset`: rows [R]."""
        super().reset(rows)
        self._count[rows] = 0

    @torch.no_grad()
    def watch(self, seen: Seen, rows: Array) -> Array:
        """Implement `FailureDetector.watch`: rows [R] -> [R]."""
        self._index[rows] += self._head(seen.embedding)[:, 0].sigmoid().double().numpy()
        self._count[rows] += 1
        return self._index[rows] / self._count[rows]

    def state(self) -> Mapping[str, Any]:
        """Implement `FailureDetector.state`."""
        return self._head.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Implement `FailureDetector.restore`."""
        self._head = Mlp.restored(state)
