"""Group-relative advantages over episodes with the same initial state: (rollouts, context) -> A [B, T], constant over
an episode.

Batch rows are complete episodes; groups may differ in size. An episode whose return is not finite is excluded from all
baselines and gets 0.
"""

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.rollouts import Rollouts, sum_of_rewards
from robopolicy.core.segments import Segments
from robopolicy.rl.advantages.gae import standardise
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


def outcomes(rollouts: Rollouts) -> tuple[Tensor, Tensor, Segments]:
    """Return the episodes' returns [B], a mask of the finite ones [B] bool, and the groups."""
    returns = rollouts.row_return
    counts = returns.isfinite()
    return torch.where(counts, returns, 0.0), counts, Segments.of(rollouts.group)


def broadcast(advantage: Tensor, rollouts: Rollouts) -> Tensor:
    """Expand one advantage per episode to all of its chunks: [B] -> [B, T], 0 on padding."""
    return torch.where(rollouts.alive, advantage[:, None], 0.0)


def group_normalised(
    values: Tensor, counts: Tensor, groups: Segments, epsilon: float = 1e-6, *, unbiased: bool = False
) -> Tensor:
    """Return (x - group mean) / (group std + epsilon), [B]; 0 for excluded entries.

    The standard deviation is the population's, or with `unbiased` the sample's, as in verl and TRL: in groups of G
    episodes it is larger by one factor, sqrt(G / (G - 1)).
    """
    centred = values - groups.mean(values, counts)[groups.index]
    std = groups.std(values, counts, unbiased=unbiased)[groups.index]
    return torch.where(counts, centred / (std + epsilon), 0.0)


@mechanism(Slot.ADVANTAGE, "grpo", source="Shao et al. 2024, arXiv:2402.03300", needs=(Need.GROUPS,))
def grpo(
    rollouts: Rollouts, context: Context, *, epsilon: float = 1e-6, unbiased: bool = False, by_steps: bool = False
) -> Tensor:
    """A = (R - group mean) / (group std + epsilon).

    R [B]: the episodes' returns. unbiased: the sample's standard deviation, as in verl and TRL, instead of the
    population's; it matters where groups differ in size. by_steps: episodes count by their scored steps in mean and
    deviation, as in HAPO (arXiv:2509.16591); a group in which |A| then reaches 5 gets the usual A. Returns A [B, T],
    constant over an episode.
    """
    returns, counts, groups = outcomes(rollouts)
    advantage = group_normalised(returns, counts, groups, epsilon, unbiased=unbiased)
    if by_steps:
        size = torch.where(counts, (rollouts.mask & rollouts.alive[..., None]).sum((1, 2)), 0).to(returns.dtype)
        total = groups.sum(size).clamp(min=1)
        centred = returns - (groups.sum(size * returns) / total)[groups.index]
        std = (groups.sum(size * centred.square()) / total).sqrt()[groups.index]
        weighted = torch.where(counts, centred / (std + epsilon), 0.0)
        advantage = torch.where(groups.maximum(weighted.abs())[groups.index] >= 5, advantage, weighted)
    return broadcast(advantage, rollouts)


@mechanism(Slot.ADVANTAGE, "dr_grpo", source="Liu et al. 2025, arXiv:2503.20783", needs=(Need.GROUPS,))
def dr_grpo(rollouts: Rollouts, context: Context) -> Tensor:
    """A = R - group mean, without the standard deviation, which overweights very easy and very hard initial states.

    R [B]: the episodes' returns. Returns A [B, T], constant over an episode.
    """
    returns, counts, groups = outcomes(rollouts)
    centred = returns - groups.mean(returns, counts)[groups.index]
    return broadcast(torch.where(counts, centred, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "rloo", source="Ahmadian et al. 2024, arXiv:2402.14740", needs=(Need.GROUPS,))
def rloo(rollouts: Rollouts, context: Context) -> Tensor:
    """A = R - mean of the other episodes of the group (leave-one-out); 0 for a group of one.

    R [B]: the episodes' returns. Returns A [B, T], constant over an episode.
    """
    return broadcast(leave_one_out(*outcomes(rollouts)), rollouts)


def leave_one_out(values: Tensor, counts: Tensor, groups: Segments) -> Tensor:
    """Return each value minus the mean of the others of its group, [B]; 0 if there are no others."""
    # With itself in the baseline an episode would lower its own advantage by 1 / size, a bias of small groups.
    size = groups.size(counts)[groups.index]
    baseline = (groups.sum(values, counts)[groups.index] - values) / (size - 1).clamp(min=1)
    return torch.where(counts & (size > 1), values - baseline, 0.0)


@mechanism(Slot.ADVANTAGE, "mc_grpo", source="MC-GRPO, arXiv:2601.22582", needs=(Need.GROUPS,))
def mc_grpo(
    rollouts: Rollouts, context: Context, *, epsilon: float = 1e-3, limit: float = 3.0
) -> tuple[Tensor, Tensor]:
    """A = (R - group median) / (median absolute deviation + epsilon); the median episode is excluded from the update.

    Designed for small groups: play an odd number G + 1 and learn from G. With an even number no episode is excluded. A
    is bounded by `limit`, an addition here: if more than half of a group agree, as with binary rewards, the deviation
    is 0, and other episodes would get 1 / epsilon; the bound then sets the scale. Omitted: the authors' code also
    multiplies non-zero entries by the group's size over their number. Returns A [B, T] and the episodes to learn from,
    [B] bool.
    """
    returns, counts, groups = outcomes(rollouts)
    centred = returns - groups.median(returns, counts)[groups.index]
    spread = groups.median(centred.abs(), counts)[groups.index]
    size = groups.size(counts)[groups.index]
    # Ranks are distinct, so of an odd number exactly one episode is in the middle, ties or not.
    middle = (groups.rank(returns, counts) == (size - 1) // 2) & (size % 2 == 1) & (size > 1)
    advantage = torch.where(counts, (centred / (spread + epsilon)).clamp(-limit, limit), 0.0)
    return broadcast(advantage, rollouts), counts & ~middle


@mechanism(Slot.ADVANTAGE, "ngrpo", source="NGRPO, arXiv:2509.18851", needs=(Need.GROUPS,))
def ngrpo(
    rollouts: Rollouts, context: Context, *, best: float | None = None, virtual: int = 1, epsilon: float = 1e-6
) -> Tensor:
    """GRPO with virtual episodes of the best possible return in every group, so that groups without success get A < 0.

    best: the best possible return, null for the best of the run so far (set it if nothing succeeds at first); virtual:
    number of virtual episodes. The standard deviation is that of a sample (n - 1), as in the paper's figures. The
    preset clips as in the paper, at 0.16 below and 0.24 above. Groups of successes alone get 0 and still count in the
    mean of the loss; the authors play others in their place. Meant for tokens: moving away from failures makes a
    categorical policy broader, but shifts the mean of a Gaussian step without bound. Returns A [B, T], constant over an
    episode.
    """
    returns, counts, groups = outcomes(rollouts)
    best_return = float(returns[counts].max()) if bool(counts.any()) else 0.0
    context.memory["ngrpo"] = max(best_return, context.memory.get("ngrpo", best_return))
    top = torch.as_tensor(context.memory["ngrpo"] if best is None else best, dtype=returns.dtype)
    # Virtual episodes enter mean and spread of the group, and nothing is learned from them.
    size = groups.size(counts) + virtual
    mean = (groups.sum(returns, counts) + virtual * top) / size
    squares = groups.sum((returns - mean[groups.index]).square(), counts) + virtual * (top - mean).square()
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    scaled = (returns - mean[groups.index]) / (std[groups.index] + epsilon)
    return broadcast(torch.where(counts, scaled, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "gdpo", source="GDPO, arXiv:2601.05242", needs=(Need.GROUPS,))
def gdpo(rollouts: Rollouts, context: Context, *, weights: dict[str, float] | None = None) -> Tensor:
    """Normalise every reward term within its group first, sum them with weights, then standardise over the batch.

    A term with large values cannot dominate a small one. weights: term -> weight, 1 by default. Deviations are the
    population's; the authors' samples' differ by one factor, which the last step removes where groups are of one size.
    Returns A [B, T], constant over an episode. Raises ConfigError for the weight of an unknown term.
    """
    for name in weights or {}:
        if name not in rollouts.rewards:
            raise ConfigError(
                f"options.gdpo.weights: there is no reward '{name}'.{did_you_mean(name, rollouts.rewards)}"
            )
    groups = Segments.of(rollouts.group)
    total = torch.zeros_like(rollouts.row_return)
    for name, reward in rollouts.rewards.items():
        value = sum_of_rewards({name: reward}, rollouts.valid).sum(1)
        counts = value.isfinite()
        total = total + (weights or {}).get(name, 1.0) * group_normalised(
            torch.where(counts, value, 0.0), counts, groups
        )
    return broadcast(standardise(total), rollouts)


@mechanism(Slot.ADVANTAGE, "best_and_worst", source="GRAPE, arXiv:2411.19309", needs=(Need.GROUPS,))
def best_and_worst(rollouts: Rollouts, context: Context, *, pairs: int = 1) -> tuple[Tensor, Tensor]:
    """A = 1 for the `pairs` best episodes of a group, -1 for the same number of worst ones; the rest is excluded.

    The i-th best is paired with the i-th worst only if its return is larger: ties form no pair, and every chosen
    episode beats every rejected one of its group. Episodes of stored pairs keep their stored label. If no group has a
    pair, all stay, with A = 0. Returns A [B, T] and keep [B] bool. Raises ConfigError if pairs is less than 1.
    """
    if pairs < 1:
        raise ConfigError(f"options.best_and_worst.pairs={pairs} must be at least 1 pair per group.")
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
            is_clear = (gap > 1e-6)[groups.index]
            # Beyond the middle of a group the i-th best is below the i-th worst: there the gap is not positive.
            verdict = torch.where(high & is_clear, 1.0, torch.where(low & is_clear, -1.0, verdict))
    keep = verdict != 0
    return broadcast(verdict, rollouts), keep if bool(keep.any()) else torch.ones_like(keep)


@mechanism(Slot.SELECTION, "mixed_outcomes", source="DAPO, arXiv:2503.14476", needs=(Need.GROUPS,))
def keep_mixed(rollouts: Rollouts, context: Context) -> Tensor:
    """Drop groups in which all episodes succeeded or all failed; keep everything if no group is mixed.

    Returns keep [B] bool.
    """
    groups = Segments.of(rollouts.group)
    rate = groups.mean(rollouts.row_success.float())[groups.index]
    mixed = (rate > 0) & (rate < 1)
    return mixed if bool(mixed.any()) else torch.ones_like(mixed)
