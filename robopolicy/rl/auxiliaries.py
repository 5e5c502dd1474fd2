"""Losses beside the policy's, already scaled: (inputs) -> scalar."""

from typing import Any

import torch
from torch import Tensor

from robopolicy.rl.mechanisms import Slot, mechanism
from robopolicy.rl.weights import unit_mean


@mechanism(Slot.AUXILIARY, "bc", source="DPPO, arXiv:2409.00588; DiWA, arXiv:2508.03645")
def imitate_base(inputs: Any, *, weight: float = 0.05) -> Tensor:
    """Minus the log-probability of the base policy's own fresh decisions: behaviour cloning of where it came from."""
    decision = inputs.base.act(inputs.observation, inputs.context.generator)
    evaluation = inputs.policy.evaluate(inputs.observation, decision.units)
    likelihood = (unit_mean(decision.mask) * torch.where(decision.mask, evaluation.logp, 0.0)).sum()
    return -weight * likelihood
