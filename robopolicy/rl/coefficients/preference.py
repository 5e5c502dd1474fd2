"""Preferences between episodes with the same start, as coefficients: the better return is preferred.

Minibatches hold whole episodes and, for there to be pairs, whole groups: minibatch_episodes at least a few
times group_size. An episode's log-ratio is the sum over its scored steps, whatever ratio_level is, to the policy at the
start of the iteration (of `tpo`: to the frozen reference).
"""

import torch
from torch import Tensor

from robopolicy.core.segments import Segments
from robopolicy.rl.context import Coefficients, Scored
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option


def sides(advantage: Tensor, counted: Tensor, group: Tensor) -> Tensor:
    """Return 1 for episodes whose mean advantage is above that of their group, -1 for those below, [b]; else 0.

    advantage, counted: [b, t, K], where counted is False an entry is left out, and an episode that has no other gets 0;
    group: [b].
    """
    size = counted.sum((1, 2))
    # In double precision: equal advantages must have equal means, or rounding would make pairs of ties.
    mean = torch.where(counted, advantage, 0.0).double().sum((1, 2)) / size.clamp(min=1)
    groups = Segments.of(group)
    apart = mean - groups.mean(mean, size > 0)[groups.index]
    return torch.where((apart.abs() > 1e-6) & (size > 0), apart.sign(), 0.0)


def pair_mean(pairs: Tensor) -> Tensor:
    """Return 1 / pairs [b, b], scaled by b, the number of episodes: the size does not depend on the minibatch."""
    return len(pairs) / pairs.sum().clamp(min=1)


@mechanism(
    Slot.COEFFICIENT,
    "tpo",
    source="GRAPE (trajectory-wise preference optimization), arXiv:2411.19309",
    needs=(Need.WHOLE_GROUPS, Need.BASE, Need.REFERENCE_SCORES),
)
def tpo(scored: Scored, *, beta: float = 0.1, reduction: str = "sum") -> Coefficients:
    """-log sigmoid(m), m = beta (sum of log pi / pi_ref over the chosen episode - the same over the rejected one).

    Chosen are episodes whose mean advantage is above their group's, over those below; the loss is the mean over these
    pairs. dm / dlog pi(step) is beta in the chosen and -beta in the rejected episode, and the derivative of
    -log sigmoid(m) is -sigmoid(-m): so c = beta sigmoid(-m) on every step of the chosen episode, minus that on the
    rejected one's, and steps whose advantage is 0 count on neither side (what branches share cancels). weight=constant
    with length=1 makes this the loss exactly. pi_ref is the base policy, which replay=preferences replaces by the
    policy as it is when a round begins. reduction: sum, as in the paper, or mean over an episode's counted steps. A sum
    grows with T decisions times K steps: the longer a chain, the sooner a pair counts as told apart and fades, at a
    change of some 1 / (beta T K) a step; so scale beta down with T K, or take the mean, where beta is to be about T K
    times larger. Nothing is clipped and nothing overflows: log-ratios are summed in fp64 and only ever meet a sigmoid.
    Where a policy's steps are means over their elements (logp_reduction=mean) beta counts an element's.
    """
    if reduction not in ("sum", "mean"):
        raise unknown_option("tpo.reduction", reduction, ("sum", "mean"))
    reference = scored.rollouts.extras["reference_logp"].gather(-1, scored.chosen)
    counted = scored.mask & (scored.advantage != 0)
    change = torch.where(counted, scored.logp - reference, 0.0).double().sum((1, 2))
    share = 1 / counted.sum((1, 2)).clamp(min=1) if reduction == "mean" else torch.ones_like(change)
    change = change * share
    group = scored.rollouts.group
    side = sides(scored.advantage, counted, group)
    pairs = (group[:, None] == group[None]) & (side[:, None] > 0) & (side[None] < 0)
    margin = beta * (change[:, None] - change[None])
    pull = torch.where(pairs, beta * torch.sigmoid(-margin), 0.0) * pair_mean(pairs)
    # Row sums: what an episode wins as the chosen one; column sums: what it loses as the rejected one.
    per_episode = ((pull.sum(1) - pull.sum(0)) * share).to(scored.logp.dtype)
    stats = {"pairs": pairs.sum().float()}
    if bool(pairs.any()):
        stats |= {
            "preferred_right": ((margin > 0) & pairs).sum() / pairs.sum(),
            "margin": margin[pairs].mean(),
            "chosen_log_ratio": change[side > 0].mean(),
            "rejected_log_ratio": change[side < 0].mean(),
        }
    steps = torch.where(counted, per_episode[:, None, None], 0.0)
    return steps, {name: value.float() for name, value in stats.items()}
