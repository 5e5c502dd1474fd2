"""Coefficients for data that another policy made: decoupled clips, and masks in the place of clips.

Every one is c with d(loss)/d(logp) = -w c; where a paper states a surrogate, its gradient was taken by hand and is
compared with autograd in the tests.
"""

import torch

from robopolicy.rl.coefficients.ppo import ppo
from robopolicy.rl.context import Coefficients, Scored
from robopolicy.rl.registry import Slot, mechanism


@mechanism(Slot.COEFFICIENT, "decoupled_ppo", source="AReaL, arXiv:2505.24298; Hilton et al. 2022, arXiv:2110.00641")
def decoupled_ppo(scored: Scored, *, limit: float = 5.0) -> Coefficients:
    """PPO clipped around the proximal policy, times proximal / behaviour, capped at `limit` and without gradient.

    The papers have no cap; AReaL's code drops steps above 5 or, as here, caps them.
    """
    c = ppo(scored.log_ratio, scored.advantage, scored.clip_low, scored.clip_high, scored.clamped)
    # Two ratios with two tasks: this one corrects for who played, the clip around proximal bounds the step.
    weight = scored.staleness.exp().clamp(max=limit)
    return weight * c, {"staleness_weight": weight[scored.mask].mean()}


@mechanism(Slot.COEFFICIENT, "clip_cov", source="Clip-Cov, arXiv:2505.22617; SPEAR, arXiv:2509.22601")
def clip_cov(scored: Scored, *, share: float = 0.0002, limit: float = 5.0) -> Coefficients:
    """Decoupled PPO without the steps that take most entropy: those whose probability goes along with their advantage.

        cov = (log pi - mean) (A - mean),   over the minibatch's scored steps

    sums to what a step of the policy gradient takes from the entropy. The `share` of steps with the largest, where it
    is above 0, get no gradient; they are counted in the averages. The published share is so small that minibatches of
    fewer than 1 / share steps lose none. Deviation: Clip-Cov draws them at random between bounds on cov that were tuned
    to words. limit: as in decoupled_ppo.
    """
    c, stats = decoupled_ppo(scored, limit=limit)
    mask = scored.mask
    logp = scored.logp
    advantage = scored.advantage
    product = (logp - logp[mask].mean()) * (advantage - advantage[mask].mean())
    covariance = torch.where(mask, product, -torch.inf)
    count = int(share * int(mask.sum()))
    taken = torch.zeros_like(mask).flatten().scatter(0, covariance.flatten().topk(count).indices, True)
    taken = taken.reshape(mask.shape) & (covariance > 0)
    return torch.where(taken, 0.0, c), {**stats, "covariance": covariance[mask].mean()}
