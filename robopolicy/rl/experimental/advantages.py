"""Experimental advantage estimators of episodes and of action chunks: (rollouts, context) -> A [B, T] or [B, T, K].

Groups may differ in size; an episode whose return is not finite is excluded from all baselines and gets 0.
"""

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.returns import discounted_sums
from robopolicy.core.rollouts import Rollouts, sum_of_rewards
from robopolicy.core.segments import Segments, quantile
from robopolicy.rl.advantages.gae import standardise
from robopolicy.rl.advantages.group import broadcast, group_normalised, outcomes
from robopolicy.rl.advantages.step import group_baseline, returns_to_go, state_keys, step_groups
from robopolicy.rl.advantages.tree import as_steps, node_leaders, nodes_alive, per_decision, subtree_values
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


@mechanism(Slot.ADVANTAGE, "reinforce_pp", source="REINFORCE++, Hu 2025, arXiv:2501.03262", needs=(Need.GROUPS,))
def reinforce_pp(rollouts: Rollouts, context: Context) -> Tensor:
    """A = R - group mean, standardised over the whole batch instead of within groups.

    R [B]: the episodes' returns. Returns A [B, T], constant over an episode.
    """
    returns, counts, groups = outcomes(rollouts)
    centred = returns - groups.mean(returns, counts)[groups.index]
    return broadcast(standardise(centred, counts), rollouts)


@mechanism(Slot.ADVANTAGE, "w_reinforce", source="PSR/NSR, Zhu et al. 2025, arXiv:2506.01347", needs=(Need.EPISODES,))
def w_reinforce(rollouts: Rollouts, context: Context, *, positive: float = 0.1, negative: float = 1.0) -> Tensor:
    """A = positive for a success, -negative for a failure: by default mostly learning from failures, which preserves
    diversity.

    positive=0 is NSR, negative=0 PSR with positive=1; both 1 is plain REINFORCE on signs. Episodes of weight 0 still
    count in the mean of the loss. For complete episodes, with or without groups. Returns A [B, T], constant over an
    episode.
    """
    returns = rollouts.row_return
    sign = torch.where(rollouts.row_success, torch.full_like(returns, positive), torch.full_like(returns, -negative))
    return broadcast(sign, rollouts)


@mechanism(Slot.ADVANTAGE, "bnpo", source="BNPO, Xiao et al. 2025, arXiv:2506.02864", needs=(Need.GROUPS,))
def bnpo(rollouts: Rollouts, context: Context, *, ranges: dict[str, tuple[float, float]] | None = None) -> Tensor:
    """A = (R - p) / Beta(p; a, b), with p the group's mean of a reward R in [0, 1] and a Beta fitted to all groups'
    means.

    The method of moments gives (a0, b0) from these means (at least two are needed); a = 1 + a0 / 3, b = 1 + b0 / 3,
    each at least 1. R is success. ranges: use several rewards instead, by name, with the minimum and maximum sum per
    episode. Each is scaled to [0, 1] and normalised separately, and A is the mean over them, as in the paper. Returns A
    [B, T], constant over an episode. Raises ConfigError for an unknown reward or one outside its range.
    """
    groups = Segments.of(rollouts.group)
    if not ranges:
        return broadcast(_beta_normalised(rollouts.row_success.double(), groups).float(), rollouts)
    total = torch.zeros(len(rollouts.group), dtype=torch.float64, device=rollouts.group.device)
    for name, (lowest, highest) in ranges.items():
        if name not in rollouts.rewards:
            raise ConfigError(f"ranges: there is no reward '{name}'.{did_you_mean(name, rollouts.rewards)}")
        totals = sum_of_rewards({name: rollouts.rewards[name]}, rollouts.valid).sum(1).double()
        value = (totals - lowest) / (highest - lowest)
        if not bool(((value > -1e-6) & (value < 1 + 1e-6)).all()):
            raise ConfigError(
                f"ranges[{name!r}]=({lowest:g}, {highest:g}) does not contain the actual episode sums, "
                f"{float(totals.min()):g} to {float(totals.max()):g}."
            )
        total = total + _beta_normalised(value.clamp(0, 1), groups)
    return broadcast((total / len(ranges)).float(), rollouts)


def _beta_normalised(reward: Tensor, groups: Segments) -> Tensor:
    """Return (reward - p) / Beta(p; a, b), [B], of rewards [B] in [0, 1]."""
    rate = groups.mean(reward)
    p = rate[groups.index]
    if groups.count < 2:
        return reward - p
    # Method of moments: a Beta of this mean and variance has a0 + b0 = mean (1 - mean) / variance - 1. Dividing by its
    # density at p gives starts with common success rates smaller advantages than rare ones. The bounds only keep what
    # is multiplied by 0 anyway finite: at p = 0 and p = 1 all rewards are p.
    mean, variance = rate.mean().clamp(1e-3, 1 - 1e-3), rate.var().clamp(min=1e-6)
    strength = (mean * (1 - mean) / variance - 1).clamp(min=0)
    a, b = 1 + mean * strength / 3, 1 + (1 - mean) * strength / 3
    bounded = p.clamp(1e-3, 1 - 1e-3)
    normaliser = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
    density = ((a - 1) * bounded.log() + (b - 1) * (1 - bounded).log() - normaliser).exp()
    return (reward - p) / density.clamp(min=1e-6)


@mechanism(Slot.ADVANTAGE, "risk_po", source="RiskPO, arXiv:2510.00911", needs=(Need.GROUPS,))
def risk_po(
    rollouts: Rollouts,
    context: Context,
    *,
    bundle: int = 5,
    low: float = 0.2,
    high: float = 0.8,
    tail: float = 1.5,
    rate: float = 0.1,
    scale: bool = True,
) -> Tensor:
    """Advantages of bundles of initial states from the middle range and lower tail of returns; solved ones have no
    further effect.

        X = sum of the returns of the j-th episodes of `bundle` groups,   A = (range + tail * worst) / (1 + tail)
        range = [(X - q_low)+ - (X - q_high)+ + q_low - q_high] / (high - low),   worst = -(q_low - X)+ / low

    A, divided by the bundle's standard deviation if `scale`, applies to all episodes that X sums; a bundle of equal
    sums has no deviation, and its A is not divided, since it is not centred as GRPO's is. The quantiles of X at the
    levels low and high, in (0, 1), are tracked over the run, starting from those of the first batch. The update by
    later ones is stochastic approximation, q += rate (level - fraction of X < q). Remaining groups form a smaller
    bundle; episodes beyond the size of a bundle's smallest group get 0. The authors' scripts differ in how a sum's A is
    shared: divided by the deviation of each episode's own group (high=.9, easy questions), or in proportion to its
    return minus that group's mean (high=.8, hard ones); here it is their code's default, all the same. Returns A [B,
    T], constant over an episode and never positive. For tokens, as in the paper, this reweights what is repeated; a
    Gaussian step is moved away from everything but the best.
    """
    returns, counts, groups = outcomes(rollouts)
    # Number of an episode within its group, in the order of play.
    place = groups.rank(torch.arange(len(returns), device=returns.device).double(), counts)
    part = groups.index // bundle
    bundles = Segments.of(part)
    used_mask = counts & (place < bundles.minimum(groups.size(counts)[groups.index].double())[bundles.index])
    papers = Segments.of(part, place)
    score = papers.sum(returns, used_mask)[papers.index]
    first = used_mask & (papers.rank(groups.index.double(), used_mask) == 0)  # one entry a sum
    scores = score[first]
    quantiles: list[float] = context.memory.get("risk_po", [])
    q_low, q_high = quantiles or [float(quantile(scores, level)) for level in (low, high)]
    below_low, below_high = (float((scores < bound).float().mean()) for bound in (q_low, q_high))
    # A quantile rises while fewer than its level lie below it. The first batch, whose own they are, moves none.
    rate = rate if quantiles else 0.0
    context.memory["risk_po"] = [q_low + rate * (low - below_low), q_high + rate * (high - below_high)]
    middle = (score - q_low).clamp(min=0) - (score - q_high).clamp(min=0) + q_low - q_high
    value = (middle / (high - low) - tail * (q_low - score).clamp(min=0) / low) / (1 + tail)
    if scale:
        spread = bundles.std(score, first, unbiased=True)
        varied = (bundles.size(first) > 1) & (spread > 1e-6)
        value = value / torch.where(varied, spread + 1e-6, 1.0)[bundles.index]
    return broadcast(torch.where(used_mask, value, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "opob", source="VCPO, arXiv:2602.17616", needs=(Need.GROUPS, Need.CURRENT_SCORES))
def opob(rollouts: Rollouts, context: Context, *, scale: bool = True, epsilon: float = 1e-6) -> Tensor:
    """A = R - b with the baseline of least variance on off-policy data, divided by the group's deviation if `scale`.

        b = sum w^2 g^2 R / sum w^2 g^2   over a group

    w: an episode's probability under the policy before the update divided by that under the one that acted, not
    clipped (1 on fresh data, where b is the classic baseline of least variance); g^2: the squared norm of the gradient
    of its log-probability, here the sum of extras["score_norm"] over its steps, which is by logits or means and not by
    weights. A group without gradient gets its mean. The paper's other half is controllers=[vcpo]. Returns A [B, T],
    constant over an episode.
    """
    returns, counts, groups = outcomes(rollouts)
    extras = rollouts.extras
    change = torch.where(rollouts.mask, extras["current_logp"] - rollouts.logp_behaviour, 0.0).double().sum((1, 2))
    # Divided by the largest of the group, which cancels in b: squares of ratios of whole episodes overflow.
    ratio = (change - groups.maximum(change, counts)[groups.index]).exp()
    size = torch.where(rollouts.mask, extras["score_norm"], 0.0).double().sum((1, 2))
    weight = ratio.square() * size
    total = groups.sum(weight, counts)
    weighted = groups.sum(weight * returns, counts) / total.clamp(min=1e-300)
    baseline = torch.where(total > 0, weighted, groups.mean(returns.double(), counts))
    advantage = returns - baseline.to(returns.dtype)[groups.index]
    if scale:
        advantage = advantage / (groups.std(returns, counts)[groups.index] + epsilon)
    return broadcast(torch.where(counts, advantage, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "sas", source="DCPO, arXiv:2509.02333", needs=(Need.GROUPS, Need.STARTS))
def sas(rollouts: Rollouts, context: Context, *, epsilon: float = 1e-6) -> Tensor:
    """DCPO's smooth advantage standardisation: within the group, and over all episodes of its initial state so far.

    A = the one of smaller magnitude of [(i - 1) A_new + A_all] / i and [A_new + (i - 1) A_all] / i

    at the i-th visit of an initial state. A_new uses mean and standard deviation of the group, A_all those of all
    groups of that initial state, including this one; either is 0 if its deviation is 0. A group with identical outcomes
    then still gets an advantage from previous visits. Returns A [B, T], constant over an episode.
    """
    returns, counts, groups = outcomes(rollouts)
    mean, std = groups.mean(returns, counts), groups.std(returns, counts, unbiased=True)
    past: dict[str, list[float]] = context.memory.setdefault("sas", {})
    starts = groups.maximum(rollouts.extras["start"][:, 0].double())
    statistics: list[list[float]] = []
    for number in range(groups.count):
        start = str(int(starts[number]))
        visits, old_mean, old_std = past.get(start, [0.0, 0.0, 0.0])
        new_mean = float(mean[number])
        new_std = float(std[number])
        times = visits + 1
        # Means and variances of groups are pooled with equal weights, as in the authors' code.
        variance = (visits * old_std**2 + new_std**2 + visits / times * (new_mean - old_mean) ** 2) / times
        past[start] = [times, (visits * old_mean + new_mean) / times, variance**0.5]
        statistics.append(past[start])
    visit, mean_all, std_all = torch.tensor(statistics, dtype=returns.dtype, device=returns.device)[
        groups.index
    ].unbind(1)

    def standardised(centre: Tensor, spread: Tensor) -> Tensor:
        return torch.where(spread > epsilon, (returns - centre) / spread.clamp(min=epsilon), 0.0)

    new, over_all = standardised(mean[groups.index], std[groups.index]), standardised(mean_all, std_all)
    first, second = ((visit - 1) * new + over_all) / visit, (new + (visit - 1) * over_all) / visit
    smaller = torch.where(first.abs() < second.abs(), first, second)
    return broadcast(torch.where(counts, smaller, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "hgpo", source="HGPO, arXiv:2602.22817", needs=(Need.GROUPS,))
def hgpo(
    rollouts: Rollouts,
    context: Context,
    *,
    context_length: int = 2,
    alpha: float = 1.0,
    resolution: float | None = None,
) -> Tensor:
    """Step groups of increasing context: compare chunks that share the last 1, 2, ... states; longer contexts weigh
    more.

    A = sum_k w_k A_k over the k = 1, ..., context_length + 1 last states where A_k is not 0, with w_k proportional to
    (k + 1)^alpha. A chunk that is alone at every level gets 0; one with a shorter history is left out of the longer
    contexts. resolution: as in `state_keys`. Returns A [B, T].
    """
    to_go = returns_to_go(rollouts, context.discount)
    state, length = state_keys(rollouts, resolution), rollouts.shape[1]
    time = torch.arange(length, device=state.device)
    keys = [per_decision(rollouts.group, rollouts)]
    total, weight = torch.zeros_like(to_go.flatten()), torch.zeros_like(to_go.flatten())
    # Each level adds one more earlier state to the key, so its groups are subsets of the level's before: fewer members
    # that are more alike, less bias and more variance, which the weights trade.
    for earlier in range(min(context_length + 1, length)):
        shifted = torch.full_like(state, -1)
        shifted[:, earlier:] = state[:, : length - earlier]
        keys.append(shifted.flatten())
        counts = (rollouts.alive & (time >= earlier)).flatten()
        advantage, _ = group_baseline(to_go.flatten(), Segments.of(*keys), counts, scale=True)
        share = torch.where(advantage != 0, float((earlier + 2) ** alpha), 0.0)
        total, weight = total + share * advantage, weight + share
    return (total / weight.clamp(min=1e-9)).reshape(to_go.shape)


@mechanism(Slot.ADVANTAGE, "rank_grpo", source="Rank-GRPO, arXiv:2510.20150", needs=(Need.GROUPS,))
def rank_grpo(rollouts: Rollouts, context: Context, *, per_action: bool = False) -> Tensor:
    """A = return-to-go of a unit, standardised within the group at the same position; the ratio is the unit's mean.

    The paper's units are list items, each with its own return-to-go and the geometric mean of its tokens' ratios. Here
    a unit is an action chunk (ratio_level=decision_mean), or with per_action each action of its chunk, whose tokens are
    consecutive (ratio_level=action_mean). An episode that is over counts at no later position; the paper's lists all
    have the same length. Returns A [B, T], or [B, T, K] with per_action. Raises ConfigError with
    per_action unless the K scored steps divide evenly among the C actions.
    """
    if not per_action:
        return step_groups(rollouts, context, episode_weight=0.0, step_weight=1.0)
    steps, chunk = rollouts.mask.shape[-1], rollouts.actions.shape[2]
    if steps % chunk:
        raise ConfigError(
            f"per_action=True: {steps} steps with log-probabilities cannot be divided among {chunk} actions."
        )
    valid = rollouts.valid.flatten(1)
    reward = torch.stack(list(rollouts.rewards.values())).sum(0).flatten(1)
    # Actions that were not played lie at the end, the rest of a last chunk and padding: there is nothing to earn there.
    reward = torch.where(valid, reward, 0.0)
    to_go = discounted_sums(reward, torch.full_like(reward, context.discount), torch.ones_like(valid))
    place = torch.arange(valid.shape[1], device=valid.device).expand(valid.shape)
    row = rollouts.group[:, None].expand(valid.shape)
    keys = Segments.of(row.flatten(), place.flatten())
    normalised, _ = group_baseline(to_go.flatten(), keys, valid.flatten(), scale=True)
    return normalised.reshape(rollouts.valid.shape).repeat_interleave(steps // chunk, -1)


@mechanism(Slot.ADVANTAGE, "salt", source="SALT, arXiv:2510.20022", needs=(Need.GROUPS,))
def salt(rollouts: Rollouts, context: Context, *, resolution: float | None = None) -> Tensor:
    """Merge equal steps of a group: the same action in the same state gets the mean advantage of all its occurrences.

    States and actions are equal if they have the same key, see `state_keys`. Returns A [B, T].
    """
    episode = broadcast(group_normalised(*outcomes(rollouts)), rollouts)
    keys = state_keys(rollouts, resolution, with_actions=True)
    same_steps = Segments.of(per_decision(rollouts.group, rollouts), keys.flatten())
    merged = same_steps.mean(episode.flatten(), rollouts.alive.flatten())[same_steps.index]
    return torch.where(rollouts.alive, merged.reshape(episode.shape), 0.0)


@mechanism(Slot.ADVANTAGE, "fork", source="PORTool, arXiv:2510.26020", needs=(Need.GROUPS,))
def fork(rollouts: Rollouts, context: Context, *, trajectory: float = 1.0, forks: float = 1.0) -> Tensor:
    """Weighted sum of the episode's advantage and of a chunk's advantage over its siblings at a branch point.

    The latter is the mean return of the chunk's subtree minus the mean of that over all branches, each counted once
    however many episodes it has; it is 0 where nothing branches. Returns A [B, T], or [B, T, K] if episodes branch
    inside policy calls.
    """
    values, nodes = subtree_values(rollouts)
    returns, counts, groups = outcomes(rollouts)
    alive = nodes_alive(rollouts, values)
    # A node stands in every row of its subtree; the first one represents it. Siblings have the same node before them;
    # before the first decision that is the group.
    leader = node_leaders(nodes, alive.flatten()).reshape(values.shape)
    before = torch.cat([-1 - groups.index[:, None], leader[:, :-1]], 1)
    siblings = Segments.of(before.flatten())
    place = torch.arange(values.numel(), device=values.device).reshape(values.shape)
    is_leader = alive & (leader == place) & counts[:, None]
    usual = siblings.mean(values.flatten(), is_leader.flatten())[siblings.index].reshape(values.shape)
    episode = broadcast(group_normalised(returns, counts, groups), rollouts)
    share = values.shape[1] // rollouts.shape[1]
    advantage = trajectory * episode.repeat_interleave(share, 1) + forks * (values - usual)
    return as_steps(torch.where(alive, advantage, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "process_steps", source="OPRL, arXiv:2509.19199", needs=(Need.GROUPS, Need.IMPLICIT))
def process_steps(rollouts: Rollouts, context: Context, *, alpha: float = 1.0) -> Tensor:
    """A = the episode's advantage in its group + alpha (a chunk's process reward, standardised over the group).

    A chunk's process reward is the sum of extras["process"] [B, T, K] over its steps. Returns A [B, T].
    """
    reward, alive = rollouts.extras["process"].sum(-1), rollouts.alive
    keys = Segments.of(rollouts.group[:, None].expand(alive.shape).flatten())
    flat, counts = reward.flatten(), alive.flatten()
    centred = flat - keys.mean(flat, counts)[keys.index]
    step = torch.where(counts, centred / (keys.std(flat, counts)[keys.index] + 1e-6), 0.0)
    return broadcast(group_normalised(*outcomes(rollouts)), rollouts) + alpha * step.reshape(alive.shape)


@mechanism(Slot.ADVANTAGE, "q_values", source="Digi-Q, arXiv:2502.15760", needs=(Need.VALUES,))
def q_values(rollouts: Rollouts, context: Context) -> Tensor:
    """A = Q(s, a) - V(s) of the side model q_ensemble, standardised over the batch.

    Reads extras["q"] and extras["v"], [B, T]; returns A [B, T].
    """
    advantage = rollouts.extras["q"] - rollouts.extras["v"]
    return torch.where(rollouts.alive, standardise(advantage, rollouts.alive), 0.0)


@mechanism(Slot.ADVANTAGE, "flow_values", source="AC-Flow, arXiv:2510.18072", needs=(Need.FLOW_VALUES,))
def flow_values(rollouts: Rollouts, context: Context) -> Tensor:
    """A = R - V(s, x_t, t) at the noisy actions x_t of a chunk, from the side model flow_critic, standardised.

    The part of the outcome that a noisy action already predicts is subtracted. The noisiest levels are credited with
    the chunk's complete advantage over its state, the cleanest ones only with what the action itself does not predict.
    Reads extras["flow_return"] [B, T] and ["flow_value"] [B, T, K]; returns A [B, T, K].
    """
    advantage = rollouts.extras["flow_return"][..., None] - rollouts.extras["flow_value"]
    return standardise(advantage, rollouts.alive[..., None].expand(advantage.shape))


@mechanism(Slot.ADVANTAGE, "discriminator", source="AFD, arXiv:2605.26105", needs=(Need.PREFERENCE,))
def discriminator(rollouts: Rollouts, context: Context) -> Tensor:
    """A = D(s, a) - mean D: teacher-likeness of a chunk relative to the student's average in its state.

    D is the side model discriminator, which subtracts that average; standardised over the batch of the student's own
    chunks. Reads extras["preference"] [B, T]; returns A [B, T].
    """
    return standardise(rollouts.extras["preference"], rollouts.alive)


@mechanism(Slot.ADVANTAGE, "egae", source="Truncated PPO (EGAE), arXiv:2506.15050", needs=(Need.CRITIC, Need.FINISHED))
def egae(rollouts: Rollouts, context: Context) -> Tensor:
    """GAE of truncated windows: at the truncation, V replaces all later rewards.

    T-PPO sets V(s_{l+1}) = V(s_l) at the truncation because it has no next state; here the world provides it, so
    V(s_{l+1}) itself is used. Its critic learns only from finished episodes, by their discounted returns
    (`finished_returns`). Deviation: in the paper it learns from all of a finished episode, here from what lies in the
    window in which it ends, so that a window should hold the greater part of an episode. Reads extras["advantage_gae"]
    [B, T]; returns A [B, T], standardised over the batch.
    """
    return standardise(rollouts.extras["advantage_gae"], rollouts.alive)
