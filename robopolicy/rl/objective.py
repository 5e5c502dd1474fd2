"""The one form of policy loss, and the critic's regression."""

from collections.abc import Mapping

import torch
from torch import Tensor


def policy_loss(
    logp: Tensor, coefficient: Tensor, weight: Tensor, auxiliaries: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Return -sum(w * sg(c) * logp) + sum(auxiliaries), a scalar.

    logp, coefficient, weight: [N, K]. Entries with weight 0 give neither value nor gradient, even if not finite. The
    value means little (its gradient is the surrogate's); auxiliaries are scalars, already scaled.
    """
    # Masked entries go through where on both factors: 0 * inf would be NaN, and its gradient too.
    used = weight > 0
    terms = torch.where(used, weight * coefficient, 0.0).detach() * torch.where(used, logp, 0.0)
    loss = -terms.sum()
    for auxiliary in (auxiliaries or {}).values():
        loss = loss + auxiliary
    return loss


def value_loss(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return half the mean squared error between values and returns [N], over the masked entries."""
    error = 0.5 * (values - returns).square()
    if mask is None:
        return error.mean()
    return torch.where(mask, error, 0.0).sum() / mask.sum().clamp(min=1)
