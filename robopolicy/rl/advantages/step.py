"""Advantages of single action chunks and steps: (rollouts, context) -> A [B, T] or [B, T, K].

They compare the returns that follow: GiGPO, HGPO, SALT, UI-S1 and BranchGRPO's depth-wise normalisation all use
`group_baseline`, with different keys that define which chunks are compared. Others use the predictions of side models.
"""

import warnings

import torch
from torch import Tensor

from robopolicy.core.errors import RobopolicyNote
from robopolicy.core.returns import discounted_sums
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments, distinct
from robopolicy.nn.normalizer import in_deviations
from robopolicy.rl.advantages.gae import standardise
from robopolicy.rl.advantages.group import broadcast, dr_grpo, group_normalised, leave_one_out, outcomes
from robopolicy.rl.advantages.tree import per_decision, sampled_steps
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


def returns_to_go(rollouts: Rollouts, discount: float, *, cut: bool = False) -> Tensor:
    """Compute G_t = R_t + discount^h_t G_{t+1}, [B, T] (h_t control steps, not discounted inside a chunk).

    cut: G_t = R_t where R_t is not positive.
    """
    goes_on = ~rollouts.ended & (rollouts.reward > 0) if cut else ~rollouts.ended
    return discounted_sums(rollouts.reward, discount ** rollouts.duration.float(), goes_on)


def group_baseline(values: Tensor, key: Segments, counts: Tensor, scale: bool = False) -> tuple[Tensor, Tensor]:
    """Return values minus the mean of their key (divided by its std), and the number of members of the key, all flat
    [N].

    Entries that are alone under their key get 0.
    """
    size = key.size(counts)[key.index]
    centred = values - key.mean(values, counts)[key.index]
    if scale:
        centred = centred / (key.std(values, counts)[key.index] + 1e-6)
    return torch.where(counts & (size > 1), centred, 0.0), size


RESOLUTIONS = 0.25, 0.5, 1.0, 2.0, 4.0
"""Candidate resolutions of `state_keys`, in standard deviations."""

SHARED = 0.2
"""Minimum fraction of later decisions in a state that another episode of the group visits, too."""


def state_keys(rollouts: Rollouts, resolution: float | None = None, *, with_actions: bool = False) -> Tensor:
    """Compute a key for the state of every chunk, [B, T] int64: equal numbers for states that look alike.

    Vector fields of the newest frame (and with_actions the actions of the chunk) are measured in standard deviations
    over the batch and rounded to multiples of `resolution`. None: the finest of RESOLUTIONS at which a
    fraction SHARED of the decisions after an episode's first has a key that another episode of its group has, too;
    continuous states are hardly ever equal. If there is none, a note says that the comparison of equal states has
    little effect. A collector may provide its own keys of states as extras["state_key"].
    """
    values = list(rollouts.observation.values())
    parts = [
        value[:, :, -1].flatten(2)
        for value in values
        if isinstance(value, Tensor) and value.dtype.is_floating_point and "state_key" not in rollouts.extras
    ]
    parts += [rollouts.actions.flatten(2)] if with_actions else []
    vectors = [in_deviations(part, part[rollouts.alive]) for part in parts]

    def keys_at(size: float) -> Tensor:
        cells = [(vector / size).round().long() for vector in vectors]
        if "state_key" in rollouts.extras:
            cells.append(rollouts.extras["state_key"][..., None].long())
        _, index = distinct(torch.cat(cells, -1).flatten(0, 1))
        return index.reshape(rollouts.shape)

    later = rollouts.alive.clone()
    later[:, 0] = False
    if resolution is not None or not vectors or not bool(later.any()):
        return keys_at(RESOLUTIONS[0] if resolution is None else resolution)
    for keys in map(keys_at, RESOLUTIONS):
        if float(_is_shared(keys, rollouts)[later].float().mean()) >= SHARED:
            return keys
    warnings.warn(
        f"Fewer than {SHARED:.0%} of the decisions are in a state that another episode of their group visits, however "
        "coarsely states are compared: this algorithm hardly differs from GRPO here.",
        RobopolicyNote,
        stacklevel=2,
    )
    return keys_at(RESOLUTIONS[-1])


def final_state(rollouts: Rollouts) -> Tensor:
    """Return the vector fields of the newest observation after each row's last chunk, [B, D]."""
    last = rollouts.alive.sum(1) - 1
    rows = torch.arange(len(last), device=last.device)
    vectors = [
        value[rows, last, -1].flatten(1)
        for value in rollouts.next_observation.values()
        if isinstance(value, Tensor) and value.dtype.is_floating_point
    ]
    return torch.cat(vectors, -1)


def _is_shared(keys: Tensor, rollouts: Rollouts) -> Tensor:
    """Whether another episode of the group has the key [B, T] at any time, [B, T]."""
    segments = Segments.of(per_decision(rollouts.group, rollouts), keys.flatten())
    row, alive = torch.arange(len(keys), device=keys.device).double(), rollouts.alive.flatten()
    rows = row[:, None].expand(keys.shape).flatten()
    first, last = segments.minimum(rows, alive), segments.maximum(rows, alive)
    return ((first != last)[segments.index] & alive).reshape(keys.shape)


@mechanism(Slot.ADVANTAGE, "gigpo", source="GiGPO, Feng et al. 2025, arXiv:2505.10978", needs=(Need.GROUPS,))
def gigpo(
    rollouts: Rollouts,
    context: Context,
    *,
    step_weight: float = 1.0,
    resolution: float | None = None,
    scale: bool = True,
) -> Tensor:
    """Episode advantage plus step advantage: the return-to-go relative to other visits of the same state in the group.

    step_weight: weight of the step advantage; resolution: as in `state_keys`; scale: divide each by its standard
    deviation, over the group's returns and over the visits (the paper has both forms). Returns A [B, T].
    """
    to_go = returns_to_go(rollouts, context.discount)
    # By group as well: another start's episodes are no baseline even in a state that looks alike.
    keys = Segments.of(per_decision(rollouts.group, rollouts), state_keys(rollouts, resolution).flatten())
    step, _ = group_baseline(to_go.flatten(), keys, rollouts.alive.flatten(), scale)
    episode = broadcast(group_normalised(*outcomes(rollouts)), rollouts) if scale else dr_grpo(rollouts, context)
    return episode + step_weight * step.reshape(to_go.shape)


@mechanism(Slot.ADVANTAGE, "step_groups", source="UI-S1, semi-online RL, arXiv:2509.11543", needs=(Need.GROUPS,))
def step_groups(
    rollouts: Rollouts,
    context: Context,
    *,
    episode_weight: float = 1.0,
    step_weight: float = 1.0,
    cut: bool = False,
    scale: bool = True,
    padded: bool = False,
    discount: float | None = None,
) -> Tensor:
    """Weighted sum of the episode's advantage and of the return-to-go relative to the group at the same step index.

    The episode's advantage is standardised, the other one if `scale`. cut: a return-to-go ends at a chunk without a
    positive reward, as in UI-S1, whose rewards are the agreement with a demonstration. padded: episodes that are over
    count as 0 in later baselines, as in IGPO, else not at all. discount: per control step, null for the run's. Returns
    A [B, T].
    """
    to_go = returns_to_go(rollouts, context.discount if discount is None else discount, cut=cut)
    column = torch.arange(to_go.shape[1], device=to_go.device).expand(to_go.shape)
    keys = Segments.of(per_decision(rollouts.group, rollouts), column.flatten())
    counts = torch.ones_like(rollouts.alive) if padded else rollouts.alive
    step, _ = group_baseline(to_go.flatten(), keys, counts.flatten(), scale)
    episode = broadcast(group_normalised(*outcomes(rollouts)), rollouts)
    return episode_weight * episode + step_weight * torch.where(rollouts.alive, step.reshape(to_go.shape), 0.0)


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
    """Leave-one-out outcome plus the return-to-go of leave-one-out process rewards, whitened, [B, T, K].

        A_u = sum_{s >= u} (r_s - mean over the others of their mean r) + (R - mean of the others' R)

    r: extras["process"]; R: success of the episode. outcome, process: their weights. Only groups with different
    outcomes count, as in the paper's filter: in others the process rewards have no outcome to agree with. to_go=false
    uses r_u instead of the sum: a log-ratio already is an advantage (arXiv:2404.12358), and later terms only add noise.
    It agrees with the true advantages twice as closely as the outcome does.
    """
    reward, sampled = rollouts.extras["process"], sampled_steps(rollouts)
    groups, all_rows = Segments.of(rollouts.group), torch.ones_like(rollouts.group, dtype=torch.bool)
    # Leave one out on means per step, not on sums: long episodes would otherwise seem to have more process reward.
    mean = torch.where(sampled, reward, 0.0).sum((1, 2)) / sampled.sum((1, 2)).clamp(min=1)
    baseline = mean - leave_one_out(mean, all_rows, groups)
    centred = torch.where(sampled, reward - baseline[:, None, None], 0.0).flatten(1)
    following = (centred.flip(1).cumsum(1).flip(1) if to_go else centred).reshape(reward.shape)
    success = rollouts.row_success.float()
    # Where all episodes of a start ended alike, process rewards can only restate noise: those groups get nothing.
    mixed = (groups.maximum(success) > groups.minimum(success))[groups.index]
    advantage = process * following + outcome * leave_one_out(success, all_rows, groups)[:, None, None]
    counted_mask = sampled & mixed[:, None, None]
    if not bool(counted_mask.any()):
        return torch.zeros_like(advantage)
    return standardise(advantage, counted_mask) if whiten else torch.where(counted_mask, advantage, 0.0)
