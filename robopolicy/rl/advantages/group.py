"""Advantages from comparing episodes with the same start: (rollouts, context) -> A [B, T], constant over an episode.

Rows are whole episodes, groups are ragged. An episode whose return is not finite counts in no baseline and gets 0.
"""

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.rollouts import Rollouts, sum_of_rewards
from robopolicy.core.segments import Segments, quantile
from robopolicy.rl.advantages.gae import standardise
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


def outcomes(rollouts: Rollouts) -> tuple[Tensor, Tensor, Segments]:
    """Return the episodes' returns [B], which of them count [B] bool, and the groups."""
    returns = rollouts.row_return
    counts = returns.isfinite()
    return torch.where(counts, returns, 0.0), counts, Segments.of(rollouts.group)


def broadcast(advantage: Tensor, rollouts: Rollouts) -> Tensor:
    """Give every decision of an episode its episode's advantage: [B] -> [B, T], 0 on padding."""
    return torch.where(rollouts.alive, advantage[:, None], 0.0)


def group_normalised(values: Tensor, counts: Tensor, groups: Segments, epsilon: float = 1e-6) -> Tensor:
    """Return (x - group mean) / (group std + epsilon), [B]; 0 where an entry does not count."""
    centred = values - groups.mean(values, counts)[groups.index]
    return torch.where(counts, centred / (groups.std(values, counts)[groups.index] + epsilon), 0.0)


@mechanism(Slot.ADVANTAGE, "grpo", source="Shao et al. 2024, arXiv:2402.03300", needs=(Need.GROUPS,))
def grpo(rollouts: Rollouts, context: Context, *, epsilon: float = 1e-6) -> Tensor:
    """A = (R - group mean) / (group std + epsilon).

    R [B]: the episodes' returns. Returns A [B, T], constant over an episode.
    """
    return broadcast(group_normalised(*outcomes(rollouts), epsilon), rollouts)


@mechanism(Slot.ADVANTAGE, "dr_grpo", source="Liu et al. 2025, arXiv:2503.20783", needs=(Need.GROUPS,))
def dr_grpo(rollouts: Rollouts, context: Context) -> Tensor:
    """A = R - group mean, without the standard deviation that favours very easy and very hard starts.

    R [B]: the episodes' returns. Returns A [B, T], constant over an episode.
    """
    returns, counts, groups = outcomes(rollouts)
    centred = returns - groups.mean(returns, counts)[groups.index]
    return broadcast(torch.where(counts, centred, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "rloo", source="Ahmadian et al. 2024, arXiv:2402.14740", needs=(Need.GROUPS,))
def rloo(rollouts: Rollouts, context: Context) -> Tensor:
    """A = R - mean of the other episodes of the group (leave one out); 0 for a group of one.

    R [B]: the episodes' returns. Returns A [B, T], constant over an episode.
    """
    return broadcast(leave_one_out(*outcomes(rollouts)), rollouts)


def leave_one_out(values: Tensor, counts: Tensor, groups: Segments) -> Tensor:
    """Return each value minus the mean of the others of its group, [B]; 0 where there are no others."""
    # With itself in the baseline an episode would lower its own advantage by 1 / size, a bias of small groups.
    size = groups.size(counts)[groups.index]
    others = (groups.sum(values, counts)[groups.index] - values) / (size - 1).clamp(min=1)
    return torch.where(counts & (size > 1), values - others, 0.0)


@mechanism(Slot.ADVANTAGE, "reinforce_pp", source="REINFORCE++, Hu 2025, arXiv:2501.03262", needs=(Need.GROUPS,))
def reinforce_pp(rollouts: Rollouts, context: Context) -> Tensor:
    """A = R - group mean, standardised over the whole batch instead of within groups.

    R [B]: the episodes' returns. Returns A [B, T], constant over an episode.
    """
    returns, counts, groups = outcomes(rollouts)
    centred = returns - groups.mean(returns, counts)[groups.index]
    return broadcast(standardise(centred, counts), rollouts)


@mechanism(Slot.ADVANTAGE, "mc_grpo", source="MC-GRPO, arXiv:2601.22582", needs=(Need.GROUPS,))
def mc_grpo(
    rollouts: Rollouts, context: Context, *, epsilon: float = 1e-3, limit: float = 3.0
) -> tuple[Tensor, Tensor]:
    """A = (R - group median) / (median absolute deviation + epsilon); the median episode is left out of the update.

    Made for tiny groups: play an odd number G + 1, learn from G. With an even number nothing is left out. A is bounded
    by `limit`, which is ours: where more than half of a group agree the deviation is 0, and who differs, as of binary
    rewards, would get 1 / epsilon; the bound then sets the scale. Left out: in the authors' code what is not 0 is also
    multiplied by the group's size over their number. Returns A [B, T] and which episodes are learned from, [B] bool.
    """
    returns, counts, groups = outcomes(rollouts)
    centred = returns - groups.median(returns, counts)[groups.index]
    spread = groups.median(centred.abs(), counts)[groups.index]
    size = groups.size(counts)[groups.index]
    middle = (groups.rank(returns, counts) == (size - 1) // 2) & (size % 2 == 1) & (size > 1)
    advantage = torch.where(counts, (centred / (spread + epsilon)).clamp(-limit, limit), 0.0)
    return broadcast(advantage, rollouts), counts & ~middle


@mechanism(Slot.ADVANTAGE, "ngrpo", source="NGRPO, arXiv:2509.18851", needs=(Need.GROUPS,))
def ngrpo(
    rollouts: Rollouts, context: Context, *, best: float | None = None, virtual: int = 1, epsilon: float = 1e-6
) -> Tensor:
    """GRPO with virtual episodes of the best possible return in every group, so that all-fail groups get A < 0.

    best: that return, null for the best of the run so far (set it where nothing succeeds at first); virtual: how many.
    The spread is that of a sample (n - 1), as in the paper's figures. The preset clips as the paper does, at 0.16 below
    and 0.24 above. For tokens: being pushed away from what failed spreads a categorical policy out, but moves the mean
    of a Gaussian step without end. Returns A [B, T], constant over an episode.
    """
    returns, counts, groups = outcomes(rollouts)
    seen = float(returns[counts].max()) if bool(counts.any()) else 0.0
    context.memory["ngrpo"] = max(seen, context.memory.get("ngrpo", seen))
    top = torch.as_tensor(context.memory["ngrpo"] if best is None else best, dtype=returns.dtype)
    size = groups.size(counts) + virtual
    mean = (groups.sum(returns, counts) + virtual * top) / size
    squares = groups.sum((returns - mean[groups.index]).square(), counts) + virtual * (top - mean).square()
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    scaled = (returns - mean[groups.index]) / (std[groups.index] + epsilon)
    return broadcast(torch.where(counts, scaled, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "w_reinforce", source="PSR/NSR, Zhu et al. 2025, arXiv:2506.01347", needs=(Need.EPISODES,))
def w_reinforce(rollouts: Rollouts, context: Context, *, positive: float = 0.1) -> Tensor:
    """A = positive for a success, -1 for a failure: mostly learning from what went wrong, which keeps diversity.

    positive=0 is NSR; positive=1 is plain REINFORCE on signs. Whole episodes, in groups or alone. Returns A [B, T],
    constant over an episode.
    """
    success = rollouts.row_success
    sign = torch.where(success, torch.full_like(rollouts.row_return, positive), -1.0)
    return broadcast(sign, rollouts)


@mechanism(Slot.ADVANTAGE, "bnpo", source="BNPO, Xiao et al. 2025, arXiv:2506.02864", needs=(Need.GROUPS,))
def bnpo(rollouts: Rollouts, context: Context, *, ranges: dict[str, tuple[float, float]] | None = None) -> Tensor:
    """A = (R - p) / Beta(p; a, b), with p the group's mean of a reward R in [0, 1] and a Beta fitted to all groups'.

    Method of moments gives (a0, b0) of these means, of which there must be two; a = 1 + a0 / 3, b = 1 + b0 / 3, each at
    least 1. R is success; ranges: of several rewards instead, by their names, the least and the most that an episode
    can sum to. Each is brought to [0, 1] and normalised by itself, and A is the mean over them, as in the paper.
    Returns A [B, T], constant over an episode. Raises ConfigError for a reward that there is not, or out of its range.
    """
    groups = Segments.of(rollouts.group)
    if not ranges:
        return broadcast(_beta_normalised(rollouts.row_success.double(), groups).float(), rollouts)
    total = torch.zeros(len(rollouts.group), dtype=torch.float64, device=rollouts.group.device)
    for name, (least, most) in ranges.items():
        if name not in rollouts.rewards:
            raise ConfigError(f"ranges: there is no reward '{name}'.{did_you_mean(name, rollouts.rewards)}")
        found = sum_of_rewards({name: rollouts.rewards[name]}, rollouts.valid).sum(1).double()
        value = (found - least) / (most - least)
        if not bool(((value > -1e-6) & (value < 1 + 1e-6)).all()):
            raise ConfigError(
                f"ranges[{name!r}]=({least:g}, {most:g}): episodes sum to {float(found.min()):g} to "
                f"{float(found.max()):g}."
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


@mechanism(Slot.ADVANTAGE, "gdpo", source="GDPO, arXiv:2601.05242", needs=(Need.GROUPS,))
def gdpo(rollouts: Rollouts, context: Context, *, weights: dict[str, float] | None = None) -> Tensor:
    """Normalise every reward term within its group first, sum them with weights, then standardise over the batch.

    A large term cannot drown a small one. weights: term -> weight, 1 where not named. Returns A [B, T], constant over
    an episode.
    """
    groups = Segments.of(rollouts.group)
    total = torch.zeros_like(rollouts.row_return)
    for name, reward in rollouts.rewards.items():
        value = sum_of_rewards({name: reward}, rollouts.valid).sum(1)
        counts = value.isfinite()
        total = total + (weights or {}).get(name, 1.0) * group_normalised(
            torch.where(counts, value, 0.0), counts, groups
        )
    return broadcast(standardise(total), rollouts)


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
    """Advantages of bundles of starts, whose middle range and lower tail count: what is solved already pushes no more.

        X = sum of the returns of the j-th episodes of `bundle` groups,   A = (range + tail * worst) / (1 + tail)
        range = [(X - q_low)+ - (X - q_high)+ + q_low - q_high] / (high - low),   worst = -(q_low - X)+ / low

    A, over the bundle's standard deviation if `scale`, goes to all episodes that X sums. The quantiles of X at the
    levels low and high, in (0, 1), are tracked over the run by stochastic approximation, q += rate (level - share of
    X < q), beginning with those of the first batch. Groups that are left over form a smaller bundle; episodes beyond
    those of a bundle's smallest group get 0. Returns A [B, T], constant over an episode, never positive: to tokens, as
    in the paper, that is how often to repeat what; a Gaussian step it moves away from everything but the best.
    """
    returns, counts, groups = outcomes(rollouts)
    place = groups.rank(torch.arange(len(returns), device=returns.device).double(), counts)
    part = groups.index // bundle
    bundles = Segments.of(part)
    used = counts & (place < bundles.minimum(groups.size(counts)[groups.index].double())[bundles.index])
    papers = Segments.of(part, place)
    score = papers.sum(returns, used)[papers.index]
    first = used & (papers.rank(groups.index.double(), used) == 0)  # one entry a sum
    found = score[first]
    remembered: list[float] = context.memory.get("risk_po", [])
    q_low, q_high = remembered or [float(quantile(found, level)) for level in (low, high)]
    below_low, below_high = (float((found < bound).float().mean()) for bound in (q_low, q_high))
    context.memory["risk_po"] = [q_low + rate * (low - below_low), q_high + rate * (high - below_high)]
    middle = (score - q_low).clamp(min=0) - (score - q_high).clamp(min=0) + q_low - q_high
    value = (middle / (high - low) - tail * (q_low - score).clamp(min=0) / low) / (1 + tail)
    if scale:
        spread = bundles.std(score, first, unbiased=True)
        several = bundles.size(first) > 1
        value = value / (torch.where(several, spread, 1.0)[bundles.index] + 1e-6)
    return broadcast(torch.where(used, value, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "sas", source="DCPO, arXiv:2509.02333", needs=(Need.GROUPS, Need.STARTS))
def sas(rollouts: Rollouts, context: Context, *, epsilon: float = 1e-6) -> Tensor:
    """DCPO's smooth advantage standardisation: within the group, and against all episodes of its start so far.

        A = the smaller in size of [(i - 1) A_new + A_all] / i and [A_new + (i - 1) A_all] / i

    at the i-th visit of a start, where A_new uses mean and standard deviation of the group and A_all those of all the
    start's groups, this one among them; either is 0 where its deviation is. A group whose episodes are all alike is
    then still judged by what happened before. Returns A [B, T], constant over an episode.
    """
    returns, counts, groups = outcomes(rollouts)
    mean, std = groups.mean(returns, counts), groups.std(returns, counts, unbiased=True)
    past: dict[str, list[float]] = context.memory.setdefault("sas", {})
    starts = groups.maximum(rollouts.extras["start"][:, 0].double())
    every: list[list[float]] = []
    for number in range(groups.count):
        start = str(int(starts[number]))
        visits, old_mean, old_std = past.get(start, [0.0, 0.0, 0.0])
        new_mean = float(mean[number])
        new_std = float(std[number])
        times = visits + 1
        # Means and variances of groups are pooled with equal weights, as in the authors' code.
        variance = (visits * old_std**2 + new_std**2 + visits / times * (new_mean - old_mean) ** 2) / times
        past[start] = [times, (visits * old_mean + new_mean) / times, variance**0.5]
        every.append(past[start])
    visit, mean_all, std_all = torch.tensor(every, dtype=returns.dtype, device=returns.device)[groups.index].unbind(1)

    def standardised(centre: Tensor, spread: Tensor) -> Tensor:
        return torch.where(spread > epsilon, (returns - centre) / spread.clamp(min=epsilon), 0.0)

    new, whole = standardised(mean[groups.index], std[groups.index]), standardised(mean_all, std_all)
    first, second = ((visit - 1) * new + whole) / visit, (new + (visit - 1) * whole) / visit
    smaller = torch.where(first.abs() < second.abs(), first, second)
    return broadcast(torch.where(counts, smaller, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "best_and_worst", source="GRAPE, arXiv:2411.19309", needs=(Need.GROUPS,))
def best_and_worst(rollouts: Rollouts, context: Context, *, pairs: int = 1) -> tuple[Tensor, Tensor]:
    """A = 1 in the `pairs` best episodes of a group, -1 in as many worst ones; the rest is not learned from.

    The i-th best counts with the i-th worst, and only where its return is larger: ties give no pair, and whoever is
    chosen beats everyone rejected of its group. Episodes of stored pairs keep the verdict they were stored with. Where
    no group has a pair all stay, with A = 0. Returns A [B, T] and keep [B] bool. Raises ConfigError for less than one
    pair.
    """
    if pairs < 1:
        raise ConfigError(f"options.best_and_worst.pairs={pairs}: a group gives at least 1 pair.")
    if rollouts.extras.preferred is not None:
        verdict = rollouts.extras.preferred[:, 0].float()
    else:
        returns, counts, groups = outcomes(rollouts)
        from_below = groups.rank(returns, counts)
        from_above = groups.size(counts)[groups.index] - 1 - from_below
        verdict = torch.zeros_like(returns)
        for place in range(pairs):
            low, high = (counts & (order == place) for order in (from_below, from_above))
            gap = groups.sum(returns, high) - groups.sum(returns, low)
            told = (gap > 1e-6)[groups.index]
            # Beyond the middle of a group the i-th best is below the i-th worst: there the gap is not positive.
            verdict = torch.where(high & told, 1.0, torch.where(low & told, -1.0, verdict))
    keep = verdict != 0
    return broadcast(verdict, rollouts), keep if bool(keep.any()) else torch.ones_like(keep)
