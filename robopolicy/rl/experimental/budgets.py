"""Experimental budgets of time that a policy is asked and paid to keep: HBPO, arXiv:2507.15844.

A policy hears its budget in the wording of the instruction: the i-th of a world's wordings of the same instruction
(world.options.phrasing=all, `Task.paraphrases`) stands for the i-th budget. Figures are those of the authors' code
(github.com/ZJU-REAL/HBPO), whose 512, 1024, 2048 and 2560 of 4096 tokens are fractions of the horizon here.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.rl.advantages.group import broadcast, outcomes
from robopolicy.rl.context import Context
from robopolicy.rl.initial_states import Uniform
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.rewards import paid_at_end


@mechanism(
    Slot.ALLOCATOR,
    "budgets",
    source="HBPO, arXiv:2507.15844",
    needs=(Need.GROUPS, Need.STARTS, Need.INSTRUCTIONS),
    gives=(Need.BUDGETS,),
)
class Budgets(Uniform):
    """Divide every group among `budgets`, fractions of the horizon, of which each has its own wording of the
    instruction.

    Adds extras["budget"]. Collection is refused where an instruction has another number of wordings. A success within
    a budget of the complete horizon is worth no more than a failure.
    """

    def __init__(self, *, budgets: tuple[float, ...] = (0.125, 0.25, 0.5, 0.625)):
        self.budgets = tuple(budgets)


def allowance(budget: Tensor, horizon: Tensor, beta: float) -> Tensor:
    """Return beta cos(pi b / 2L), the worth of a success within a budget b of L control steps, [...]."""
    return beta * torch.cos(math.pi * budget / (2 * horizon))


@mechanism(Slot.REWARD, "budget", source="HBPO, arXiv:2507.15844", needs=(Need.EPISODES, Need.BUDGETS))
def pay_by_budget(
    rollouts: Rollouts,
    context: Context,
    *,
    alpha: float = 1.0,
    beta: float = 4.0,
    keep: tuple[str, ...] = ("uncertainty",),
) -> Rollouts:
    """Pay a success of n control steps beta cos(pi max(n, b) / 2L), minus alpha (n - b) / L beyond its budget b.

    L: the horizon. So a success within its budget is worth what the budget says, a longer one less. Of the other
    rewards only `keep` stays.
    """
    budget, horizon = rollouts.extras["budget"][:, 0].unbind(-1)
    steps = rollouts.duration.sum(1).to(budget.dtype)
    over = (steps - budget).clamp(min=0) / horizon
    worth = torch.where(
        rollouts.row_success, allowance(torch.maximum(steps, budget), horizon, beta) - alpha * over, 0.0
    )
    reward = paid_at_end(rollouts, worth)
    other_rewards = {name: rollouts.rewards[name] for name in keep if name in rollouts.rewards}
    return replace(rollouts, rewards={"success": reward, **other_rewards})


@mechanism(Slot.ADVANTAGE, "budget_groups", source="HBPO, arXiv:2507.15844", needs=(Need.GROUPS, Need.BUDGETS))
def budget_groups(rollouts: Rollouts, context: Context, *, beta: float = 4.0) -> Tensor:
    """A = (mean return of the budget's part of the group - beta cos(pi b / 2L)) + (R - group mean) / group deviation.

    The first term compares a budget with what it promises, the second one episodes across budgets. beta: as in
    rewards=[budget]. The authors' code adds the first term twice and divides by the sample's deviation; this is the
    paper's sum, with the population's. Their loss is a mean over steps (weight=step_mean), with one epoch. Returns A
    [B, T], constant over an episode.
    """
    returns, counts, groups = outcomes(rollouts)
    budget, horizon = rollouts.extras["budget"][:, 0].unbind(-1)
    parts = Segments.of(rollouts.group, budget.round())
    within = parts.mean(returns, counts)[parts.index] - allowance(budget, horizon, beta)
    centred = returns - groups.mean(returns, counts)[groups.index]
    across = centred / (groups.std(returns, counts)[groups.index] + 1e-6)
    return broadcast(torch.where(counts, within + across, 0.0), rollouts)
