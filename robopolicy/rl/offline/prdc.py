"""PRDC: TD3 whose actor is held to the nearest recorded action, of this state or of one like it.

Source: Ran et al. 2023, arXiv:2306.06569. Where data has the better action in a neighbouring state only, TD3+BC is held
to the worse one; here the neighbour of (beta s, pi(s)) among the recorded (beta s, a) is what pulls. Deviation: output
layers begin small, as ReBRAC's do, so that the first neighbours are not those of the corners of the box.
"""

from typing import Any, Protocol, cast

import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.errors import DataError
from robopolicy.core.transitions import Transitions
from robopolicy.rl.offline.configuration import NeighbourIndex, PrdcConfig
from robopolicy.rl.offline.td3 import Td3, climb_and_stay


class Index(Protocol):
    """Finds neighbours."""

    def query(self, x: Array, *, eps: float) -> tuple[Array, Array]:
        """Return distances [N] and rows [N] of neighbours of x [N, K], at most 1 + eps times as far as the nearest."""
        ...


def index_of(keys: Array) -> Index:
    """Return a k-d tree of keys [N, K]."""
    from scipy.spatial import cKDTree  # pyright: ignore

    return cast(Index, cKDTree(keys))


class Prdc(Td3):
    """The agent; actions are in [-1, 1]. The data is no part of what is saved: `begin` anew after `restore`."""

    config: PrdcConfig

    def __init__(self, config: PrdcConfig, state: int, action: int, seed: int):
        super().__init__(config, state, action, seed)
        self.start_small(seed)
        self.index: Index | None = None
        self.recorded: Tensor | None = None

    def begin(self, data: Transitions) -> None:
        """Take the statistics of the data's states [N, S], and build the tree of (beta s, a), [N, S + A]."""
        super().begin(data)
        self.index, self.recorded = index_of(self._keys(data.state, data.action)), data.action

    def fit_statistics(self, state: Tensor) -> None:
        """Standardise states as these [N, S] are; a tree of states that were standardised otherwise is forgotten."""
        super().fit_statistics(state)
        self.index = self.recorded = None

    def restore(self, tree: dict[str, Any]) -> None:
        """Go on from `tree`; `begin` comes after."""
        super().restore(tree)
        self.index = self.recorded = None

    def nearest(self, state: Tensor, action: Tensor) -> Tensor:
        """Return the recorded action [B, A] of the nearest neighbour of (beta s, a), states [B, S], actions [B, A].

        Raises DataError before `begin`.
        """
        if self.index is None or self.recorded is None:
            raise DataError("PRDC looks for neighbours in its data: call begin(data) first, after restore too.")
        slack = self.config.slack if self.config.index is NeighbourIndex.APPROXIMATE else 0.0
        _, found = self.index.query(self._keys(state, action), eps=slack)
        return self.recorded[torch.as_tensor(found, device=self.recorded.device)]

    def actor_loss(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return -alpha Q1 / mean|Q1| + (pi - a_near)^2, [], for what the actor would do, [B, A]; means over all."""
        near = self.nearest(batch.state, action)
        return climb_and_stay(self.critics(batch.state, action)[0], action, near, self.config.alpha)

    @torch.no_grad()
    def _keys(self, state: Tensor, action: Tensor) -> Array:
        keys = torch.cat([self.config.beta * self.actor.state(state), action], -1)
        return cast(Array, keys.cpu().numpy())  # pyright: ignore[reportUnknownMemberType]
