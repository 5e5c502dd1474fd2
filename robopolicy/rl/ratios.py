"""Log-probability ratios between the current and an older policy, per unit or per decision."""

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor


class RatioLevel(Enum):
    """What one ratio is about: every unit by itself (DPPO), or the whole decision (ReinFlow, GSPO)."""

    UNIT = "unit"
    DECISION_SUM = "decision_sum"
    DECISION_MEAN = "decision_mean"


class LogRatios(NamedTuple):
    """log_ratio [N, K], clamped to +-limit; clamped [N, K] bool, where that happened (no gradient there)."""

    log_ratio: Tensor
    clamped: Tensor


def log_ratios(
    logp: Tensor, logp_old: Tensor, mask: Tensor, limit: float, level: RatioLevel = RatioLevel.UNIT
) -> LogRatios:
    """Return log(pi / pi_old) without gradient, [N, K]; 0 where mask is False.

    At a decision level the units of a decision share the sum (or mean) of their log-ratios. A clamped entry keeps its
    sign and size `limit`, so exp never overflows.
    """
    difference = torch.where(mask, logp.detach() - logp_old, 0.0)
    if level is not RatioLevel.UNIT:
        joint = difference.sum(-1, keepdim=True)
        if level is RatioLevel.DECISION_MEAN:
            joint = joint / mask.sum(-1, keepdim=True).clamp(min=1)
        difference = torch.where(mask, joint.expand_as(difference), 0.0)
    return LogRatios(difference.clamp(-limit, limit), difference.abs() > limit)
