"""Losses that keep a policy broad, or near the one it came from. (inputs) -> scalar, scaled."""

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.nn.pieces import scores_of
from robopolicy.rl.context import AuxiliaryInputs, given, score_extra
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option
from robopolicy.rl.weights import step_mean


@mechanism(
    Slot.AUXILIARY,
    "velocity",
    source="AC-Flow, arXiv:2510.18072 (Wasserstein-2 to the reference velocity)",
    needs=(Need.GAUSSIAN, Need.BASE),
)
def stay_near_velocity(inputs: AuxiliaryInputs, *, weight: float = 0.1) -> Tensor:
    """Squared distance between the means of the policy's and the base's denoising steps, in units of their spread.

    Two flows that share their noise stay within the summed distance of their velocities (Wasserstein-2). With
    policy.likelihood=matching it is the distance of the predictions (velocities) themselves. The means are
    [n, k, P, A]. Returns a scalar. Raises ConfigError without a base policy, or where scores have no means.
    """
    with torch.no_grad():
        base = score_extra(scores_of(given(inputs.base, "base"), inputs.observation, inputs.latents), "mean")
    mean, std = score_extra(inputs.scores, "mean"), score_extra(inputs.scores, "std")
    distance = (mean - base).square() / std.detach().square().clamp(min=1e-4)
    return weight * (step_mean(inputs.mask) * torch.where(inputs.mask, distance.mean((-2, -1)), 0.0)).sum()


@mechanism(Slot.AUXILIARY, "entropy", source="Williams & Peng 1991; ReinFlow, arXiv:2505.22094")
def entropy_bonus(inputs: AuxiliaryInputs, *, weight: float = 0.01) -> Tensor:
    """Minus the mean entropy of the scored steps: keeps tokens, or learned noise, exploring.

    Entropies are those of the minibatch's steps [n, k], nats. Returns a scalar. Raises ConfigError where the entropy is
    constant: denoising steps with fixed noise.
    """
    if not inputs.scores.entropy.requires_grad:
        raise ConfigError(
            "auxiliaries=[entropy]: this policy's noise is fixed, so its entropy is constant. Use tokens, or "
            "policy.kind=flow policy.flow_noise=learned."
        )
    return -weight * (step_mean(inputs.mask) * inputs.scores.entropy).sum()


@mechanism(Slot.AUXILIARY, "kl_base", source="estimators: joschu.net/blog/kl-approx", needs=(Need.BASE,))
def stay_near_base(inputs: AuxiliaryInputs, *, weight: float = 0.01, estimator: str = "k3") -> Tensor:
    """KL to the base policy on the steps that were chosen, by an estimator: k1, k2 or k3.

    k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x with x = log pi - log pi_base. k2's gradient is that of the KL on data of
    the current policy; k1's vanishes in expectation and is here for comparison. x: [n, k], limited to +-10. Returns a
    scalar. Raises ConfigError for another estimator, and without a base policy.
    """
    with torch.no_grad():
        base = scores_of(given(inputs.base, "base"), inputs.observation, inputs.latents).logp
    x = (inputs.scores.logp - base).clamp(-10, 10)
    forms = {"k1": x, "k2": 0.5 * x.square(), "k3": torch.expm1(-x) + x}
    if estimator not in forms:
        raise unknown_option("kl_base.estimator", estimator, forms)
    return weight * (step_mean(inputs.mask) * torch.where(inputs.mask, forms[estimator], 0.0)).sum()


@mechanism(Slot.AUXILIARY, "kl_convex", source="ReMix (KL-convex constraint), arXiv:2507.06892", needs=(Need.BASE,))
def stay_between(inputs: AuxiliaryInputs, *, weight: float = 0.01, base: float = 0.5) -> Tensor:
    """Stay near the base, for stability, and near the policy before the update, for freedom to move on.

        weight (base KL(pi || pi_base) + (1 - base) KL(pi || pi_before))

    Both by k3 = exp(-x) - 1 + x on the steps that were chosen, x = log pi - log of the other, [n, k], limited to +-10.
    Returns a scalar. Raises ConfigError without a base policy.
    """
    with torch.no_grad():
        first = scores_of(given(inputs.base, "base"), inputs.observation, inputs.latents).logp
    own = inputs.scores.logp
    apart = [(own - other).clamp(-10, 10) for other in (first, given(inputs.proximal, "proximal"))]
    penalty = sum(part * (torch.expm1(-x) + x) for part, x in zip((base, 1 - base), apart, strict=True))
    return weight * (step_mean(inputs.mask) * torch.where(inputs.mask, penalty, 0.0)).sum()
