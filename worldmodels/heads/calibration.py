"""What turns a head's output into what is paid: thresholds of success, the choice of a potential, and quantiles.

Success is debounced by the world around a model (`ImaginedWorld`, its debounce).
"""

import torch
from torch import Tensor

from robopolicy.core.segments import quantile


def calibrated_threshold(logit: Tensor, label: Tensor) -> Tensor:
    """Return the threshold [] above which as many logits [N] lie as labels [N] are true; infinity if none is.

    Precision equals recall there: it undoes a batch's share of positives, and keeps imagined success rates unbiased.
    """
    if not bool(label.any()):
        return torch.tensor(torch.inf)
    return quantile(logit.double(), 1 - label.double().mean().to(logit.device)).float()


def explains_as_well(potential: Tensor, reward: Tensor, predicted: Tensor, tolerance: float = 0.1) -> bool:
    """Return whether the increase of a potential [N] explains rewards [N] as well as a head that `predicted` them [N].

    tolerance: share of the rewards' variance by which it may be worse. Imagined progress that is no increase of
    any potential can be earned by going in circles, and policies find out; increases of a potential cannot, which is
    worth a slightly larger error.
    """
    allowed = (predicted - reward).square().mean() + tolerance * reward.var(correction=0)
    return bool((potential - reward).square().mean() <= allowed)


def quantiles_of(value: Tensor, count: int = 101) -> Tensor:
    """Return `count` evenly spaced quantiles of values [N], the lowest and the highest among them."""
    return quantile(value, torch.linspace(0, 1, count, device=value.device))
