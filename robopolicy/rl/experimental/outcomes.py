"""Experimental rewards that depend on other episodes: lengths of successes, spreads, likeness; and bent outcomes."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from robopolicy.core.arrays import integers
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.rollouts import Rollouts, sum_of_rewards, tensor_of
from robopolicy.core.segments import Segments
from robopolicy.rl.advantages.tree import in_sampling_steps, subtree_means
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option
from robopolicy.rl.rewards import paid_at_end, success_only


@mechanism(Slot.REWARD, "within_budget", source="PALU, arXiv:2510.10168", needs=(Need.GROUPS, Need.STARTS))
def within_budget(
    rollouts: Rollouts,
    context: Context,
    *,
    target: float = 0.8,
    quantile: float = 0.5,
    keep: tuple[str, ...] = ("uncertainty",),
) -> Rollouts:
    """A success counts only within L control steps, a budget of its initial state that follows its success rate.

    After each visit, if at least `target` of the episodes succeeded within L, L falls by the distance of the longest of
    these successes to their `quantile` (the authors' 1 - tau); else it returns to the longest episode of the run so
    far. The policy does not observe L, it only learns to be quick. Of the world's rewards only `keep` stays. Source:
    two public reviews of the paper. Raises ConfigError for a target or a quantile outside [0, 1].
    """
    if not (0 <= target <= 1 and 0 <= quantile <= 1):
        raise ConfigError(f"options.within_budget: target={target:g} and quantile={quantile:g} must be in [0, 1].")
    first = (rollouts.success & rollouts.alive).long().argmax(1, keepdim=True)
    steps = rollouts.duration.cumsum(1).gather(1, first)[:, 0]
    budgets: dict[str, float] = context.memory.setdefault("within_budget", {})
    budgets["longest"] = longest = max(budgets.get("longest", 0.0), float(rollouts.duration.sum(1).max()))
    start = rollouts.extras["start"][:, 0]
    within = torch.zeros_like(rollouts.row_success)
    for number in sorted(set(integers(start))):
        rows = start == number
        budget = min(budgets.get(str(number), longest), longest)
        within |= rows & rollouts.row_success & (steps <= budget)
        lengths = steps[within & rows].double()
        if len(lengths) and len(lengths) >= target * int(rows.sum()):
            budgets[str(number)] = budget - float(lengths.max() - lengths.quantile(quantile))
        else:
            budgets[str(number)] = longest
    rewards = success_only(rollouts, context, keep=keep).rewards
    return replace(rollouts, rewards={**rewards, "success": rewards["success"] * within[:, None, None]})


@mechanism(Slot.REWARD, "spread_weights", source="POW3R, arXiv:2605.20164", needs=(Need.GROUPS,))
def spread_weights(
    rollouts: Rollouts,
    context: Context,
    *,
    weights: Mapping[str, float] | None = None,
    categories: Mapping[str, str] | None = None,
) -> Rollouts:
    """Give the weight of reward terms on which a group agrees to those that tell its episodes apart.

        w'_j = w_j d_j sum(w) / sum(w d)   over the terms of the same category

    d_j: deviation of the term's sums inside the group. A category keeps its total weight; one in which all d are 0
    keeps its weights. weights: term -> w, 1 by default; categories: term -> category, one for all by default. The
    paper's form was not found; this one is ours. Raises ConfigError for the name of an unknown term.
    """
    for name in {**(weights or {}), **(categories or {})}:
        if name not in rollouts.rewards:
            raise ConfigError(
                f"options.spread_weights: there is no reward '{name}'.{did_you_mean(name, rollouts.rewards)}"
            )
    groups = Segments.of(rollouts.group)
    spread = {
        name: groups.std(sum_of_rewards({name: reward}, rollouts.valid).sum(1))
        for name, reward in rollouts.rewards.items()
    }
    kind = {name: (categories or {}).get(name, "") for name in rollouts.rewards}
    before = {name: (weights or {}).get(name, 1.0) for name in rollouts.rewards}
    rewards: dict[str, Tensor] = {}
    for name, reward in rollouts.rewards.items():
        members = [other for other in rollouts.rewards if kind[other] == kind[name]]
        total = torch.stack([before[other] * spread[other] for other in members]).sum(0)
        shifted = before[name] * spread[name] * sum(before[other] for other in members) / total.clamp(min=1e-12)
        weight = torch.where(total > 1e-9, shifted, before[name])[groups.index]
        rewards[name] = reward * weight[:, None, None]
    return replace(rollouts, rewards=rewards)


@mechanism(Slot.REWARD, "bent", source="TempSamp-R1, arXiv:2509.18056", needs=(Need.EPISODES,))
def bent(rollouts: Rollouts, context: Context, *, threshold: float = 0.8, alpha: float = 1.0) -> Rollouts:
    """Compress returns above a threshold and stretch those below: R' for returns R in [0, 1], paid at the end.

        R' = tau + .01 log(R - tau + 1)                        where R >= tau
        R' = tau - (exp(alpha (tau - R)) - 1) / (exp(alpha) - 1)   elsewhere

    With outcomes of 0 and 1 standardised in groups it changes nothing: it is for graded rewards (partial_credit), or
    advantages without division. Adds R' - R as the term "bent". Source: a public re-implementation.
    """
    returns = rollouts.row_return.double()
    above = threshold + 0.01 * (returns - threshold + 1).clamp(min=1).log()
    below = threshold - torch.expm1(alpha * (threshold - returns).clamp(min=0)) / math.expm1(alpha)
    value = torch.where(returns >= threshold, above, below)
    return replace(rollouts, rewards={**rollouts.rewards, "bent": paid_at_end(rollouts, value - returns)})


def spread_back(change: Tensor, least: float, decay: float, reach: int) -> Tensor:
    """Replace small changes [B, T], |d| < least, by decay^(q - t) d_q of the next large one, at most `reach` chunks
    later; where there is none they stay.
    """
    large = torch.zeros_like(change[:, 0])
    distance = torch.full_like(large, reach + 1.0)
    columns: list[Tensor] = []
    for column in change.unbind(1)[::-1]:
        distance = torch.where(column.abs() >= least, 0.0, distance + 1)
        large = torch.where(distance == 0, column, large)
        columns.append(torch.where(distance <= reach, decay**distance * large, column))
    return torch.stack(columns[::-1], 1)


@mechanism(Slot.REWARD, "verified_steps", source="VSRM, arXiv:2508.10293", needs=(Need.GROUPS,))
def verified_steps(
    rollouts: Rollouts,
    context: Context,
    *,
    by: str = "completions",
    weight: float = 1.0,
    least: float = 1e-5,
    decay: float = 0.7,
    reach: int = 4,
) -> Rollouts:
    """Add the change of the chance of success at every chunk, d_t = p_t - p_(t-1), and spread changes back.

    Where |d_t| < least, d_t = decay^(q - t) d_q of the next chunk q with |d_q| >= least, at most `reach` chunks later,
    all three as in the authors' code. It is for advantages of single chunks (gae, step_groups): over an episode the
    changes sum up to its outcome minus the group's rate, beside what is spread. by: completions, p_t is the mean
    success of the episodes that continue after chunk t, which branch there (finetune.branch_at, branch_width); or
    values, V of the next state by models=[q_ensemble] with target=monte_carlo. Before the first chunk p is the group's
    success rate. Raises ConfigError for an unknown `by`, for values without the model, and for branches inside policy
    calls.
    """
    if by not in ("completions", "values"):
        raise unknown_option("verified_steps.by", by, ("completions", "values"))
    success, alive = rollouts.row_success.float(), rollouts.alive
    groups = Segments.of(rollouts.group)
    before = groups.mean(success)[groups.index][:, None]
    if by == "values":
        if rollouts.extras.v is None:
            raise ConfigError("options.verified_steps.by=values needs the values of models=[q_ensemble].")
        values = rollouts.extras.v.clamp(0, 1)
        after = torch.cat([values[:, 1:], success[:, None]], 1)
        last = torch.cat([~alive[:, 1:], torch.ones_like(alive[:, :1])], 1)
        chance = torch.where(last, success[:, None], after)
        before = values[:, :1]
    elif in_sampling_steps(rollouts):
        raise ConfigError(
            "rewards=[verified_steps] reads branches between policy calls: set branch_sampling_step=null."
        )
    else:
        chance, _ = subtree_means(rollouts, success)
    change = torch.where(alive, chance - torch.cat([before, chance[:, :-1]], 1), 0.0)
    reward = torch.zeros_like(rollouts.valid, dtype=torch.float32)
    place = (rollouts.duration - 1).clamp(min=0)
    amount = weight * torch.where(alive, spread_back(change, least, decay, reach), 0.0)
    term = reward.scatter(-1, place[..., None], amount[..., None].float())
    return replace(rollouts, rewards={**rollouts.rewards, "verified": term})


def final_states(rollouts: Rollouts) -> Tensor:
    """Return the vector fields after every episode's last chunk, [B, D], in units of their deviation over the batch.

    Fields that do not vary are 0.
    """
    row, last = torch.arange(len(rollouts.group), device=rollouts.group.device), rollouts.alive.sum(1) - 1
    fields = [tensor_of(rollouts.next_observation, key)[row, last, -1] for key in sorted(rollouts.next_observation)]
    final = torch.cat([field.flatten(1) for field in fields if field.dtype.is_floating_point], 1)
    centred = final - final.mean(0)
    spread = centred.square().mean(0).sqrt()
    return torch.where(spread > 1e-6, centred / spread.clamp(min=1e-6), 0.0)


def likeness_to_others(final: Tensor, group: Tensor, wording: Tensor, width: float) -> Tensor:
    """Return the mean of exp(-d^2 / (2 width^2)) to the episodes of the same group with other words, [B]; 0 if none.

    final: [B, D]; group, wording: [B].
    """
    near = torch.exp(-0.5 * (torch.cdist(final, final) / width).square())
    other_words = (group[:, None] == group[None]) & (wording[:, None] != wording[None])
    return torch.where(other_words, near, 0.0).sum(1) / other_words.sum(1).clamp(min=1)


@mechanism(
    Slot.REWARD,
    "agreement",
    source="PS-GRPO, arXiv:2510.04392",
    needs=(Need.GROUPS, Need.STARTS, Need.PARAPHRASES),
)
def agreement(rollouts: Rollouts, context: Context, *, weight: float = 1.0, width: float = 1.0) -> Rollouts:
    """Reward episodes that end like those of their group that were played under other words for the same goal.

    Declaring the need makes the episodes of a group rotate through the wordings of their instruction. Adds weight times
    the mean likeness, exp(-d^2 / (2 width^2)) of final states in units of their deviation over the batch, as the term
    "agreement" beside the outcome. Deviation: likeness of final states in the place of texts, and of all others of the
    group, where the paper samples some.
    """
    like = likeness_to_others(final_states(rollouts), rollouts.group, rollouts.task[:, 0], width)
    return replace(rollouts, rewards={**rollouts.rewards, "agreement": paid_at_end(rollouts, weight * like)})


def consensus_reward(final: Tensor, groups: Segments, gamma: float) -> Tensor:
    """Return exp(-gamma * sum of deviations) exp(-|x - m|^2 / 2), [B], of final states x [B, D] and group means m."""
    columns = final.unbind(1)
    mean = torch.stack([groups.mean(column)[groups.index] for column in columns], 1)
    deviation = torch.stack([groups.std(column)[groups.index] for column in columns], 1).sum(1)
    return (-gamma * deviation - 0.5 * (final - mean).square().sum(1)).exp()


@mechanism(Slot.REWARD, "consensus", source="URPA, arXiv:2508.06317", needs=(Need.GROUPS,))
def consensus(rollouts: Rollouts, context: Context, *, gamma: float = 1.0, weight: float = 0.5) -> Rollouts:
    """Reward episodes that end where their group ends on average, without labels: adds the term "consensus".

        weight exp(-gamma sum of deviations) exp(-|x - m|^2 / 2)

    x: final state in units of its deviation over the batch; m: its mean over the group. URPA learns from the agreement
    of predictions for unlabelled videos; for a robot it pays agreement in failing too, so use it beside an outcome. Its
    reward for the format of an answer is a constant here, and left out.
    """
    amount = weight * consensus_reward(final_states(rollouts), Segments.of(rollouts.group), gamma)
    return replace(rollouts, rewards={**rollouts.rewards, "consensus": paid_at_end(rollouts, amount)})
