"""Real-time chunking (Black, Galliker, Levine 2025, arXiv:2506.07339): inpaint the next plan around the last one.

The d steps that will have been executed when the plan becomes available are fixed, the following steps of the overlap
have decreasing weights, and the last s are free. Every network prediction is corrected during denoising so that its
clean estimate agrees with the last plan there (PiGDM, Song et al. 2023).

Let x = signal * clean + noise * n be the latents of a step, t = noise / (signal + noise), and J the derivative of the
clean estimate by x / (signal + noise). The paper's correction of the velocity at flow time 1 - t, multiplied by -t, is
a correction of the clean estimate:

    clean + min(beta t, (t^2 + (1 - t)^2) / (1 - t)) J^T W (last plan - clean)

A diffusion's latents divided by signal + noise are those of the flow at t, with the same clean estimate and the same
posterior (r^2 = t^2 / (t^2 + (1 - t)^2), Tweedie's formula), so the same formula corrects a DDIM or DDPM chain, with
the same bound beta. Axes: B row, K step, P predicted step, A action dimension; s chunk, d delay.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor
from torch.nn.functional import pad

from robopolicy.client.periodicity import Periodicity, periodicity_of
from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import Policy, TensorObservation
from robopolicy.inference.chunking import Delay, OverlappingPolicy, PredictsAhead, RunningPlan
from robopolicy.nn.denoisers import given_steps
from robopolicy.nn.schedules import DiffusionSchedule, NoiseSchedule
from robopolicy.policies.denoising import DenoisingPolicy, OpensDenoising, require_denoising
from robopolicy.policies.latents import CustomLatents
from robopolicy.policies.network import PrefixedSteps, Steps

OF_AN_ENGINE = "For a policy with an inference engine set engine=reference."
"""Remedy for a policy whose network is not accessible, because an engine computes it."""


class Mask(Enum):
    """Decay of the weights over the overlap of both plans after the executed steps: none (ones), immediate (zeros),
    linear, or as in the paper (exponential).
    """

    ONES = "ones"
    ZEROS = "zeros"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"


def rtc(policy: Policy, delay: Delay, max_guidance_weight: float = 5.0, mask: str = "exponential") -> Policy:
    """Real-time chunking as published, differentiated through the network; for flows and diffusions.

    max_guidance_weight: beta, which prevents overshooting in the noisy steps, where the formula's weight is infinite. A
    chain of K < beta steps would still overshoot, so its beta is K (not in the paper). Raises ConfigError for policies
    that do not denoise, and unless beta is positive.
    """
    return _guided(policy, delay, max_guidance_weight, mask, jacobian=True)


def lerobot_rtc(policy: Policy, delay: Delay, max_guidance_weight: float = 10.0, mask: str = "linear") -> Policy:
    """Real-time chunking as in LeRobot 0.6.1, with its defaults: the network's derivative is approximated by zero.

    LeRobot differentiates x - t v with v computed before, so J is the identity. Nothing is differentiated here either,
    so it costs no more than no guidance. Raises ConfigError as `rtc`.
    """
    return _guided(policy, delay, max_guidance_weight, mask, jacobian=False)


def trained_rtc(policy: Policy, delay: Delay) -> Policy:
    """Training-time real-time chunking (Black et al. 2025, arXiv:2512.05964): the network is conditioned on the d steps
    that are executed meanwhile.

    It was trained to continue them (policy.prefix_steps), so there is no differentiation and no guidance. Raises
    ConfigError for policies that do not denoise, and for those not trained this way or with fewer prefix steps.
    """
    prefix_steps = _continuing(policy).config.prefix_steps
    if prefix_steps < max(delay.steps, 1):
        raise ConfigError(
            f"This policy was trained to continue {prefix_steps} given steps: train it with "
            f"prefix_steps={max(delay.steps, 1)} or more, or use rtc, which guides policies that were trained "
            "without."
        )
    return OverlappingPolicy(policy, delay, continue_plan)


def continue_plan(
    policy: PredictsAhead,
    observation: TensorObservation,
    generator: torch.Generator,
    underway: RunningPlan,
    *,
    deterministic: bool,
) -> Tensor:
    """Return a plan [B, P, A] that starts with the next d steps of the plan in execution and continues them; see
    `Plans`.
    """
    denoising_policy = _continuing(policy)
    overlap, steps = underway.rest.shape[1], denoising_policy.config.prediction_steps
    padding = (0, 0, 0, steps - overlap)
    target = pad(denoising_policy.action_normalizer(underway.rest), padding)
    count = (
        min(underway.delay, denoising_policy.config.prefix_steps) * underway.known
    )  # a robot may be slower than was learned
    guide: Callable[[Steps], Steps] = lambda inner: PrefixedSteps(inner, target, count)  # noqa: E731
    plan = denoising_policy.predict(observation, generator, deterministic=deterministic, guided=guide)
    # What the network says of given steps means nothing, and a robot that is answered sooner executes some of them.
    return torch.where(given_steps(count, steps)[..., None], pad(underway.rest, padding), plan)


def _continuing(policy: object) -> DenoisingPolicy:
    return require_denoising(
        policy,
        "trained_rtc needs a diffusion or flow policy that was trained with prefix_steps, and this is a "
        f"{type(policy).__name__}: choose another chunking. {OF_AN_ENGINE}",
    )


def _guided(policy: Policy, delay: Delay, strongest: float, mask: str, *, jacobian: bool) -> Policy:
    inner = policy.opened() if isinstance(policy, OpensDenoising) else None
    denoising_policy = require_denoising(
        policy if inner is None else inner,
        "Real-time chunking guides the denoising of a diffusion or flow policy, and this is a "
        f"{type(policy).__name__}: choose synchronous, or prefetch, ensembling or bidirectional if it predicts more "
        f"steps than it executes. {OF_AN_ENGINE}",
    )
    if isinstance(denoising_policy.network, CustomLatents) and not denoising_policy.network.denoises_actions:
        raise ConfigError(
            "Real-time chunking guides normalised actions, but the latents of this policy's network are not actions "
            "(e.g. gripper logits): choose prefetch, ensembling, bidirectional or synchronous."
        )
    if strongest <= 0:
        raise ConfigError(f"max_guidance_weight={strongest} must be positive.")
    kinds = [each.value for each in Mask]
    if mask not in kinds:
        raise ConfigError(f"There is no mask '{mask}': choose {', '.join(kinds)}.")
    bound = min(strongest, denoising_policy.schedule.steps) if jacobian else strongest
    return OverlappingPolicy(
        policy, delay, InpaintedPlans(denoising_policy, bound, Mask(mask), jacobian, quiet=inner is not None)
    )


@dataclass(frozen=True)
class InpaintedPlans:
    """`Plans` that agree with the plan in execution.

    guided: policy whose denoising is corrected (the policy itself, or a LeRobot policy's weights as a
    `DenoisingPolicy`); strongest: beta; jacobian: whether the network is differentiated; quiet: whether all steps are
    noise-free regardless of the request: LeRobot's flows have no noise, and its diffusions are sampled with DDIM.
    """

    guided: DenoisingPolicy
    strongest: float
    mask: Mask
    jacobian: bool
    quiet: bool = False

    def __call__(
        self,
        policy: PredictsAhead,
        observation: TensorObservation,
        generator: torch.Generator,
        underway: RunningPlan,
        *,
        deterministic: bool,
    ) -> Tensor:
        """Return the guided plan [B, P, A], unguided in rows without a plan in execution; see `Plans`."""
        policy, deterministic = self.guided, deterministic or self.quiet
        overlap, steps = underway.rest.shape[1], policy.spec.prediction
        weights = prefix_weights(underway.delay, overlap, steps, self.mask).to(underway.rest)
        weights = weights * underway.known[:, None]
        if not bool(weights.any()):
            return policy.predict(observation, generator, deterministic=deterministic)
        latent_network = policy.network if isinstance(policy.network, CustomLatents) else None
        latents = (
            latent_network.to_latents(underway.rest) if latent_network else policy.action_normalizer(underway.rest)
        )
        # Of a chunk that begins in the past nothing is asked there, nor behind the end of the last one.
        target = pad(latents, (0, 0, policy.part.first, steps - overlap))
        weights = pad(weights, (policy.part.first, 0))
        turns = periodicity_of(policy.spec.action).like(target)
        if (
            latent_network
        ):  # whose latents are normalised actions, padded at most: what a turn adds to an action adds to them
            periods = latent_network.to_latents(underway.rest + turns.period) - latents
            turns = replace(turns, period=periods.flatten(0, -2)[0].abs())
        else:
            turns = replace(turns, period=turns.period / policy.action_normalizer.scale)
        guidance = Guidance(target, weights[..., None], self.strongest, self.jacobian, turns)
        guide: Callable[[Steps], Steps] = lambda inner: GuidedSteps(inner, policy.schedule, guidance)  # noqa: E731
        return policy.predict(observation, generator, deterministic=deterministic, guided=guide)


def prefix_weights(delay: int, overlap: int, steps: int, mask: Mask = Mask.EXPONENTIAL) -> Tensor:
    """Return the weight that binds each step of a plan to the last plan, [P]: 1 for `delay` steps, 0 from `overlap` on.

    In between, with c = (overlap - i) / (overlap - delay + 1), c (e^c - 1) / (e - 1) (the paper's equation 5), or c if
    linear. steps: P; overlap: P - s.
    """
    place = torch.arange(steps, dtype=torch.float64)
    c = ((overlap - place) / (overlap - delay + 1)).clamp(0.0, 1.0)
    falling = {
        Mask.ONES: torch.ones_like(c),
        Mask.ZEROS: torch.zeros_like(c),
        Mask.LINEAR: c,
        Mask.EXPONENTIAL: c * torch.expm1(c) / math.expm1(1.0),
    }[mask]
    return torch.where(place < delay, 1.0, torch.where(place < overlap, falling, 0.0)).float()


@dataclass(frozen=True)
class Guidance:
    """Target and weights of the guidance of clean latents.

    target: [B, P, L], clean latents; weights: W, [B, P, 1] in [0, 1]; strongest: beta; jacobian: whether the error is
    backpropagated through the network, or used directly (J = 1); turns: periodicity of latents [L] that are normalised
    angles, None for none.
    """

    target: Tensor
    weights: Tensor
    strongest: float
    jacobian: bool = True
    turns: Periodicity | None = None


class GuidedSteps:
    """`Steps` of a network with predictions corrected by `guidance`; see the module."""

    def __init__(self, steps: Steps, schedule: NoiseSchedule, guidance: Guidance):
        self.steps = steps
        self.schedule = schedule
        self.guidance = guidance
        levels = noise_levels(schedule)
        self._scale = levels.sum(1).tolist()
        self._gains = guidance_gains(levels, guidance.strongest).tolist()
        self._of_prediction = schedule.deterministic_table[:, 1].tolist()

    def one(self, x: Tensor, step: int) -> Tensor:
        """Predict [B, P, A] for latents x [B, P, A] at the input of `step`, with correction."""
        guidance = self.guidance
        with torch.set_grad_enabled(guidance.jacobian):
            leaf = x.detach().requires_grad_(guidance.jacobian)
            prediction = self.steps.one(leaf, step)
            clean = self.schedule.clean_estimate(leaf, prediction, step)
        away = guidance.target - clean.detach()
        pull = guidance.weights * (away if guidance.turns is None else guidance.turns.shortest(away))
        if guidance.jacobian:
            (pull,) = torch.autograd.grad(clean, leaf, pull)
            pull = self._scale[step] * pull
        # clean is a x + b prediction: what is added to it is b times what is added to the prediction.
        return prediction.detach() + (self._gains[step] / self._of_prediction[step]) * pull

    def several(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        """Predict [B, k, P, A] without guidance, for log-probabilities."""
        return self.steps.several(x, chosen)


def noise_levels(schedule: NoiseSchedule) -> Tensor:
    """Return signal and noise level of the latents of each step, [K, 2] fp64."""
    times = schedule.times.double()
    if not isinstance(schedule, DiffusionSchedule):
        return torch.stack([1 - times, times], -1)
    alpha = schedule.alphas.double()[(times * schedule.training_steps).round().long() - 1]
    return torch.stack([alpha.sqrt(), (1 - alpha).sqrt()], -1)


def guidance_gains(levels: Tensor, strongest: float) -> Tensor:
    """Return the factor of J^T W (target - clean) added to the clean estimate in each step, [K].

    levels: [K, 2], signal and noise; strongest: beta.
    """
    t = levels[:, 1] / levels.sum(1)
    return torch.minimum(strongest * t, (t.square() + (1 - t).square()) / (1 - t))


keep_former_names(__name__, {"Inpainted": "InpaintedPlans", "continued": "continue_plan"})
