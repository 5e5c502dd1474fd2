"""Experimental preferences: between siblings of a tree, and against one's own failures."""

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.segments import Segments
from robopolicy.rl.advantages.tree import in_sampling_steps, owners
from robopolicy.rl.coefficients import ppo
from robopolicy.rl.context import Coefficients, Scored
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option


def extremes(past: Tensor, own_mask: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best and the worst sibling of every fork, [B] bool each; past: [B], equal for siblings."""
    forks = Segments.of(past)
    best, worst = (own_mask & (forks.rank(sign * value, own_mask) == 0) for sign in (-1, 1))
    return best, worst


@mechanism(
    Slot.COEFFICIENT,
    "siblings",
    source="TP-LLaMA, arXiv:2406.07115; MCTS-DPO, arXiv:2405.00451",
    needs=(Need.WHOLE_GROUPS, Need.BASE, Need.REFERENCE_SCORES),
)
def siblings(scored: Scored, *, beta: float = 0.1, pairs: str = "outcome", smooth: bool = False) -> Coefficients:
    """-log sigmoid(m), m = beta (D_good - D_bad) over the pairs of siblings of which one led to a success.

    Siblings are chunks with the same past (finetune.branch_at; first chunks of a group too). The good one has a success
    below it, the bad one none; D is the sum of log pi / pi_ref over the steps of that chunk alone, pi_ref the base
    policy. So c = beta sigmoid(-m) on the good chunk and its negative on the bad one; the loss is the mean over pairs,
    exactly with weight=constant and length=1.
    Deviations from TP-LLaMA: the paper takes one pair a fork of successful paths, here all are taken, and it imitates
    the paths first. pairs=values: instead the best and the worst sibling of each fork by the mean return of the
    episodes below them. smooth: the label is uncertain by s = N_bad / (N_good + N_bad), at most 1/2, with N the numbers
    of these episodes: -(1 - s) log sigmoid(m) - s log sigmoid(-m), so c = beta (sigmoid(-m) - s). A pair with equally
    many prefers neither, so the search has to go on where it is promising. MCTS-DPO: both, with allocator=tree_search.
    Raises ConfigError for episodes that branch inside a policy call, and for unknown pairs.
    """
    if pairs not in ("outcome", "values"):
        raise unknown_option("siblings.pairs", pairs, ("outcome", "values"))
    rollouts, mask = scored.rollouts, scored.mask
    if in_sampling_steps(rollouts):
        raise ConfigError(
            "coefficient=siblings compares complete action chunks: set branch_sampling_step=null, so that episodes "
            "branch between policy calls."
        )
    reference = rollouts.extras["reference_logp"].gather(-1, scored.chosen)
    change = torch.where(mask, scored.logp - reference, 0.0).double().sum(-1)
    owner, row = owners(rollouts), torch.arange(len(mask), device=mask.device)
    same_past = rollouts.group[:, None] == rollouts.group[None]
    pull = torch.zeros_like(change)
    past = rollouts.group
    count, right = 0, 0
    for column in range(mask.shape[1]):
        owners_here = owner[:, column]
        won = torch.zeros_like(rollouts.row_success).index_fill(0, owners_here[rollouts.row_success], True)
        own_mask = (owners_here == row) & rollouts.alive[:, column]
        good, bad = own_mask & won, own_mask & ~won
        leaves = torch.bincount(owners_here, minlength=len(mask)).double()
        if pairs == "values":
            total = torch.zeros_like(leaves).index_add_(0, owners_here, rollouts.row_return.double())
            value = total / leaves.clamp(min=1)
            good, bad = extremes(past, own_mask, value)
            same_past = same_past & (value[:, None] > value[None] + 1e-6)
        pair = same_past & good[:, None] & bad[None]
        margin = beta * (change[:, column, None] - change[None, :, column])
        doubt = (leaves[None] / (leaves[:, None] + leaves[None]).clamp(min=1)).clamp(max=0.5) if smooth else 0.0
        weight = torch.where(pair, beta * (torch.sigmoid(-margin) - doubt), 0.0)
        pull[:, column] = weight.sum(1) - weight.sum(0)
        count, right = count + int(pair.sum()), right + int(((margin > 0) & pair).sum())
        past, same_past = owners_here, owners_here[:, None] == owners_here[None]
    stats = {"pairs": torch.tensor(float(count))}
    if count:
        stats["preferred_right"] = torch.tensor(right / count)
    per_chunk = (pull * len(mask) / max(1, count)).to(scored.logp.dtype)
    return torch.where(mask, per_chunk[..., None], 0.0), stats


@mechanism(
    Slot.COEFFICIENT,
    "away",
    source="SEAgent, arXiv:2508.04700",
    needs=(Need.WHOLE_EPISODES, Need.BASE, Need.REFERENCE_SCORES),
)
def away(scored: Scored, *, weight: float = 0.2) -> Coefficients:
    """PPO in successful episodes; failed ones are pushed away from, -log sigmoid(-log(pi / pi_ref)) at every step.

    c = -weight sigmoid(log(pi / pi_ref)) in a failure, between -weight and 0: the further a step already is below the
    base policy, the weaker the push, so that Gaussian steps do not run away as with A = -1. A failure's advantage is
    not used. The paper's curriculum, tasks that a language model invents and judges, has no counterpart.
    """
    reference = scored.rollouts.extras["reference_logp"].gather(-1, scored.chosen)
    push = -weight * torch.sigmoid((scored.logp - reference).to(scored.logp.dtype))
    c = ppo(scored.log_ratio, scored.advantage, scored.clip_low, scored.clip_high, scored.clamped)
    c = torch.where(scored.rollouts.row_success[:, None, None], c, push)
    return torch.where(scored.mask, c, 0.0), {"away": -push[scored.mask].mean()}
