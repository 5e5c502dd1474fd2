"""Log-probability ratios between two policies, at the level of a step, an action, a decision or an episode."""

from typing import NamedTuple

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.rl.ratio_level import RatioLevel


class LogRatios(NamedTuple):
    """log_ratio [..., T, K], clamped to +-limit; clamped [..., T, K] bool, where that happened (no gradient there)."""

    log_ratio: Tensor
    clamped: Tensor


def log_ratios(
    logp: Tensor,
    logp_old: Tensor,
    mask: Tensor,
    limit: float,
    level: RatioLevel = RatioLevel.STEP,
    steps_per_action: int = 0,
) -> LogRatios:
    """Return log(pi / pi_old) without gradient, [..., T, K] (or [N, K]); 0 where mask is False.

    Above the step level the steps of an action, decision or episode (the last two axes) share the sum or the mean over
    their scored steps. A clamped entry keeps its sign and size `limit`, so exp never overflows.
    """
    # Differences in log space, and the clamp before exp: a ratio of probabilities of hundreds of steps overflows fp32.
    difference = torch.where(mask, logp.detach() - logp_old, 0.0)
    if level is not RatioLevel.STEP:
        difference = torch.where(mask, _shared(difference, mask, level, steps_per_action), 0.0)
    return LogRatios(difference.clamp(-limit, limit), difference.abs() > limit)


def _shared(values: Tensor, mask: Tensor, level: RatioLevel, steps_per_action: int) -> Tensor:
    shape = values.shape
    axes: tuple[int, ...] = (-1,)
    if level in (RatioLevel.ACTION_SUM, RatioLevel.ACTION_MEAN):
        if steps_per_action < 1 or shape[-1] % steps_per_action:
            raise ConfigError(
                f"{level.value} needs steps that belong to single actions; {shape[-1]} steps with {steps_per_action} "
                "an action do not. Denoising steps belong to the whole chunk: use step or decision_mean."
            )
        values, mask = (torch.unflatten(item, -1, (-1, steps_per_action)) for item in (values, mask))
    elif level.whole_episodes:
        axes = (-2, -1)
    total = values.sum(axes, keepdim=True)
    if level.value.endswith("mean"):
        total = total / mask.sum(axes, keepdim=True).clamp(min=1)
    return total.expand_as(values).reshape(shape)
