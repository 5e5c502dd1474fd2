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


def episode_log_ratio(scored: Scored) -> Tensor:
    """Return log pi / pi_old of whole episodes, [b]: the sum over their steps, at every ratio level."""
    return scored.step_log_ratio.sum((1, 2))


def preferred(scored: Scored) -> Tensor:
    """Return which pairs (winner, loser) there are, [b, b] bool: same group, larger return."""
    returns, group = scored.rollouts.row_return, scored.rollouts.group
    return (group[:, None] == group[None]) & (returns[:, None] > returns[None] + 1e-6)


def sides(advantage: Tensor, counted: Tensor, group: Tensor) -> Tensor:
    """Return 1 for episodes whose mean advantage is above that of their group, -1 for those below, [b]; else 0.

    advantage, counted: [b, t, K], where counted is False an entry is left out, and an episode that has no other gets 0;
    group: [b].
    """
    size = counted.sum((1, 2))
    mean = torch.where(counted, advantage, 0.0).double().sum((1, 2)) / size.clamp(min=1)
    groups = Segments.of(group)
    apart = mean - groups.mean(mean, size > 0)[groups.index]
    return torch.where((apart.abs() > 1e-6) & (size > 0), apart.sign(), 0.0)


def _to_steps(per_episode: Tensor, scored: Scored) -> Tensor:
    """Give every scored step its episode's coefficient, [b] -> [b, t, K]; averaged over pairs by the caller."""
    return torch.where(scored.mask, per_episode[:, None, None], 0.0)


def _pair_mean(pairs: Tensor) -> Tensor:
    """1 / pairs, scaled by the number of episodes, so that the size does not depend on the minibatch."""
    return len(pairs) / pairs.sum().clamp(min=1)


@mechanism(Slot.COEFFICIENT, "dpo", source="DPO on one's own rollouts, arXiv:2305.18290", needs=(Need.WHOLE_GROUPS,))
def dpo(scored: Scored, *, beta: float = 0.1) -> Coefficients:
    """-log sigmoid(beta (log-ratio of the better - log-ratio of the worse)) over the pairs of every group.

    c of the better is beta sigmoid(-margin), of the worse minus that. The reference is the policy before the iteration.
    Log-ratios of steps are cut as everywhere (log_ratio_clamp), and where a step's log-probability is the mean over its
    elements (logp_reduction=mean, the default of denoising policies) beta counts an element's: sum is DPO proper.
    """
    log_ratio, pairs = episode_log_ratio(scored), preferred(scored)
    margin = beta * (log_ratio[:, None] - log_ratio[None])
    # pull[i, j] moves the winner i up and the loser j down by as much: rows sum what an episode wins, columns what it
    # loses. sigmoid(-margin) fades a pair once it is ranked rightly by far.
    pull = torch.where(pairs, beta * torch.sigmoid(-margin), 0.0) * _pair_mean(pairs)
    stats = {"pairs": pairs.sum().float()}
    if bool(pairs.any()):
        stats["preferred_right"] = ((margin > 0) & pairs).sum() / pairs.sum()
    return _to_steps(pull.sum(1) - pull.sum(0), scored), stats


@mechanism(Slot.COEFFICIENT, "sppo", source="SPPO, arXiv:2405.00675", needs=(Need.WHOLE_GROUPS,))
def sppo(scored: Scored, *, eta: float = 1.0) -> Coefficients:
    """(log-ratio - eta (P(it beats the policy) - 1/2))^2, the win rate counted among the group's other episodes.

    c = 2 (eta (P - 1/2) - log-ratio); ties count half.
    """
    returns, group = scored.rollouts.row_return, scored.rollouts.group
    same = (group[:, None] == group[None]) & ~torch.eye(len(group), dtype=torch.bool, device=group.device)
    # A win rate of 1/2 is the policy against itself: the target log-ratio is how much an episode beats that, times eta.
    wins = (returns[:, None] > returns[None] + 1e-6).float() + (returns[:, None] - returns[None]).abs().le(1e-6) * 0.5
    rate = (wins * same).sum(1) / same.sum(1).clamp(min=1)
    rate = torch.where(same.any(1), rate, 0.5)
    log_ratio = episode_log_ratio(scored)
    return _to_steps(2 * (eta * (rate - 0.5) - log_ratio), scored), {"win_rate_spread": rate.std(unbiased=False)}


@mechanism(Slot.COEFFICIENT, "p3o", source="P3O, arXiv:2310.00212", needs=(Need.WHOLE_GROUPS,))
def p3o(scored: Scored, *, clip: float = 0.2) -> Coefficients:
    """Pairwise policy gradient: (R1 - R2) / 2 grad log(pi(y1) / pi(y2)), each with its own clipped ratio.

    Unchanged by what is added to all rewards of a start. c of an episode: its ratio times the mean of (R - R_other) / 2
    over the others of its group, 0 where the ratio has gone beyond the clip in that direction.
    """
    returns, group = scored.rollouts.row_return, scored.rollouts.group
    same = (group[:, None] == group[None]) & ~torch.eye(len(group), dtype=torch.bool, device=group.device)
    # Differences of returns cancel whatever a start adds to all of them, so no baseline is needed.
    gain = ((returns[:, None] - returns[None]) / 2 * same).sum(1) / same.sum(1).clamp(min=1)
    log_ratio = episode_log_ratio(scored)
    ratio = log_ratio.clamp(-3, 3).exp()
    kept = torch.where(gain >= 0, ratio <= 1 + clip, ratio >= 1 - clip)
    return _to_steps(torch.where(kept, ratio * gain, 0.0), scored), {"kept": kept.float().mean()}


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
    pull = torch.where(pairs, beta * torch.sigmoid(-margin), 0.0) * _pair_mean(pairs)
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
