"""Losses that imitate: the base policy's own decisions, or recorded ones of experts. (inputs) -> scalar, scaled."""

import torch
from torch import Tensor

from robopolicy.nn.pieces import loss_of, scores_of
from robopolicy.rl.context import AuxiliaryInputs, given
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.weights import step_mean


@mechanism(Slot.AUXILIARY, "bc", source="DPPO, arXiv:2409.00588; DiWA, arXiv:2508.03645", needs=(Need.BASE,))
def imitate_base(inputs: AuxiliaryInputs, *, weight: float = 0.05) -> Tensor:
    """Minus the log-probability of the base policy's own fresh decisions: behaviour cloning of where it came from.

    One decision for each of the minibatch's n states, scored by its log-probabilities [n, K]. Returns a scalar. Raises
    ConfigError without a base policy.
    """
    # Fresh decisions in the states that the policy visits by now; the recorded ones are its own, not the base's.
    decision = given(inputs.base, "base").act(inputs.observation, inputs.context.generator)
    scores = scores_of(inputs.policy, inputs.observation, decision.latents)
    likelihood = (step_mean(decision.mask) * torch.where(decision.mask, scores.logp, 0.0)).sum()
    return -weight * likelihood


@mechanism(
    Slot.AUXILIARY,
    "experts",
    source="DynaWeb, arXiv:2601.22149; DAPG, arXiv:1709.10087",
    needs=(Need.EXPERTS,),
)
def imitate_experts(inputs: AuxiliaryInputs, *, weight: float = 0.1) -> Tensor:
    """The policy's own regression loss on a batch of recorded experts, one with every actor step.

    Deviation from DynaWeb, whose expert trajectories join the batch as episodes: the chain that leads to an expert's
    action is not known, so policies learn from experts as in pre-training. Deviation from DAPG, whose weight is the
    largest advantage times a number that falls with the iterations: here it stays what it is. The sum of the means of
    the loss's parts [N], a scalar. Raises ConfigError without experts.
    """
    losses = loss_of(inputs.policy, next(given(inputs.experts, "experts")), inputs.context.generator)
    return weight * torch.stack([value.mean() for value in losses.values()]).sum()
