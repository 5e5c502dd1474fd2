"""Advantages of steps and decisions from what a model says about them: (rollouts, context) -> A [B, T] or [B, T, K]."""

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.rl.advantages.gae import standardise
from robopolicy.rl.advantages.group import broadcast, group_normalised, leave_one_out, outcomes
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


@mechanism(Slot.ADVANTAGE, "process_steps", source="OPRL, arXiv:2509.19199", needs=(Need.GROUPS, Need.IMPLICIT))
def process_steps(rollouts: Rollouts, context: Context, *, alpha: float = 1.0) -> Tensor:
    """A = the episode's advantage in its group + alpha (a decision's process reward, standardised over the group).

    A decision's process reward is the sum of extras["process"] [B, T, K] over its steps. Returns A [B, T].
    """
    reward, alive = rollouts.extras["process"].sum(-1), rollouts.alive
    keys = Segments.of(rollouts.group[:, None].expand(alive.shape).flatten())
    flat, counts = reward.flatten(), alive.flatten()
    centred = flat - keys.mean(flat, counts)[keys.index]
    step = torch.where(counts, centred / (keys.std(flat, counts)[keys.index] + 1e-6), 0.0)
    return broadcast(group_normalised(*outcomes(rollouts)), rollouts) + alpha * step.reshape(alive.shape)


@mechanism(Slot.ADVANTAGE, "q_values", source="Digi-Q, arXiv:2502.15760", needs=(Need.VALUES,))
def q_values(rollouts: Rollouts, context: Context) -> Tensor:
    """A = Q(s, a) - V(s) of the model q_ensemble, standardised over the batch.

    Reads extras["q"] and extras["v"], [B, T]; returns A [B, T].
    """
    advantage = rollouts.extras["q"] - rollouts.extras["v"]
    return torch.where(rollouts.alive, standardise(advantage, rollouts.alive), 0.0)


@mechanism(Slot.ADVANTAGE, "flow_values", source="AC-Flow, arXiv:2510.18072", needs=(Need.FLOW_VALUES,))
def flow_values(rollouts: Rollouts, context: Context) -> Tensor:
    """A = R - V(s, x_t, t) at the noisy actions x_t of a decision, by the model flow_critic, standardised.

    What a noisy action already tells of the outcome is taken out of it: the noisiest levels are credited with all that
    the decision gained on its state, the cleanest ones with what even the action did not say. Reads
    extras["flow_return"] [B, T] and ["flow_value"] [B, T, K]; returns A [B, T, K].
    """
    advantage = rollouts.extras["flow_return"][..., None] - rollouts.extras["flow_value"]
    return standardise(advantage, rollouts.alive[..., None].expand(advantage.shape))


@mechanism(Slot.ADVANTAGE, "discriminator", source="AFD, arXiv:2605.26105", needs=(Need.PREFERENCE,))
def discriminator(rollouts: Rollouts, context: Context) -> Tensor:
    """A = D(s, a) - mean D: how much more a decision looks like the teacher's than the student's decisions do.

    D is the model discriminator; standardised over the batch of the student's own decisions. Reads
    extras["preference"] [B, T]; returns A [B, T].
    """
    return standardise(rollouts.extras["preference"], rollouts.alive)


@mechanism(Slot.ADVANTAGE, "egae", source="Truncated PPO (EGAE), arXiv:2506.15050", needs=(Need.CRITIC, Need.FINISHED))
def egae(rollouts: Rollouts, context: Context) -> Tensor:
    """GAE of windows that end anywhere: where a window is cut, V there stands for all that would have followed.

    T-PPO takes V(s_{l+1}) = V(s_l) at the cut, having no next state; a world shows it, so V(s_{l+1}) itself is used.
    Its critic learns from finished episodes only, by their discounted returns (`finished_returns`). Reads
    extras["advantage_gae"] [B, T]; returns A [B, T], standardised over the batch.
    """
    return standardise(rollouts.extras["advantage_gae"], rollouts.alive)


def finished_returns(rollouts: Rollouts, rewards: Tensor, discount: Tensor) -> tuple[Tensor, Tensor]:
    """Return Monte-Carlo returns [B, T] and which of them are known: decisions whose episode ended in the window.

    rewards: [B, T] of each decision; discount: [B, T], gamma ** duration.
    """
    following = torch.zeros_like(rewards[:, 0])
    known = torch.zeros_like(rollouts.ended[:, 0])
    returns: list[Tensor] = []
    finished: list[Tensor] = []
    for column in reversed(range(rewards.shape[1])):
        ended = rollouts.ended[:, column]
        following = rewards[:, column] + discount[:, column] * following * ~ended
        known = ended | known
        returns.append(following)
        finished.append(known)
    return torch.stack(returns[::-1], 1), torch.stack(finished[::-1], 1)
