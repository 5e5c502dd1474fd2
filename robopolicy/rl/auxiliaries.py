"""Losses beside the policy's, already scaled: (inputs) -> scalar."""

from typing import Any

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.rl.mechanisms import Need, Slot, mechanism
from robopolicy.rl.weights import unit_mean


@mechanism(Slot.AUXILIARY, "bc", source="DPPO, arXiv:2409.00588; DiWA, arXiv:2508.03645")
def imitate_base(inputs: Any, *, weight: float = 0.05) -> Tensor:
    """Minus the log-probability of the base policy's own fresh decisions: behaviour cloning of where it came from."""
    decision = inputs.base.act(inputs.observation, inputs.context.generator)
    evaluation = inputs.policy.evaluate(inputs.observation, decision.units)
    likelihood = (unit_mean(decision.mask) * torch.where(decision.mask, evaluation.logp, 0.0)).sum()
    return -weight * likelihood


@mechanism(
    Slot.AUXILIARY,
    "experts",
    source="DynaWeb (expert trajectories among imagined ones); DAPG, arXiv:1709.10087",
    needs=(Need.EXPERTS,),
)
def imitate_experts(inputs: Any, *, weight: float = 0.1) -> Tensor:
    """The policy's own regression loss on a batch of recorded experts, one with every actor step.

    Deviation from DynaWeb, whose expert trajectories join the batch as episodes: the chain that leads to an expert's
    action is not known, so policies learn from experts as in pre-training.
    """
    losses = inputs.policy.loss(next(inputs.experts), inputs.context.generator)
    return weight * torch.stack([value.mean() for value in losses.values()]).sum()


@mechanism(Slot.AUXILIARY, "entropy", source="Williams & Peng 1991; ReinFlow, arXiv:2505.22094")
def entropy_bonus(inputs: Any, *, weight: float = 0.01) -> Tensor:
    """Minus the mean entropy of the scored units: keeps tokens, or learned noise, exploring.

    Raises ConfigError where the entropy is constant: denoising steps with fixed noise.
    """
    if not inputs.evaluation.entropy.requires_grad:
        raise ConfigError(
            "finetune.auxiliaries=[entropy]: this policy's noise is fixed, so its entropy is constant. Use tokens, or "
            "policy.kind=flow policy.flow_noise=learned."
        )
    return -weight * (unit_mean(inputs.mask) * inputs.evaluation.entropy).sum()


@mechanism(Slot.AUXILIARY, "kl_base", source="estimators: joschu.net/blog/kl-approx")
def stay_near_base(inputs: Any, *, weight: float = 0.01, estimator: str = "k3") -> Tensor:
    """KL to the base policy on the units that were chosen, by an estimator: k1, k2 or k3.

    k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x with x = log pi - log pi_base. k2's gradient is that of the KL on data of
    the current policy; k1's vanishes in expectation and is here for comparison.
    """
    with torch.no_grad():
        base = inputs.base.evaluate(inputs.observation, inputs.units).logp
    x = (inputs.evaluation.logp - base).clamp(-10, 10)
    forms = {"k1": x, "k2": 0.5 * x.square(), "k3": torch.expm1(-x) + x}
    if estimator not in forms:
        raise ConfigError(f"finetune.options.kl_base.estimator={estimator}.{did_you_mean(estimator, forms)}")
    return weight * (unit_mean(inputs.mask) * torch.where(inputs.mask, forms[estimator], 0.0)).sum()
