"""Generalised advantage estimation over action chunks that last several control steps."""

from typing import NamedTuple

import torch
from torch import Tensor

from robopolicy.core.former_names import keep_former_names
from robopolicy.core.rollouts import Rollouts
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


class Advantages(NamedTuple):
    """Advantages and returns (the critic's regression targets), both [B, T]."""

    advantages: Tensor
    returns: Tensor


def chunk_rewards(rewards: Tensor, valid: Tensor, gamma: float) -> Tensor:
    """Compute the discounted reward inside each chunk, sum_j gamma^j r_j over valid steps: [B, T, C] -> [B, T]."""
    # The policy commits to a whole chunk, so its rewards belong to one decision; they are discounted inside it all the
    # same, so that chunks of different lengths are paid alike for the same control steps.
    discounts = gamma ** torch.arange(rewards.shape[-1], dtype=rewards.dtype, device=rewards.device)
    return (torch.where(valid, rewards, 0.0) * discounts).sum(-1)


def gae(
    rewards: Tensor,
    valid: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    ended: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438) over chunks of control steps.

        delta_t = R_t + gamma^h_t * (1 - terminated_t) * V(next_t) - V_t
        A_t     = delta_t + gamma^h_t * lambda * (1 - ended_t) * A_{t+1}

    rewards, valid: [B, T, C]; R_t is discounted inside the chunk; h_t = number of valid steps; lambda counts action
    chunks. values, next_values: [B, T], next_values of the observation BEFORE any reset. terminated stops the
    bootstrap; ended (terminated, time limit or horizon end) stops the recursion. gamma is per control step. A chunk
    without a valid step (its row had already ended) gets advantage 0 and its own value as return. The recursion past
    the last column is bootstrapped from next_values alone.
    """
    duration = valid.sum(-1)
    discount = gamma ** duration.to(values.dtype)
    alive = duration > 0
    reward = chunk_rewards(rewards, valid, gamma)
    delta = reward + discount * torch.where(terminated, 0.0, next_values) - values
    delta = torch.where(alive, delta, 0.0)
    # terminated cuts the value of what follows (there is nothing), ended only the chain: an episode that a time limit
    # cut would have gone on, so its value still counts, but the next column is another episode.
    carry = torch.where(ended | ~alive, 0.0, discount * gae_lambda)
    advantages = torch.zeros_like(delta)
    running = torch.zeros_like(delta[:, 0])
    for column in reversed(range(delta.shape[1])):
        running = delta[:, column] + carry[:, column] * running
        advantages[:, column] = running
    # A + V is the lambda-return, which the critic regresses on.
    return Advantages(advantages, advantages + values)


def next_values(values: Tensor, values_at_end: Tensor, ended: Tensor) -> Tensor:
    """Return V(next) [B, T] from the V of each column and, where needed, the V of the pre-reset next observation.

    values: [B, T]; values_at_end: [B, T], read only where a chunk ended its episode and in the last column; other
    entries may be arbitrary.
    """
    # The next column belongs to the same episode only where this one has not ended.
    shifted = torch.cat([values[:, 1:], values_at_end[:, -1:]], dim=1)
    return torch.where(ended, values_at_end, shifted)


def standardise(advantages: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return (A - mean) / (std + 1e-8) over the masked entries, any shape [...]; entries outside the mask become 0."""
    if mask is None:
        mask = torch.ones_like(advantages, dtype=torch.bool)
    # Fixes the size of the policy's steps whatever the scale of rewards; 1e-8 only guards against equal advantages.
    masked = advantages[mask]
    scale = masked.std(unbiased=False) + 1e-8
    return torch.where(mask, (advantages - masked.mean()) / scale, 0.0)


@mechanism(Slot.ADVANTAGE, "gae", source="Schulman et al. 2016, arXiv:1506.02438; as in DPPO", needs=(Need.CRITIC,))
def gae_over_chunks(rollouts: Rollouts, context: Context, *, whiten: bool = True) -> Tensor:
    """Generalised advantage estimation over action chunks, with a critic, standardised over the batch.

    extras: `advantage_gae` [B, T], which the trainer computes together with the critic's targets.
    """
    advantages = rollouts.extras["advantage_gae"]
    return standardise(advantages, rollouts.alive) if whiten else torch.where(rollouts.alive, advantages, 0.0)


def denoising_discount(steps: int, gamma: float) -> Tensor:
    """Return the discount per denoising step, [K]: gamma^(K - 1 - i), 1 at the cleanest step (DPPO,
    arXiv:2409.00588).
    """
    return gamma ** torch.arange(steps - 1, -1, -1, dtype=torch.float32)


@mechanism(Slot.CREDIT, "denoising_discount", source="DPPO, Ren et al. 2024, arXiv:2409.00588", needs=(Need.GAUSSIAN,))
def discount_denoising(rollouts: Rollouts, advantage: Tensor, context: Context, *, gamma: float = 0.9) -> Tensor:
    """Discount credit towards the noisy end of the chain: A_k = gamma^(K - 1 - k) A.

    Takes and returns A [B, T, K]; gamma: per denoising step.
    """
    return advantage * denoising_discount(advantage.shape[-1], gamma).to(advantage.device)


def finished_returns(rollouts: Rollouts, rewards: Tensor, discount: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Monte-Carlo returns [B, T] and a mask of the known ones: chunks whose episode ended in the window.

    rewards: [B, T] per chunk; discount: [B, T], gamma ** duration.
    """
    following = torch.zeros_like(rewards[:, 0])
    known_mask = torch.zeros_like(rollouts.ended[:, 0])
    returns: list[Tensor] = []
    finished: list[Tensor] = []
    for column in reversed(range(rewards.shape[1])):
        row_ended = rollouts.ended[:, column]
        # `row_ended` of this column: what lies in the next one is another episode.
        following = rewards[:, column] + discount[:, column] * following * ~row_ended
        known_mask = row_ended | known_mask
        returns.append(following)
        finished.append(known_mask)
    return torch.stack(returns[::-1], 1), torch.stack(finished[::-1], 1)


keep_former_names(__name__, {"estimate": "gae_over_chunks"})
