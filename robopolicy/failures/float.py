"""FLOAT: optimal transport from demonstrations to what the policy has seen so far (ARMADA, arXiv:2510.02298).

The cost of a vector of a demonstration and a decision is 1 - cosine of their embeddings. A demonstration is transported
to the decisions so far and to those still to come, which cost nothing; the index is the cost of the cheapest of the
`candidates` demonstrations whose first vectors are nearest to the episode's. Axes: see `detector`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.failures.detector import Rollout, Seen, require_demonstrations
from robopolicy.failures.transport import prefix_costs


class FloatDetector:
    """`FailureDetector` by optimal transport; epsilon: of Sinkhorn's iterations."""

    reads_chunks = False
    learns_from_rollouts = False

    def __init__(self, candidates: int = 50, epsilon: float = 0.1):
        self.candidates, self.epsilon = candidates, epsilon

    def fit(self, demonstrations: Sequence[Array], rollouts: Sequence[Rollout], decisions: int) -> None:
        """Implement `FailureDetector.fit`: demonstrations [L, D] each; rollouts are not read."""
        require_demonstrations(demonstrations)
        self._lengths, self._total = np.array([len(each) for each in demonstrations]), decisions
        longest = self._lengths.max()
        self._vectors = np.stack([np.pad(unit(each), ((0, longest - len(each)), (0, 0))) for each in demonstrations])

    def start(self, batch_size: int) -> None:
        """Implement `FailureDetector.start`."""
        self._seen: list[list[Array]] = [[] for _ in range(batch_size)]
        self._last: list[Array] = [np.zeros(0) for _ in range(batch_size)]

    def reset(self, rows: Array) -> None:
        """Implement `FailureDetector.reset`: rows [R]."""
        for row in rows:
            self._seen[row], self._last[row] = [], np.zeros(0)

    def watch(self, seen: Seen, rows: Array) -> Array:
        """Implement `FailureDetector.watch`: rows [R] -> [R]."""
        return np.array(
            [self._costs(row, vector).sum() for row, vector in zip(rows, unit(seen.embedding), strict=True)]
        )

    def _costs(self, row: int, vector: Array) -> Array:
        """Add a decision's unit vector [D] to a row; return the costs of its decisions so far, [n]."""
        self._seen[row].append(vector)
        prefix = np.stack(self._seen[row])
        near = np.argsort(-(self._vectors[:, 0] @ prefix[0]), kind="stable")[: self.candidates]
        costs = prefix_costs(self._vectors[near], self._lengths[near], prefix, self._total, self.epsilon)
        self._last[row] = costs[costs.sum(1).argmin()]
        return self._last[row]

    def costs(self, row: int) -> Array:
        """Return the costs [n] of a row's decisions so far, whose sum is its index; robots go back by them."""
        return self._last[row]

    def state(self) -> Mapping[str, Any]:
        """Implement `FailureDetector.state`."""
        options = {"candidates": self.candidates, "epsilon": self.epsilon, "total": self._total}
        return {**options, "vectors": self._vectors, "lengths": self._lengths}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Implement `FailureDetector.restore`."""
        self.candidates, self.epsilon, self._total = (state[name] for name in ("candidates", "epsilon", "total"))
        self._vectors, self._lengths = np.asarray(state["vectors"]), np.asarray(state["lengths"])


def unit(vectors: Array) -> Array:
    """Return vectors [..., D] scaled to length 1; a zero vector stays."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
