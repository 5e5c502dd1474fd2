"""Conversion of head outputs: two-hot regression, success thresholds, potential-based rewards, quantiles.

Two-hot regression uses symlog-spaced bins (DreamerV3, Hafner et al. 2023, arXiv:2301.04104). `ImaginedWorld` debounces
success (its setting debounce).
"""

import torch
from torch import Tensor

from robopolicy.core.former_names import keep_former_names
from robopolicy.core.segments import quantile

BINS = 255

LIMIT = 6.0
"""Two-hot bins span symexp(-LIMIT) to symexp(LIMIT), 402 standard deviations. DreamerV3 uses 20, for rewards of any
scale. Rewards here are standardised, and bins of 1e8 would turn a probability of 1e-8 into an error.
"""


def symexp(value: Tensor) -> Tensor:
    """Return sign(x) (exp(|x|) - 1) of each value [...]: the inverse of symlog, sign(x) log(1 + |x|)."""
    return value.sign() * value.abs().expm1()


def reward_bins() -> Tensor:
    """Return the bin values [BINS] of a two-hot head, in ascending order."""
    return symexp(torch.linspace(-LIMIT, LIMIT, BINS))


def two_hot(value: Tensor, bins: Tensor) -> Tensor:
    """Return weights [..., BINS] on the two bins around `value` [...]; their mean is the value."""
    value = value.clamp(bins[0], bins[-1])
    above = torch.searchsorted(bins, value.contiguous()).clamp(1, len(bins) - 1)
    low, high = bins[above - 1], bins[above]
    # Weights 1 - share and share on the bins below and above: (1 - share) low + share high = value.
    share = ((value - low) / (high - low))[..., None]
    weights = torch.zeros(*value.shape, len(bins), device=value.device)
    return weights.scatter(-1, above[..., None] - 1, 1 - share).scatter(-1, above[..., None], share)


def two_hot_mean(logits: Tensor, bins: Tensor) -> Tensor:
    """Return the mean [...] of distributions over bins; opposite bins are summed in pairs, so that 0 is exact."""
    weighted = logits.softmax(-1) * bins
    return 0.5 * (weighted + weighted.flip(-1)).sum(-1)


def calibrated_threshold(logit: Tensor, label: Tensor) -> Tensor:
    """Return the threshold [] that the same number of logits [N] exceed as labels [N] are true; infinity if none is.

    Precision equals recall at this threshold. It compensates the batch's fraction of positives and keeps imagined
    success rates unbiased.
    """
    if not bool(label.any()):
        return torch.tensor(torch.inf)
    return quantile(logit.double(), 1 - label.double().mean().to(logit.device)).float()


def potential_explains_rewards(potential: Tensor, reward: Tensor, predicted: Tensor, tolerance: float = 0.1) -> bool:
    """Return whether the increase of a potential [N] explains rewards [N] as well as a head's predictions `predicted`
    [N].

    tolerance: fraction of the rewards' variance by which it may be worse. Policies exploit imagined progress that is
    not the increase of a potential by going in circles. Increases of a potential prevent this, which justifies a
    slightly larger error.
    """
    error_limit = (predicted - reward).square().mean() + tolerance * reward.var(correction=0)
    return bool((potential - reward).square().mean() <= error_limit)


def quantiles_of(value: Tensor, count: int = 101) -> Tensor:
    """Return `count` evenly spaced quantiles of values [N], including minimum and maximum."""
    return quantile(value, torch.linspace(0, 1, count, device=value.device))


keep_former_names(__name__, {"explains_as_well": "potential_explains_rewards"})
