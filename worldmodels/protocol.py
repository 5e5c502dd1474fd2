"""The `WorldModel` contract: what learned (or oracle) dynamics must offer so that `ImaginedWorld` can be a `World`.

A world model speaks torch. Axes: B row, A action dimension. An imagined episode is a pure function of its seed and its
actions: whatever noise a model draws, it derives from the seed and the step that the latent carries, so episodes do not
depend on rows or batches, and a copied latent branches exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from robopolicy.core.spec import WorldSpec

Latent = dict[str, Tensor]
"""What a model carries from step to step, name -> [B, ...]."""


@dataclass(frozen=True)
class Imagined:
    """One imagined control step of B rows.

    observation: the new frame, key -> [B, *shape]; rewards: name -> [B]; success: [B] bool, the goal is reached;
    terminated: [B] bool, the task ended (success included, where that ends it); uncertainty: [B], in the model's units.
    """

    observation: Mapping[str, Tensor]
    rewards: Mapping[str, Tensor]
    success: Tensor
    terminated: Tensor
    uncertainty: Tensor


@runtime_checkable
class WorldModel(Protocol):
    """Predicts what actions lead to."""

    @property
    def spec(self) -> WorldSpec:
        """The spec of the world it imitates, with the reward terms that it predicts."""
        ...

    def initial(self, observation: Mapping[str, np.ndarray], seeds: np.ndarray) -> Latent:
        """Return the latent of episodes with `seeds` [R] that begin at these frames, key -> [R, *shape]."""
        ...

    def imagine(self, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
        """Advance every row by one control step with actions [B, A] in the world's units, without gradient."""
        ...
