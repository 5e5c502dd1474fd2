"""ReBRAC: TD3+BC with the penalty for leaving the data in the critics' targets too, and normalised critics.

Source: Tarasov et al. 2023, arXiv:2305.09836. Deviation: states are standardised, as for every agent here.
"""

import torch
from torch import Tensor

from robopolicy.core.errors import DataError
from robopolicy.core.transitions import Transitions
from robopolicy.rl.offline.configuration import ReBracConfig
from robopolicy.rl.offline.td3 import Td3


class ReBrac(Td3):
    """The agent; actions are in [-1, 1].

    The critics' penalty needs what was recorded next. Where a recording goes on unseen (its last step before a time
    limit, `next_known` False) that is not known, and the target has no penalty there; where the task ended nothing
    follows, penalty or value.
    """

    config: ReBracConfig

    def __init__(self, config: ReBracConfig, state: int, action: int, seed: int):
        super().__init__(config, state, action, seed)
        self.start_small(seed)

    def begin(self, data: Transitions) -> None:
        """See `OfflineAgent`; raises DataError where no transition knows what was done next, [N, A]."""
        super().begin(data)
        goes_on = ~data.terminated
        if self.config.beta_critic and bool(goes_on.any()) and not bool((goes_on & followed(data)[1]).any()):
            raise DataError("ReBRAC: no next action is known in this data; beta_critic=0 learns without.")

    def following(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return min Q'(s', a') - beta_critic |a' - a'_data|^2, [B], for a' [B, A]; raises DataError without data."""
        value = super().following(batch, action)
        if not self.config.beta_critic:
            return value
        recorded, known = followed(batch)
        distance = (action - recorded).square().sum(-1)
        return value - self.config.beta_critic * torch.where(known, distance, 0.0)

    def actor_loss(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return the mean of beta_actor |pi - a|^2 - min Q / mean|min Q|, [], for what the actor would do, [B, A]."""
        value = self.critics(batch.state, action).min(0).values
        # Q is brought to a mean size of 1: beta_actor means the same whatever the rewards. Detached, as it is a unit.
        scale = 1 / value.abs().mean().detach().clamp_min(1e-6)
        return (self.config.beta_actor * (action - batch.action).square().sum(-1) - scale * value).mean()


def followed(batch: Transitions) -> tuple[Tensor, Tensor]:
    """Return what was done next [N, A], and where that is known [N] bool; raises DataError where it is not recorded."""
    if batch.next_action is None:
        raise DataError("ReBRAC learns from next_action, and these transitions lack it; beta_critic=0 learns without.")
    return batch.next_action, torch.ones_like(batch.terminated) if batch.next_known is None else batch.next_known
