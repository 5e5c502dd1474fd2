"""Averaging of per-step losses, as weights that a loss is multiplied by before summation.

mask: [b, t, K] (or [N, K]); rows are episodes, t chunks. Every weight is 0 outside the mask.
"""

from torch import Tensor

from robopolicy.core.rollouts import Rollouts
from robopolicy.rl.registry import Slot, mechanism


def step_mean(mask: Tensor) -> Tensor:
    """Weight every scored step [...] equally: mask / number of scored steps (token mean; DAPO, DPPO)."""
    return mask.float() / mask.sum().clamp(min=1)


def episode_mean(mask: Tensor) -> Tensor:
    """Weight every row [t, K] equally, independent of its length: the mean of per-episode means (GRPO, GSPO)."""
    per_row = mask.sum((-2, -1), keepdim=True)
    rows = (per_row > 0).sum().clamp(min=1)
    return mask.float() / per_row.clamp(min=1) / rows


def episode_sizes(mask: Tensor) -> dict[str, Tensor]:
    """Return the extras that minibatches of single chunks need of complete rows, of their scored steps [B, T, K].

    episode_steps, episode_decisions: [B, T] int64, number of scored steps and of chunks with a scored step.
    """
    steps, chunks = mask.sum((1, 2)), mask.any(-1).sum(1)
    names = ("episode_steps", "episode_decisions")
    return {name: size[:, None].expand(mask.shape[:2]) for name, size in zip(names, (steps, chunks), strict=True)}


def constant_denominator(mask: Tensor, denominator: float) -> Tensor:
    """Sum over steps [b, t, K] divided by a constant, so long chunks weigh more (Dr.GRPO, arXiv:2503.20783)."""
    return mask.float() / denominator


@mechanism(Slot.WEIGHT, "step_mean", source="DAPO, arXiv:2503.14476; DPPO, arXiv:2409.00588")
def weigh_steps(mask: Tensor, rollouts: Rollouts) -> Tensor:
    """Weight every scored step equally (token mean).

    Takes a mask [b, t, K] and returns weights of that shape.
    """
    return step_mean(mask)


@mechanism(Slot.WEIGHT, "episode_mean", source="GRPO, arXiv:2402.03300")
def weigh_episodes(mask: Tensor, rollouts: Rollouts) -> Tensor:
    """Weight every episode equally, independent of its length (sequence mean).

    In minibatches of single chunks each step has weight one over the number of scored steps of its complete episode,
    extras["episode_steps"] [b, t], normalised to a sum of 1: the same relative weights. Takes a mask [b, t, K] and
    returns weights of that shape.
    """
    if "episode_steps" not in rollouts.extras:
        return episode_mean(mask)
    weight = mask.float() / rollouts.extras["episode_steps"][..., None].clamp(min=1)
    return weight / weight.sum().clamp(min=1e-12)


@mechanism(Slot.WEIGHT, "constant", source="Dr.GRPO, Liu et al. 2025, arXiv:2503.20783")
def weigh_constantly(mask: Tensor, rollouts: Rollouts, *, length: float = 0.0) -> Tensor:
    """Sum over steps divided by rows times a constant length (0: the padded length), so lengths do not matter.

    Takes a mask [b, t, K] and returns weights of that shape; the padded length is t * K steps.
    """
    longest = length or float(mask[0].numel())
    return constant_denominator(mask, mask.shape[0] * longest)
