"""How per-unit losses are averaged, written as weights [N, K] that a loss is multiplied by and summed."""

from torch import Tensor


def unit_mean(mask: Tensor) -> Tensor:
    """Every scored unit counts the same: mask / number of scored units (token mean; DAPO, DPPO)."""
    return mask.float() / mask.sum().clamp(min=1)


def decision_mean(mask: Tensor) -> Tensor:
    """Every decision counts the same, whatever its number of units: the mean of per-decision means (sequence mean)."""
    per_decision = mask.sum(-1, keepdim=True)
    decisions = (per_decision > 0).sum().clamp(min=1)
    return mask.float() / per_decision.clamp(min=1) / decisions


def constant_denominator(mask: Tensor, denominator: float) -> Tensor:
    """Sum over units divided by a constant, so long decisions weigh more (Dr.GRPO, arXiv:2503.20783)."""
    return mask.float() / denominator
