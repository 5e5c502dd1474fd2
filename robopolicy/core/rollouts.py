"""`Rollouts`: what a policy did in a world, as the learner sees it.

B streams of T decisions; a stream may hold several episodes one after the other, cut by `terminated`, `truncated` or
`horizon_end`. Each decision has K units with log-probabilities.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.policy import TensorObservation


@dataclass(frozen=True)
class Rollouts:
    """Decisions in order of time.

    observation, next_observation: key -> [B, T, H, ...], next is taken BEFORE any reset; units: name -> [B, T, ...];
    actions: [B, T, C, A]; logp_behaviour: [B, T, K] fp32 under the policy that acted; mask: [B, T, K] bool;
    rewards: name -> [B, T, C]; valid: [B, T, C]; terminated, truncated, horizon_end, success: [B, T] bool;
    extras: anything else by name, [B, T, ...].
    """

    observation: TensorObservation
    next_observation: TensorObservation
    units: Mapping[str, Tensor]
    actions: Tensor
    logp_behaviour: Tensor
    mask: Tensor
    rewards: Mapping[str, Tensor]
    valid: Tensor
    terminated: Tensor
    truncated: Tensor
    horizon_end: Tensor
    success: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return self.actions.shape[0], self.actions.shape[1]

    @property
    def ended(self) -> Tensor:
        """[B, T]: the episode did not continue into the next column; cuts advantage chains."""
        return self.terminated | self.truncated | self.horizon_end

    @property
    def duration(self) -> Tensor:
        """[B, T]: executed control steps of each decision; bootstrapping discounts by gamma ** duration."""
        return self.valid.sum(-1)

    def flat(self) -> "Rollouts":
        """Merge streams and time: every [B, T, ...] becomes [B * T, 1, ...], so rows can be drawn as minibatches."""
        return self._map(lambda tensor: tensor.flatten(0, 1).unsqueeze(1))

    def take(self, index: Tensor) -> "Rollouts":
        """Select streams by index [n]."""
        return self._map(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> "Rollouts":
        """Move every tensor."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Any) -> "Rollouts":
        def apply(value: Any) -> Any:
            if isinstance(value, Tensor):
                return function(value)
            if isinstance(value, Mapping):
                return {key: apply(item) for key, item in value.items()}
            raise TypeError(f"Rollouts hold tensors and mappings of tensors, not {type(value).__name__}.")

        return Rollouts(**{item.name: apply(getattr(self, item.name)) for item in fields(self)})
