"""Coefficients c such that the gradient of `-sum(w * sg(c) * logp)` is that of the surrogate they stand for."""

import math

import torch
from torch import Tensor

from robopolicy.rl.context import Coefficients, Scored
from robopolicy.rl.registry import Slot, mechanism


def ppo(
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: Tensor | float,
    clip_high: Tensor | float,
    clamped: Tensor | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """Return the coefficient of PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347), shaped as log_ratio.

    The surrogate min(r A, clip(r, 1 - low, 1 + high) A) has gradient c * grad(logp) with

        c = r A  where  (A >= 0 and r <= 1 + high) or (A < 0 and r >= 1 - low),  else 0.

    dual_clip: with A < 0 also 0 where r exceeds it (Ye et al. 2020, arXiv:1912.09729). clamped: entries whose log-ratio
    was clamped get 0, as the clamp's own gradient says. Clip widths broadcast, e.g. one per step [K].
    """
    # d/dtheta of r A is r A grad(logp), since grad r = r grad(logp): the surrogate's gradient is a coefficient on the
    # score. Where the clip is the smaller of the two, the surrogate is constant and the coefficient 0.
    ratio = log_ratio.exp()
    inside = torch.where(advantage >= 0, ratio <= 1 + clip_high, ratio >= 1 - clip_low)
    if dual_clip is not None:
        inside = inside & ((advantage >= 0) | (ratio <= dual_clip))
    if clamped is not None:
        inside = inside & ~clamped
    return torch.where(inside, ratio * advantage, 0.0)


@mechanism(Slot.COEFFICIENT, "ppo", source="Schulman et al. 2017, arXiv:1707.06347; dual clip: arXiv:1912.09729")
def clipped(
    scored: Scored, *, dual_clip: float | None = None, low: float | None = None, high: float | None = None
) -> Coefficients:
    """PPO's clipped ratio; with the ratio level of an episode it is GSPO, of an action Rank-GRPO.

    Widths: low and high, null for clip (and clip_high, clip_base, clip_rate). dual_clip bounds the ratio of bad
    decisions.
    """
    widths = scored.clip_low if low is None else low, scored.clip_high if high is None else high
    c = ppo(scored.log_ratio, scored.advantage, *widths, scored.clamped, dual_clip)
    return c, {}


def clip_schedule(steps: int, base: float, epsilon: float, rate: float) -> Tensor:
    """Return DPPO's clip width per step, [K], from `base` at the noisiest to `epsilon` at the cleanest step.

        eps_i = base + (epsilon - base) * (e^(rate t_i) - 1) / (e^rate - 1),   t_i = i / (K - 1)

    Source: Ren et al. 2024, arXiv:2409.00588. K = 1 is the cleanest step (t = 1); rate 0 is the linear limit. A width
    belongs to its log-probability reduction: .01 on a mean over 28 dimensions is about .28 on their sum.
    """
    t = torch.linspace(0.0, 1.0, steps, dtype=torch.float64) if steps > 1 else torch.ones(1, dtype=torch.float64)
    shape = t if rate == 0 else torch.expm1(rate * t) / math.expm1(rate)
    return (base + (epsilon - base) * shape).float()
