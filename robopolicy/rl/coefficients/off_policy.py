"""Coefficients for data that another policy made: decoupled clips, masks instead of clips, adaptive bounds.

Every one is c with d(loss)/d(logp) = -w c; where a paper states a surrogate, its gradient was taken by hand and is
compared with autograd in the tests.
"""

import torch
from torch import Tensor

from robopolicy.rl.coefficients.ppo import ppo
from robopolicy.rl.context import Coefficients, Scored
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option


def masked_share(chosen: Tensor, mask: Tensor) -> Tensor:
    """Return which share of the masked entries is chosen, a scalar; both [b, t, K] bool."""
    return (chosen & mask).sum() / mask.sum().clamp(min=1)


@mechanism(Slot.COEFFICIENT, "decoupled_ppo", source="AReaL, arXiv:2505.24298; Hilton et al. 2022, arXiv:2110.00641")
def decoupled_ppo(scored: Scored, *, limit: float = 5.0) -> Coefficients:
    """PPO clipped around the proximal policy, times proximal / behaviour, capped at `limit` and without gradient.

    The papers have no cap; AReaL's code drops steps above 5 or, as here, caps them.
    """
    c = ppo(scored.log_ratio, scored.advantage, scored.clip_low, scored.clip_high, scored.clamped)
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


@mechanism(Slot.COEFFICIENT, "cispo", source="MiniMax-M1, arXiv:2506.13585")
def cispo(scored: Scored, *, low: float = 1.0, high: float = 0.28) -> Coefficients:
    """REINFORCE weighted by the clipped ratio: c = clip(r, 1 - low, 1 + high) A; no step ever loses its gradient."""
    return scored.ratio.clamp(1 - low, 1 + high) * scored.advantage, {}


@mechanism(Slot.COEFFICIENT, "rec", source="REC, masked REINFORCE, arXiv:2509.24203")
def rec(
    scored: Scored,
    *,
    region: str = "one_side",
    importance: bool = True,
    low: float = 0.2,
    high: float = 0.2,
    far_low: float = 0.6,
    far_high: float = 2.0,
) -> Coefficients:
    """REINFORCE on any data: c = w M A with the ratio as a mask M instead of a clip.

    region: one_side drops what has already moved far enough (PPO's own mask), two_side everything outside
    [1 - low, 1 + high]; ring keeps besides that what has moved far the wrong way, r <= 1 - far_low with A >= 0 and
    r >= 1 + far_high with A <= 0, and drops the ring between; importance: w is the ratio, else 1. Raises ConfigError
    for another region.
    """
    ratio = scored.ratio
    good = scored.advantage >= 0
    bad = scored.advantage <= 0
    inside = (ratio >= 1 - low) & (ratio <= 1 + high)
    one_side = torch.where(good, ratio <= 1 + high, ratio >= 1 - low)
    astray = (good & (ratio <= 1 - far_low)) | (bad & (ratio >= 1 + far_high))
    masks = {"one_side": one_side, "two_side": inside, "ring": inside | astray}
    if region not in masks:
        raise unknown_option("rec.region", region, masks)
    weight = ratio if importance else torch.ones_like(ratio)
    kept = masks[region] & ~scored.clamped
    return torch.where(kept, weight * scored.advantage, 0.0), {"kept": masked_share(kept, scored.mask)}


@mechanism(Slot.COEFFICIENT, "opmd", source="OPMD, as in REC, arXiv:2509.24203; Kimi k1.5, arXiv:2501.12599")
def opmd(scored: Scored, *, tau: float = 1.0) -> Coefficients:
    """Online mirror descent without importance weights: c = (A - tau (log pi - log pi_old)) / (1 + tau).

    The gradient of -A logp + tau/2 (log pi - log pi_old)^2, scaled to the size of REINFORCE's.
    """
    return (scored.advantage - tau * scored.log_ratio) / (1 + tau), {}


@mechanism(Slot.COEFFICIENT, "asym_re", source="AsymRE, arXiv:2506.20520")
def asym_re(scored: Scored, *, shift: float = -0.1) -> Coefficients:
    """Off-policy REINFORCE with a baseline lowered by |shift|: c = A - shift, so that successes weigh more."""
    return scored.advantage - shift, {}


@mechanism(
    Slot.COEFFICIENT,
    "min_pro",
    source="MinPRO, arXiv:2601.22718",
    needs=(Need.WHOLE_EPISODES, Need.STEP_RATIOS),
)
def min_pro(scored: Scored, *, cap: float = 5.0) -> Coefficients:
    """REINFORCE weighted by r_t times the smallest ratio before it, instead of the product of all of them.

    c = sg(clip(r_t min_{j < t} r_j, 0, cap)) A, over the scored steps of an episode in order; the first has no prefix
    (the form of the cap is ours: the paper's is uncertain). Stays bounded where prefix products explode or vanish.
    """
    # An unbiased weight is the product of all ratios so far, whose variance grows without bound along the episode. The
    # smallest ratio before stands for that product: what follows an unlikely step counts little.
    log_ratio = torch.where(scored.mask, scored.log_ratio, torch.inf).flatten(1)
    before = torch.cat([torch.full_like(log_ratio[:, :1], torch.inf), log_ratio.cummin(1).values[:, :-1]], 1)
    prefix = torch.where(before.isinf(), 0.0, before).reshape(scored.log_ratio.shape)
    weight = torch.where(scored.mask, (scored.log_ratio + prefix).exp().clamp(max=cap), 0.0)
    return weight * scored.advantage, {"prefix_weight": weight[scored.mask].mean()}
