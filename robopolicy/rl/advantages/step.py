"""Advantages of single decisions from comparing what followed them: (rollouts, context) -> A [B, T].

GiGPO, HGPO, SALT, UI-S1 and BranchGRPO's depth-wise normalisation are one function, `group_baseline`, with different
keys: which decisions are compared with one another.
"""

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.returns import discounted_sums
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments, distinct
from robopolicy.rl.advantages.group import broadcast, dr_grpo, group_normalised, outcomes
from robopolicy.rl.advantages.tree import per_decision
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


def returns_to_go(rollouts: Rollouts, discount: float) -> Tensor:
    """Return G_t = R_t + discount^h_t G_{t+1}, [B, T] (h_t control steps, not discounted inside a decision)."""
    return discounted_sums(rollouts.reward, discount ** rollouts.duration.float(), ~rollouts.ended)


def group_baseline(values: Tensor, key: Segments, counts: Tensor, scale: bool = False) -> tuple[Tensor, Tensor]:
    """Return values minus their key's mean (over its std), and the number of members of the key, all flat [N].

    Decisions that are alone under their key get 0.
    """
    size = key.size(counts)[key.index]
    centred = values - key.mean(values, counts)[key.index]
    if scale:
        centred = centred / (key.std(values, counts)[key.index] + 1e-6)
    return torch.where(counts & (size > 1), centred, 0.0), size


def state_keys(rollouts: Rollouts, resolution: float) -> Tensor:
    """Return which state every decision was taken in, [B, T] int64: equal numbers for states that look alike.

    Vector fields of the newest frame are divided by their standard deviation over the batch and rounded to multiples
    of `resolution`. A collector may give its own keys as extras["state_key"].
    """
    if "state_key" in rollouts.extras:
        return rollouts.extras["state_key"]
    parts: list[Tensor] = []
    for value in rollouts.observation.values():
        if isinstance(value, Tensor) and value.dtype.is_floating_point:
            newest = value[:, :, -1].flatten(2)
            spread = newest[rollouts.alive].std(0) + 1e-6
            parts.append((newest / spread / resolution).round().long())
    cells = torch.cat(parts, -1)
    _, index = distinct(cells.flatten(0, 1))
    return index.reshape(cells.shape[:2])


@mechanism(Slot.ADVANTAGE, "gigpo", source="GiGPO, Feng et al. 2025, arXiv:2505.10978", needs=(Need.GROUPS,))
def gigpo(
    rollouts: Rollouts, context: Context, *, step_weight: float = 1.0, resolution: float = 0.25, scale: bool = True
) -> Tensor:
    """Episode advantage plus step advantage: what followed, against other visits of the same state in the group.

    step_weight: of the step advantage; resolution: as in `state_keys`; scale: divide either by its standard deviation,
    of the group's returns and among the visits (the paper has both forms). Returns A [B, T].
    """
    to_go = returns_to_go(rollouts, context.discount)
    keys = Segments.of(per_decision(rollouts.group, rollouts), state_keys(rollouts, resolution).flatten())
    step, _ = group_baseline(to_go.flatten(), keys, rollouts.alive.flatten(), scale)
    episode = broadcast(group_normalised(*outcomes(rollouts)), rollouts) if scale else dr_grpo(rollouts, context)
    return episode + step_weight * step.reshape(to_go.shape)


@mechanism(Slot.ADVANTAGE, "hgpo", source="HGPO, arXiv:2602.22817", needs=(Need.GROUPS,))
def hgpo(
    rollouts: Rollouts, context: Context, *, context_length: int = 2, alpha: float = 1.0, resolution: float = 0.25
) -> Tensor:
    """Step groups of growing context: compare with decisions that share the last 1, 2, ... states; longer weigh more.

    A = sum_k w_k A_k over the k = 1, ..., context_length + 1 last states where A_k is not 0, w_k proportional to
    (k + 1)^alpha; a decision that is alone at every level gets 0, and one with fewer states behind it takes no part in
    the longer ones. resolution: as in `state_keys`. Returns A [B, T].
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


@mechanism(Slot.ADVANTAGE, "step_groups", source="UI-S1, semi-online RL, arXiv:2509.11543", needs=(Need.GROUPS,))
def step_groups(
    rollouts: Rollouts, context: Context, *, episode_weight: float = 1.0, step_weight: float = 1.0
) -> Tensor:
    """Weighted sum of the episode's advantage and of the return to go against the group at the same step index.

    Both are standardised. Returns A [B, T].
    """
    to_go = returns_to_go(rollouts, context.discount)
    column = torch.arange(to_go.shape[1], device=to_go.device).expand(to_go.shape)
    keys = Segments.of(per_decision(rollouts.group, rollouts), column.flatten())
    step, _ = group_baseline(to_go.flatten(), keys, rollouts.alive.flatten(), scale=True)
    episode = broadcast(group_normalised(*outcomes(rollouts)), rollouts)
    return episode_weight * episode + step_weight * step.reshape(to_go.shape)


@mechanism(Slot.ADVANTAGE, "rank_grpo", source="Rank-GRPO, arXiv:2510.20150", needs=(Need.GROUPS,))
def rank_grpo(rollouts: Rollouts, context: Context, *, per_action: bool = False) -> Tensor:
    """A = what followed a unit, standardised within the group at the same place; the ratio is the unit's mean.

    The paper's units are the items of a list, each with its own return to go and the geometric mean of its tokens'
    ratios. Here a unit is a decision (ratio_level=decision_mean), or with per_action each action of its chunk, whose
    tokens follow one another (ratio_level=action_mean). Returns A [B, T], or [B, T, K] with per_action. Raises
    ConfigError there unless K scored steps share out evenly among the C actions.
    """
    if not per_action:
        return step_groups(rollouts, context, episode_weight=0.0, step_weight=1.0)
    steps, chunk = rollouts.mask.shape[-1], rollouts.actions.shape[2]
    if steps % chunk:
        raise ConfigError(
            f"per_action=True: {steps} scored steps of a decision do not share out among {chunk} actions."
        )
    valid = rollouts.valid.flatten(1)
    reward = torch.stack(list(rollouts.rewards.values())).sum(0).flatten(1)
    # Actions that were not played lie at the end, the rest of a last chunk and padding: there is nothing to earn there.
    reward = torch.where(valid, reward, 0.0)
    to_go = discounted_sums(reward, torch.full_like(reward, context.discount), torch.ones_like(valid))
    place = torch.arange(valid.shape[1], device=valid.device).expand(valid.shape)
    row = rollouts.group[:, None].expand(valid.shape)
    keys = Segments.of(row.flatten(), place.flatten())
    found, _ = group_baseline(to_go.flatten(), keys, valid.flatten(), scale=True)
    return found.reshape(rollouts.valid.shape).repeat_interleave(steps // chunk, -1)


@mechanism(Slot.ADVANTAGE, "salt", source="SALT, arXiv:2510.20022", needs=(Need.GROUPS,))
def salt(rollouts: Rollouts, context: Context, *, resolution: float = 0.25) -> Tensor:
    """Merge equal steps of a group: the same action in the same state gets the mean advantage of who took it.

    Actions [B, T, C, A] are equal if they are after division by their standard deviation over the batch and rounding to
    multiples of `resolution`, whole chunk against whole chunk; states as in `state_keys`. Returns A [B, T].
    """
    episode = broadcast(group_normalised(*outcomes(rollouts)), rollouts)
    actions = rollouts.actions.flatten(2)
    cells = (actions / (actions[rollouts.alive].std(0) + 1e-6) / resolution).round().long()
    _, taken = distinct(cells.flatten(0, 1))
    keys = Segments.of(per_decision(rollouts.group, rollouts), state_keys(rollouts, resolution).flatten(), taken)
    merged = keys.mean(episode.flatten(), rollouts.alive.flatten())[keys.index]
    return torch.where(rollouts.alive, merged.reshape(episode.shape), 0.0)
