"""An advantage of one's own: ranks within the group instead of returns."""

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


@mechanism(Slot.ADVANTAGE, "outside_ranks", source="an outside package", needs=(Need.GROUPS,))
def ranks(rollouts: Rollouts, context: Context, *, scale: float = 1.0) -> Tensor:
    """How many of its group an episode beats, minus how many beat it, [B, T], as a share of the group."""
    groups = Segments.of(rollouts.group)
    outcome = rollouts.row_return
    same = groups.index[:, None] == groups.index[None]
    better = torch.sign(outcome[:, None] - outcome[None]) * same
    share = better.sum(1) / same.sum(1).clamp(min=1)
    return torch.where(rollouts.alive, scale * share[:, None], 0.0)
