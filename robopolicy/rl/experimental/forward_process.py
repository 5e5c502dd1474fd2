"""Experimental: DiffusionNFT (arXiv:2509.16117), reinforcement learning on the forward process of a denoising policy.

    L = r |v+ - u|^2 + (1 - r) |v- - u|^2,   v+ = (1 - beta) v' + beta v,   v- = (1 + beta) v' - beta v

for a prediction v and its target u, v' the prediction of the policy that acted, and r = (1 + a) / 2 the optimality of a
chunk, a = clip(A) / limit in [-1, 1]. Its gradient by v is 2 beta a (v - u) + 2 beta (beta - a) (v - v'): times limit /
beta, the first is that of coefficient=negative_aware, and the second that of the loss here.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import ComparesPredictions
from robopolicy.core.rollouts import Rollouts
from robopolicy.nn.micro_batches import scores_of
from robopolicy.nn.sharing import copy_trainable, load_trainable_state, trainable_state
from robopolicy.rl.context import AuxiliaryInputs, Context, Tools, score_extra
from robopolicy.rl.registry import Need, Slot, mechanism


@mechanism(Slot.MODEL, "acting_policy", source="DiffusionNFT, arXiv:2509.16117", gives=(Need.ACTING_POLICY,))
class ActingPolicy:
    """A copy of the policy as it acted in this iteration.

    In the paper a moving average of the policy acts; here the newest one does.
    """

    def __init__(self, tools: Tools):
        self.policy = tools.policy
        self.copy = copy_trainable(tools.policy).requires_grad_(False).eval()

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Copy the policy, before its update; the rollouts stay."""
        load_trainable_state(self.copy, trainable_state(self.policy))
        return rollouts

    def tree(self) -> dict[str, Any]:
        """Return an empty tree: the copy is made anew in every iteration."""
        return {}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Do nothing; there is no state."""


@mechanism(
    Slot.AUXILIARY,
    "acting_velocity",
    source="DiffusionNFT, arXiv:2509.16117",
    needs=(Need.MATCHING, Need.ACTING_POLICY),
)
def acting_velocity(inputs: AuxiliaryInputs, *, beta: float = 1.0, limit: float = 5.0) -> Tensor:
    """The part of DiffusionNFT's loss that negative_aware lacks: limit (beta - a) |v - v'|^2 over scored steps [n, k].

    v' is the prediction of the policy that acted, a = clip(A, -limit, limit) / limit; limit: as in negative_aware, with
    weight=step_mean. Where a > beta it moves the policy away from the acting one. Returns a scalar. Raises ConfigError
    for policies that cannot compare predictions.
    """
    policy = inputs.policy
    if not isinstance(policy, ComparesPredictions):
        raise ConfigError(f"auxiliaries=[acting_velocity]: {type(policy).__name__} cannot compare predictions.")
    acted = next(model.copy for model in inputs.models.values() if isinstance(model, ActingPolicy))
    with torch.no_grad():
        before = score_extra(scores_of(acted, inputs.observation, inputs.latents), "mean")
    distance = policy.prediction_error(score_extra(inputs.scores, "mean"), before, inputs.latents)
    optimality = inputs.extras["advantage"].clamp(-limit, limit) / limit
    return (inputs.step_weights * torch.where(inputs.mask, limit * (beta - optimality) * distance, 0.0)).sum()
