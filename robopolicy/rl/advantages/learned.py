"""Advantages of steps and decisions from what a model says about them: (rollouts, context) -> A [B, T] or [B, T, K]."""

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.rl.advantages.gae import standardise
from robopolicy.rl.advantages.group import leave_one_out
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


@mechanism(Slot.ADVANTAGE, "process_rloo", source="PRIME, arXiv:2502.01456", needs=(Need.GROUPS, Need.IMPLICIT))
def process_rloo(
    rollouts: Rollouts,
    context: Context,
    *,
    outcome: float = 1.0,
    process: float = 1.0,
    to_go: bool = True,
    whiten: bool = True,
) -> Tensor:
    """Leave-one-out of the outcome plus the return to go of leave-one-out process rewards, whitened, [B, T, K].

        A_u = sum_{s >= u} (r_s - mean over the others of their mean r) + (R - mean of the others' R)

    r: extras["process"]; R: whether the episode succeeded. outcome, process: their weights. Only groups with different
    outcomes count, as in the paper's filter: elsewhere there is nothing that the process rewards could be true to.
    to_go=false takes r_u instead of the sum: a log-ratio already is an advantage (arXiv:2404.12358), and what comes
    later is noise to it; it follows the true advantages twice as closely as the outcome does.
    """
    reward, alive = rollouts.extras["process"], rollouts.alive
    groups, every = Segments.of(rollouts.group), torch.ones_like(rollouts.group, dtype=torch.bool)
    # Leave one out on means per step, not on sums: long episodes would otherwise seem to have more process reward.
    steps = (alive.sum(1) * reward.shape[-1]).clamp(min=1)
    mean = reward.sum((1, 2)) / steps
    others = mean - leave_one_out(mean, every, groups)
    centred = torch.where(alive[..., None], reward - others[:, None, None], 0.0).flatten(1)
    following = (centred.flip(1).cumsum(1).flip(1) if to_go else centred).reshape(reward.shape)
    won = leave_one_out(rollouts.row_success.float(), every, groups)
    # Where all episodes of a start ended alike, process rewards can only restate noise: those groups get nothing.
    spread = groups.maximum(rollouts.row_return) - groups.minimum(rollouts.row_return)
    mixed = (spread > 1e-6)[groups.index]
    advantage = process * following + outcome * won[:, None, None]
    counted = (alive & mixed[:, None])[..., None].expand(reward.shape)
    if not bool(counted.any()):
        return torch.zeros_like(advantage)
    return standardise(advantage, counted) if whiten else torch.where(counted, advantage, 0.0)
