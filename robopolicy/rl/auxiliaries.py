"""Imitation losses on the base policy's own action chunks or on recorded expert data: (inputs) -> scalar, scaled."""

import torch
from torch import Tensor

from robopolicy.nn.micro_batches import loss_of, scores_of
from robopolicy.rl.context import AuxiliaryInputs, require_input
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.weights import step_mean


@mechanism(Slot.AUXILIARY, "bc", source="DPPO, arXiv:2409.00588; DiWA, arXiv:2508.03645", needs=(Need.BASE,))
def imitate_base(inputs: AuxiliaryInputs, *, weight: float = 0.05) -> Tensor:
    """Negative log-probability of fresh action chunks of the base policy: behaviour cloning of the base.

    One action chunk is sampled for each of the minibatch's n states; its log-probabilities are [n, K]. Returns a
    scalar. Raises ConfigError without a base policy.
    """
    # Fresh decisions in the states that the policy visits by now; the recorded ones are its own, not the base's.
    decision = require_input(inputs.base, "base").act(inputs.observation, inputs.context.generator)
    scores = scores_of(inputs.policy, inputs.observation, decision.latents)
    likelihood = (step_mean(decision.mask) * torch.where(decision.mask, scores.logp, 0.0)).sum()
    return -weight * likelihood


@mechanism(
    Slot.AUXILIARY,
    "experts",
    source="DynaWeb, arXiv:2601.22149; DAPG, arXiv:1709.10087",
    needs=(Need.EXPERTS, Need.WHOLE_MINIBATCHES),
    gives=(Need.IMITATION,),
)
def imitate_experts(inputs: AuxiliaryInputs, *, weight: float = 0.1) -> Tensor:
    """The policy's own regression loss on a batch of recorded expert data, one batch per actor step.

    Deviation from DynaWeb, where expert trajectories join the batch as episodes: the denoising chain of an expert's
    action is unknown, so policies imitate experts as in pre-training. Deviation from DAPG, whose weight is the largest
    advantage times a factor that decays over the iterations: here the weight is constant. Returns a scalar: the sum of
    the means of the loss terms [N]. Raises ConfigError without experts.
    """
    losses = loss_of(inputs.policy, next(require_input(inputs.experts, "experts")), inputs.context.generator)
    return weight * torch.stack([value.mean() for value in losses.values()]).sum()
