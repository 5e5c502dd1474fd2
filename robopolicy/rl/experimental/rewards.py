"""Experimental rewards for milestones, speed, smoothness and progress under a prover, and weights of the loss by
duration and by chunk.
"""

from dataclasses import replace

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


@mechanism(Slot.REWARD, "partial_credit", source="MLE-RL (partial credit), arXiv:2509.01684")
def partial_credit(
    rollouts: Rollouts,
    context: Context,
    *,
    milestones: tuple[float, ...] = (1.0, 2.0, 4.0),
    credit: float = 0.5,
    keep: tuple[str, ...] = ("uncertainty",),
) -> Rollouts:
    """Reward failed episodes for the milestones they reached, at most `credit` in total; a success gets 1.

    Milestones are thresholds on the cumulative world reward, without success, since an episode's start. Each pays an
    equal part of `credit`, once, at the control step that reaches it, and success pays the remainder up to 1. In the
    paper, instrumented program code prints the milestones; for a robot they are those of the task's progress. Of the
    other rewards only `keep` stays.
    """
    dense_rewards = [value for name, value in rollouts.rewards.items() if name not in ("success", *keep)]
    gains = (
        torch.where(rollouts.valid, torch.stack(dense_rewards).sum(0), 0.0)
        if dense_rewards
        else torch.zeros(rollouts.valid.shape)
    )
    levels = torch.tensor(milestones, device=rollouts.valid.device)
    milestones_reached = torch.zeros_like(rollouts.group)
    sum_before, has_succeeded = torch.zeros_like(gains[:, 0, 0]), torch.zeros_like(rollouts.success[:, 0])
    columns: list[torch.Tensor] = []
    for column in range(rollouts.shape[1]):
        total = sum_before[:, None] + gains[:, column].cumsum(-1)
        milestones_passed = (total[..., None] >= levels).sum(-1)
        # A milestone stays passed where the sum falls again: it is paid once.
        milestones_passed = torch.maximum(milestones_passed.cummax(-1).values, milestones_reached[:, None])
        new_milestones = torch.cat([milestones_reached[:, None], milestones_passed], 1).diff(dim=1)
        pay = torch.where(
            rollouts.valid[:, column] & ~has_succeeded[:, None], new_milestones * (credit / len(milestones)), 0.0
        )
        first = rollouts.success[:, column] & ~has_succeeded & rollouts.alive[:, column]
        remainder = torch.where(first, 1 - credit * milestones_passed[:, -1] / len(milestones), 0.0)
        last = (rollouts.duration[:, column] - 1).clamp(min=0)
        columns.append(pay.scatter_add(-1, last[:, None], remainder[:, None]))
        is_over = rollouts.ended[:, column]
        has_succeeded = (has_succeeded | first) & ~is_over
        milestones_reached, sum_before = (
            torch.where(is_over, 0, milestones_passed[:, -1]),
            torch.where(is_over, 0.0, total[:, -1]),
        )
    rewards = torch.stack(columns, 1)
    other_rewards = {name: rollouts.rewards[name] for name in keep if name in rollouts.rewards}
    return replace(rollouts, rewards={"success": rewards, **other_rewards})


@mechanism(Slot.REWARD, "hurry", source="length shaping, cf. PALU and DRPO")
def hurry(rollouts: Rollouts, context: Context, *, cost: float = 0.01) -> Rollouts:
    """Penalise successful episodes by `cost` per control step; a slow success stays better than a failure."""
    charged = (rollouts.success.any(1) if rollouts.whole else torch.ones_like(rollouts.group, dtype=torch.bool))[
        :, None
    ]
    time = torch.where(rollouts.valid & charged[..., None], -cost, 0.0)
    return replace(rollouts, rewards={**rollouts.rewards, "time": time})


@mechanism(Slot.REWARD, "smooth", source="action-rate penalty of robot learning")
def smooth(rollouts: Rollouts, context: Context, *, cost: float = 0.1) -> Rollouts:
    """Penalise the squared change of the action between control steps of a chunk by `cost`."""
    change = (rollouts.actions[:, :, 1:] - rollouts.actions[:, :, :-1]).square().mean(-1)
    change = torch.cat([change.new_zeros((*change.shape[:2], 1)), change], 2)  # nothing comes before the first step
    charged = torch.where(rollouts.valid, -cost * change, 0.0)
    return replace(rollouts, rewards={**rollouts.rewards, "smooth": charged})


@mechanism(Slot.REWARD, "pav", source="PAV, arXiv:2410.08146", needs=(Need.VALUES,))
def progress_under_prover(rollouts: Rollouts, context: Context, *, alpha: float = 0.5, tries: int = 4) -> Rollouts:
    """Add alpha times the advantage of each chunk under a prover: the best of `tries` attempts of the policy.

    With success probabilities Q and V of the model q_ensemble (target=monte_carlo), the prover's are 1 - (1 - Q)^tries.
    """

    def prover(value: torch.Tensor) -> torch.Tensor:
        return 1 - (1 - value.clamp(0, 1)) ** tries

    gain = torch.where(rollouts.alive, prover(rollouts.extras["q"]) - prover(rollouts.extras["v"]), 0.0)
    reward = torch.zeros_like(rollouts.valid, dtype=torch.float32)
    last = (rollouts.valid.sum(-1) - 1).clamp(min=0)
    return replace(
        rollouts, rewards={**rollouts.rewards, "prover": reward.scatter(-1, last[..., None], alpha * gain[..., None])}
    )


@mechanism(Slot.WEIGHT, "duration", source="MLE-RL (duration-aware gradients), arXiv:2509.01684")
def weigh_by_duration(mask: Tensor, rollouts: Rollouts) -> Tensor:
    """Weight a chunk by its number of control steps, so that asynchronous collection does not favour short ones.

    Takes a mask [b, t, K] and returns weights of that shape, which sum to 1.
    """
    weight = mask.float() * rollouts.duration[..., None]
    return weight / weight.sum().clamp(min=1e-12)


def decision_mean(mask: Tensor) -> Tensor:
    """Weight every row [t, K] equally, and in it every chunk: the mean over rows of means over chunks of means over
    steps (AgentFlow).
    """
    per_chunk = mask.sum(-1, keepdim=True)
    chunks = (per_chunk > 0).sum(-2, keepdim=True)
    rows = (chunks > 0).sum().clamp(min=1)
    return mask.float() / per_chunk.clamp(min=1) / chunks.clamp(min=1) / rows


@mechanism(Slot.WEIGHT, "decision_mean", source="AgentFlow, arXiv:2510.05592")
def weigh_decisions(mask: Tensor, rollouts: Rollouts) -> Tensor:
    """Weight every episode equally, in it every chunk, and in that every step (the mean over an agent's turns).

    The same as episode_mean if all chunks have as many scored steps. In minibatches of single chunks an episode's size
    is extras["episode_decisions"] [b, t], and weights are normalised to a sum of 1. Takes a mask [b, t, K] and returns
    weights of that shape.
    """
    if "episode_decisions" not in rollouts.extras:
        return decision_mean(mask)
    chunks = rollouts.extras["episode_decisions"][..., None].clamp(min=1)
    weight = mask.float() / mask.sum(-1, keepdim=True).clamp(min=1) / chunks
    return weight / weight.sum().clamp(min=1e-12)
