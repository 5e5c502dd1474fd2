"""Rollouts of whole episodes made of random numbers, for tests of pure functions."""

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts
from robopolicy.core.spec import STATE
from robopolicy.rl.context import Scored
from robopolicy.rl.objective import log_ratios
from robopolicy.rl.presets import RatioLevel


def make_rollouts(
    lengths: list[int],
    group: list[int],
    returns: list[float] | None = None,
    *,
    steps: int = 2,
    seed: int = 0,
    parent: list[int] | None = None,
    branch_decision: list[int] | None = None,
) -> Rollouts:
    """Episodes of so many decisions (2 control steps each); the last decision's last step pays the return."""
    draws = torch.Generator().manual_seed(seed)
    count, longest = len(lengths), max(lengths)
    time = torch.arange(longest)
    alive = time[None] < torch.tensor(lengths)[:, None]
    last = time[None] == torch.tensor(lengths)[:, None] - 1
    reward = torch.zeros(count, longest, 2)
    paid = torch.tensor(returns if returns is not None else torch.randn(count, generator=draws).tolist())
    reward[..., 1] = torch.where(last, paid[:, None], 0.0)
    zero = torch.zeros(count, longest, dtype=torch.bool)
    alone = [-1] * count
    return Rollouts(
        observation={STATE: torch.randn(count, longest, 1, 3, generator=draws)},
        next_observation={STATE: torch.randn(count, longest, 1, 3, generator=draws)},
        latents={"x": torch.randn(count, longest, steps, generator=draws)},
        actions=torch.randn(count, longest, 2, 1, generator=draws),
        logp_behaviour=torch.randn(count, longest, steps, generator=draws, dtype=torch.float64),
        mask=alive[..., None].expand(count, longest, steps).clone(),
        rewards={"reward": reward},
        valid=alive[..., None].expand(count, longest, 2).clone(),
        terminated=last,
        truncated=zero,
        horizon_end=zero,
        success=last & (paid > 0)[:, None],
        task=torch.zeros(count, longest, dtype=torch.int64),
        policy_version=torch.zeros(count, longest, dtype=torch.int64),
        episode=torch.arange(count),
        group=torch.tensor(group),
        parent=torch.tensor(parent or alone),
        branch_decision=torch.tensor(branch_decision or alone),
        whole=True,
    )


def make_scored(
    rollouts: Rollouts,
    logp: Tensor,
    advantage: Tensor,
    clip: tuple[float, float] = (0.2, 0.2),
    level: RatioLevel = RatioLevel.STEP,
    extras: dict[str, Tensor] | None = None,
    steps_per_action: int = 0,
) -> Scored:
    """A minibatch as the trainer would score it."""
    mask = rollouts.mask & rollouts.alive[..., None]
    ratios = log_ratios(logp, rollouts.proximal, mask, 20.0, level, steps_per_action)
    return Scored(
        logp=logp.detach(),
        log_ratio=ratios.log_ratio,
        clamped=ratios.clamped,
        staleness=torch.where(mask, rollouts.proximal - rollouts.logp_behaviour, 0.0),
        advantage=advantage,
        mask=mask,
        clip_low=torch.full_like(logp, clip[0]).detach(),
        clip_high=torch.full_like(logp, clip[1]).detach(),
        chosen=torch.arange(logp.shape[-1]).expand(logp.shape),
        rollouts=rollouts,
        extra=lambda name: (extras or {})[name],
    )
