"""What tells a healthy update from a sick one; everything is a tensor until it is logged."""

import torch
from torch import Tensor


def approximate_kl(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return KL(old || new) of a whole decision: the sum over steps of the mean of (r - 1) - log r, a scalar.

    log_ratio, mask: [N, K]. The estimator is k3 of Schulman (joschu.net/blog/kl-approx): unbiased for log-probabilities
    that are sums over dimensions, never negative. With log-probabilities that are means over D dimensions it is a
    per-dimension figure that cannot be compared with a summed one.
    """
    terms = torch.where(mask, torch.expm1(log_ratio) - log_ratio, 0.0)
    return (terms.sum(0) / mask.sum(0).clamp(min=1)).sum()


def clip_fraction(log_ratio: Tensor, mask: Tensor, clip_low: Tensor | float, clip_high: Tensor | float) -> Tensor:
    """Return the share of scored steps [N, K] whose ratio is outside [1 - low, 1 + high], a scalar."""
    ratio = log_ratio.exp()
    outside = ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)) & mask
    return outside.sum() / mask.sum().clamp(min=1)


def effective_sample_size(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return (sum w)^2 / (n sum w^2) in (0, 1], a scalar; w [N]: the ratio of the whole decision, exp(sum [N, K])."""
    joint = torch.where(mask, log_ratio, 0.0).sum(-1)
    weights = (joint - joint.max()).exp()
    return weights.sum().square() / (weights.square().sum() * weights.numel())


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """Return 1 - Var(returns - values) / Var(returns) of [N] each: 1 is a perfect critic, 0 like a constant.

    NaN where all returns are the same: there is nothing to explain.
    """
    variance = returns.var(unbiased=False)
    explained = 1 - (returns - values).var(unbiased=False) / variance.clamp(min=1e-12)
    return torch.where(variance > 1e-12, explained, torch.nan)
