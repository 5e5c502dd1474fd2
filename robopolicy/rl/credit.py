"""Credit: from one advantage a decision to one a unit, and what modulates it. (rollouts, A, context) -> A [B, T, K]."""

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts
from robopolicy.rl.context import Context
from robopolicy.rl.mechanisms import Need, Slot, mechanism


def denoising_discount(units: int, gamma: float) -> Tensor:
    """Return the credit per unit, [K]: gamma^(K - 1 - i), 1 at the cleanest step (DPPO, arXiv:2409.00588)."""
    return gamma ** torch.arange(units - 1, -1, -1, dtype=torch.float32)


@mechanism(Slot.CREDIT, "denoising_discount", source="DPPO, Ren et al. 2024, arXiv:2409.00588", needs=(Need.GAUSSIAN,))
def discount_denoising(rollouts: Rollouts, advantage: Tensor, context: Context, *, gamma: float = 0.9) -> Tensor:
    """Discount credit towards the noisy end of the chain: A_k = gamma^(K - 1 - k) A."""
    return advantage * denoising_discount(advantage.shape[-1], gamma).to(advantage.device)
