"""Advantages from comparing episodes with the same start: (rollouts, context) -> A [B, T], constant over an episode.

Rows are whole episodes, groups are ragged. An episode whose return is not finite counts in no baseline and gets 0.
"""

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.rl.advantages import standardise
from robopolicy.rl.context import Context
from robopolicy.rl.mechanisms import Need, Slot, mechanism


def outcomes(rollouts: Rollouts) -> tuple[Tensor, Tensor, Segments]:
    """Return the episodes' returns [B], which of them count [B] bool, and the groups."""
    returns = rollouts.row_return
    counts = returns.isfinite()
    return torch.where(counts, returns, 0.0), counts, Segments.of(rollouts.group)


def broadcast(advantage: Tensor, rollouts: Rollouts) -> Tensor:
    """Give every decision of an episode its episode's advantage: [B] -> [B, T], 0 on padding."""
    return torch.where(rollouts.alive, advantage[:, None], 0.0)


@mechanism(Slot.ADVANTAGE, "grpo", source="Shao et al. 2024, arXiv:2402.03300", needs=(Need.GROUPS,))
def grpo(rollouts: Rollouts, context: Context, *, epsilon: float = 1e-6) -> Tensor:
    """A = (R - group mean) / (group std + epsilon)."""
    returns, counts, groups = outcomes(rollouts)
    centred = returns - groups.mean(returns, counts)[groups.index]
    scaled = centred / (groups.std(returns, counts)[groups.index] + epsilon)
    return broadcast(torch.where(counts, scaled, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "dr_grpo", source="Liu et al. 2025, arXiv:2503.20783", needs=(Need.GROUPS,))
def dr_grpo(rollouts: Rollouts, context: Context) -> Tensor:
    """A = R - group mean, without the standard deviation that favours very easy and very hard starts."""
    returns, counts, groups = outcomes(rollouts)
    centred = returns - groups.mean(returns, counts)[groups.index]
    return broadcast(torch.where(counts, centred, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "rloo", source="Ahmadian et al. 2024, arXiv:2402.14740", needs=(Need.GROUPS,))
def rloo(rollouts: Rollouts, context: Context) -> Tensor:
    """A = R - mean of the other episodes of the group (leave one out); 0 for a group of one."""
    returns, counts, groups = outcomes(rollouts)
    size = groups.size(counts)[groups.index]
    others = (groups.sum(returns, counts)[groups.index] - returns) / (size - 1).clamp(min=1)
    return broadcast(torch.where(counts & (size > 1), returns - others, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "reinforce_pp", source="REINFORCE++, Hu 2025, arXiv:2501.03262", needs=(Need.GROUPS,))
def reinforce_pp(rollouts: Rollouts, context: Context) -> Tensor:
    """A = R - group mean, standardised over the whole batch instead of within groups."""
    returns, counts, groups = outcomes(rollouts)
    centred = returns - groups.mean(returns, counts)[groups.index]
    return broadcast(standardise(centred, counts), rollouts)
