"""Coefficients that keep the new policy near the old one: adaptive clips, exact KL limits, mirror descent."""

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.rl.coefficients.ppo import ppo
from robopolicy.rl.context import Coefficients, Scored
from robopolicy.rl.registry import Need, Slot, mechanism


@mechanism(Slot.COEFFICIENT, "bapo", source="BAPO, arXiv:2510.18927")
def bapo(
    scored: Scored,
    *,
    low: tuple[float, float] = (0.6, 0.9),
    high: tuple[float, float] = (1.2, 3.0),
    step: float = 0.05,
    positive_share: float = 0.5,
) -> Coefficients:
    """PPO whose bounds widen until good decisions make up `positive_share` of the surrogate's size.

    That is P / (P + N) with P = sum of min(r, top) A where A > 0, N = sum of max(r, bottom) |A| where A < 0: the values
    of the clipped surrogate, clipped steps included. The lower bound rises first, then the upper one.
    """
    bottom, top = low[0], high[0]
    share = _positive_share(scored, bottom, top)
    while float(share) < positive_share and (bottom < low[1] - 1e-9 or top < high[1] - 1e-9):
        if bottom < low[1] - 1e-9:
            bottom = min(bottom + step, low[1])
        else:
            top = min(top + step, high[1])
        share = _positive_share(scored, bottom, top)
    c = ppo(scored.log_ratio, scored.advantage, 1 - bottom, top - 1, scored.clamped)
    bounds = {"bapo_low": torch.tensor(bottom), "bapo_high": torch.tensor(top)}
    return c, {**bounds, "positive_share": share.detach()}


def _positive_share(scored: Scored, bottom: float, top: float) -> Tensor:
    good = (scored.ratio.clamp(max=top) * scored.advantage.clamp(min=0))[scored.mask].sum()
    bad = (scored.ratio.clamp(min=bottom) * scored.advantage.clamp(max=0))[scored.mask].sum().abs()
    return good / (good + bad).clamp(min=1e-12)


def mean_shift(scored: Scored) -> tuple[Tensor, Tensor]:
    """Return |mean - mean_old|^2 / (2 std^2) averaged over the executed elements, and std, both [b, t, K].

    It is KL(old || new) of a Gaussian step, per dimension. latents["mean"] holds the behaviour's means
    [b, t, K', P, A]; raises ConfigError where the policy's likelihood keeps none.
    """
    if "mean" not in scored.rollouts.latents:
        raise ConfigError(
            "This needs the means of the behaviour's steps, which this policy's likelihood does not keep."
        )
    mean, std = scored.extra("mean"), scored.extra("std")
    old = scored.rollouts.latents["mean"]
    old = torch.gather(old, 2, scored.chosen[..., None, None].expand(mean.shape))
    # What lies behind the executed steps of a chunk was drawn but has moved nothing.
    executed = scored.rollouts.valid[:, :, None, :, None].to(mean.dtype)
    chunk = executed.shape[3]
    distance = ((mean - old).square() / (2 * std.square().clamp(min=1e-12)))[..., :chunk, :] * executed
    count = (executed.sum((3, 4)) * mean.shape[-1]).clamp(min=1)
    return distance.sum((3, 4)) / count, std.expand(mean.shape).flatten(3)[..., 0]


def guarded_log_ratio(log_ratio: Tensor, shift: Tensor, std: Tensor) -> Tensor:
    """Return GRPO-Guard's regulated log-ratio: the left shift of a Gaussian step's ratio taken out, all [b, t, K].

        log r' = [log r + |mean - mean_old|^2 / (2 std^2)] * std

    log_ratio and shift must be reduced alike over dimensions. Under samples of the old policy E[log r'] = 0, while
    E[log r] = -shift; the factor std makes all steps alike in scale. Source: GRPO-Guard, arXiv:2510.22319 (public
    documentation).
    """
    # With x ~ N(mean_old, std) the log-ratio has mean -shift and standard deviation |mean - mean_old| / std: adding the
    # shift centres it, multiplying by std makes it depend on the distance alone, whatever the step's noise.
    return (log_ratio + shift) * std


@mechanism(Slot.COEFFICIENT, "grpo_guard", source="GRPO-Guard, arXiv:2510.22319", needs=(Need.MEANS, Need.STEP_RATIOS))
def grpo_guard(scored: Scored, *, summed: bool = False, balance: bool = False) -> Coefficients:
    """PPO on ratios whose mean is held at 1: the clip bites equally on both sides of a Gaussian step.

    c = std r' A, the gradient of the clipped surrogate of r' (see `guarded_log_ratio`; deviation: the shift's own
    gradient, second order in the step, is dropped). summed: log-probabilities are sums over dimensions
    (policy.logp_reduction=sum). Clip widths are those of the scaled log-ratio, std times smaller. balance: times
    mean(std^2) / std^2, the paper's 1 / dt: a step of length dt has a variance in proportion to dt. Our flows take even
    steps, where it changes nothing; a chain of denoising steps that predicts the clean action moves its mean most at
    the end already, and is thrown off by it, so it is off.
    """
    shift, std = mean_shift(scored)
    if summed:
        shift = shift * scored.rollouts.duration[..., None] * scored.rollouts.actions.shape[-1]
    log_ratio = guarded_log_ratio(scored.log_ratio, shift, std)
    # d log r' / d log pi = std, by the chain rule.
    c = std * ppo(log_ratio, scored.advantage, scored.clip_low, scored.clip_high, scored.clamped)
    if balance:
        c = c * std[scored.mask].square().mean() / std.square().clamp(min=1e-12)
    plain, guarded = scored.ratio[scored.mask].mean(), log_ratio.exp()[scored.mask].mean()
    return torch.where(scored.mask, c, 0.0), {"ratio_mean": plain, "guarded_ratio_mean": guarded}
