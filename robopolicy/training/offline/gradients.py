"""Improvers that follow a critic's gradient through denoising: Diffusion-QL, and adjoint matching (QAM).

Diffusion-QL climbs the critic through the chain while it imitates what was recorded. QAM tilts a flow towards what the
critic values, base(a) exp(strength Q(a)), by regression on lean adjoints.

Sources: adjoint matching, Domingo-Enrich et al. 2024, arXiv:2409.08861; with critics of recorded data, QAM, Li and
Levine 2026, arXiv:2601.14234. Time convention here: 1 = noise, velocity u = noise - data. A memoryless sampler draws
chains from the current flow. From their ends, a~(0) = -strength grad Q is propagated backwards by vector-Jacobian
products of the BASE flow's sampler, not of the learning one (which makes it lean). The flow regresses on

u = u_base + g(t) a~(t), weighted by 2 / g(t), g(t) = t / (1 - t),

which equals the sources' || 2 (v - v_base) / sigma + sigma a~ ||^2 with v = -u and sigma^2 = 2 g. Deviation: their
sampler is Euler's with sigma^2 = 2 (t + h) / (1 - t + h), which is not memoryless on the few steps of a policy's grid.
This one samples the posterior of the next latent given the clean estimate, and its first step forgets the noise
entirely. Gaussian data under a linear Q should move by strength * std^2 * slope. On 5 steps, the sources' sampler moves
them by 1.38 (std 0.3) and 0.76 (std 1) times that, this one by 1.00 and 0.99; on 10 steps, 1.18 and 0.88 compared with
1.00 and 1.00.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import DecidesFromNoise, TensorObservation, Trainable
from robopolicy.core.randomness import Generators
from robopolicy.nn.schedules import FlowSchedule, NoiseSchedule
from robopolicy.policies.denoising import DenoisingPolicy, require_denoising
from robopolicy.policies.network import Steps, steps_of
from robopolicy.rl.offline.decisions import observations_at
from robopolicy.training.offline.configuration import AdjointMatchingConfig, DiffusionQlConfig
from robopolicy.training.offline.improvers import OfflineContext, imitate, train_policy

Slope = Callable[[Tensor], Tensor]
"""Clean latents [N, P, A] -> gradient of their value, [N, P, A]."""


class AdjointMatching:
    """Improver with the settings `AdjointMatchingConfig`, which describes the method."""

    def __init__(self, config: AdjointMatchingConfig):
        self.config = config
        self.base: DenoisingPolicy | None = None

    def prepare(self, policy: Trainable) -> None:
        """Store the initial flow, which is the one to tilt; see `Improver`."""
        self.base = copy.deepcopy(require_flow(policy)).requires_grad_(False)

    def improve(
        self, policy: Trainable, lesson: OfflineContext, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Regress on the lean adjoints of sampled chains; see `Improver`."""
        flow = require_flow(policy)
        base = self.base
        config = self.config
        data = lesson.data
        assert base is not None
        keys, pulls = list(policy.spec.observation), list[Tensor]()

        def loss(rows: Tensor) -> Tensor:
            observation = observations_at(lesson.episodes, data.frame[rows], policy.spec.history, keys)
            state = data.transitions.state[rows]
            slope = lambda clean: value_slope(lesson, base, state, clean, config.pessimism)  # noqa: E731
            matching, pull = matching_loss(
                flow, base, observation, slope, config.inverse_temperature, generators["chains"]
            )
            pulls.append(pull)
            return matching

        mean = train_policy(policy, loss, len(data), config, step, generators, where)
        return {"loss": mean, "pull": float(torch.stack(pulls).mean())}


def require_flow(policy: Trainable) -> DenoisingPolicy:
    """Return `policy` if it is a flow policy whose steps are all trained; else raises ConfigError with the reason."""
    message = (
        f"adjoint_matching needs a flow policy, which {type(policy).__name__}%s is not: train one "
        "(policy.kind=flow), or use diffusion_ql, which follows the critic's gradient through the steps of a "
        "diffusion policy."
    )
    flow = require_denoising(policy, message % "")
    if not isinstance(flow.schedule, FlowSchedule):
        raise ConfigError(message % f" with kind={flow.config.kind.value}")
    if flow.first_step:
        raise ConfigError(
            "adjoint_matching trains the velocities of all steps, but in this fine-tuned policy a frozen base takes "
            f"the first {flow.first_step} steps: use the policy before fine-tuning."
        )
    if flow.schedule.steps < 2:
        raise ConfigError("adjoint_matching needs at least two denoising steps, and this flow policy has one.")
    return flow


def value_slope(
    lesson: OfflineContext, policy: DenoisingPolicy, state: Tensor, clean: Tensor, pessimism: float
) -> Tensor:
    """Return the gradient [N, P, A] of mean Q - pessimism * std (over critics) with respect to clean latents [N, P, A].

    state: [N, S], the critic's input; steps after the executed ones have zero gradient.
    """
    with torch.enable_grad():
        clean = clean.detach().requires_grad_()
        # To the agent's units and back is part of the chain rule: the slope is by the policy's clean latents.
        q = lesson.critic.action_values(state, lesson.interface.to_agent(policy.to_actions(clean)))
        worth = q.mean(0) - pessimism * q.std(0, unbiased=False)
        return torch.autograd.grad(worth.sum(), clean)[0]


def matching_loss(
    policy: DenoisingPolicy,
    base: DenoisingPolicy,
    observation: TensorObservation,
    slope: Slope,
    strength: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return the loss [] and the mean size [] of the velocity correction, for one chain per observation (N)."""
    sampler, times = memoryless(policy.schedule.steps, policy.schedule.clip), policy.schedule.times
    sampler = sampler.to(times.device)
    condition, base_condition = policy.encode(observation), base.encode(observation)
    moving, base_steps = steps_of(policy.network, times, condition), steps_of(base.network, times, base_condition)
    with torch.no_grad():
        rows = len(next(iter(condition.values())))
        shape = sampler.steps + 1, rows, *policy.noise_shape
        noise = torch.randn(shape, generator=generator, device=generator.device).to(times.device)
        chain = draw_chain(sampler, moving, noise)
        # Lean: pulled back through the base, so it is free of the learner's own Jacobian and needs no gradient here.
        adjoint = lean_adjoints(sampler, base_steps, chain, -strength * slope(chain[:, -1]))
        gain = adjoint_gains(times)[:, None, None]
        pull, reference = gain * adjoint, base_steps.several(chain[:, :-1], None)
    velocity = moving.several(chain[:, :-1], None)
    # With v = -u and sigma^2 = 2 g: || 2 (v - v_base) / sigma + sigma a ||^2 = (2 / g) || u - u_base - g a ||^2.
    loss = (2 / gain * (velocity - reference - pull).square()).mean()
    return loss, pull.abs().mean()


def memoryless(steps: int, clip: float | None = None) -> NoiseSchedule:
    """Return the sampler of x_s ~ p(x_s | x_t, clean estimate) on a flow's grid with this number of steps.

    x_t = (1 - t) data + t noise is obtained from x_s by scaling with r = (1 - t) / (1 - s) and adding noise of variance
    q^2 = t^2 - r^2 s^2. Bayes' rule then gives mean (1 - s) q^2 / t^2 clean + r s^2 / t^2 x_t and std s q / t. clip:
    bound on the clean estimate, as in the policy's own chain.
    """
    # Double precision: `added` is a difference of nearly equal squares on fine grids.
    time = torch.arange(steps, 0, -1, dtype=torch.float64) / steps
    after = time - 1 / steps
    ratio = (1 - time) / (1 - after)
    added = time.square() - (ratio * after).square()
    clean, from_x = (1 - after) * added / time.square(), ratio * after.square() / time.square()
    # At the first step t = 1, so ratio is 0, added is 1 and `from_x` is 0: the noise is forgotten entirely.
    std = after * added.sqrt() / time
    table = torch.stack([torch.ones_like(time), -time, clean, from_x, std], -1)
    table[-1, 4] = 0.0  # what follows the last step is the clean estimate itself
    return NoiseSchedule(time, table, table, clip)


def draw_chain(sampler: NoiseSchedule, steps: Steps, noise: Tensor) -> Tensor:
    """Sample chains [N, K+1, P, A] that start with noise[0] and use noise[k + 1] in step k, [K+1, N, P, A]."""
    latents = [noise[0]]
    for index, step_noise in enumerate(noise[1:]):
        x = latents[-1]
        latents.append(sampler.transition(x, steps.one(x, index), index).sample(step_noise))
    return torch.stack(latents, 1)


def lean_adjoints(sampler: NoiseSchedule, base: Steps, chain: Tensor, end: Tensor) -> Tensor:
    """Return the adjoints [N, K, P, A] at the input latents of each step of chains [N, K+1, P, A].

    end: the adjoint [N, P, A] at the clean latents. The first step forgets its noise, so its adjoint would be zero and
    its gain infinite. It uses the adjoint of the second step instead; `adjoint_gains` contains the finite product.
    """
    adjoint, adjoints = end, list[Tensor]()
    for index in reversed(range(1, sampler.steps)):
        with torch.enable_grad():
            x = chain[:, index].detach().requires_grad_()
            mean = sampler.transition(x, base.one(x, index), index).mean
            # a(t) = J^T a(s) with J the Jacobian of the transition's mean: the discrete adjoint equation.
            adjoint = torch.autograd.grad(mean, x, adjoint)[0]
        adjoints.append(adjoint)
    return torch.stack([adjoints[-1], *reversed(adjoints)], 1)


def adjoint_gains(times: Tensor) -> Tensor:
    """Return the gain [K] from adjoints to velocities at times [K], which start at 1: t / (1 - t).

    At t = 1 the gain is posterior variance over velocity-to-mean slope, s^2 / ((1 - s) t), applied to the adjoint at
    the next time s.
    """
    second = times[1]
    later_gains = times[1:] / (1 - times[1:])
    return torch.cat([(second.square() / (1 - second))[None], later_gains])


class DiffusionQl:
    """Improver with the settings `DiffusionQlConfig`, which describes the method."""

    def __init__(self, config: DiffusionQlConfig):
        self.config = config

    def prepare(self, policy: Trainable) -> None:
        """Do nothing; see `Improver`."""
        if not isinstance(policy, DecidesFromNoise):
            raise ConfigError(
                f"diffusion_ql needs the critic's gradient through the denoising steps, but {type(policy).__name__} "
                "cannot act from given noise (see DecidesFromNoise in robopolicy/core/policy.py): use best_of or "
                "weighted_imitation, which work with any policy."
            )

    def improve(
        self, policy: Trainable, lesson: OfflineContext, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Imitate recorded chunks and maximise the critic; see `Improver`."""
        assert isinstance(policy, DecidesFromNoise)
        actor: DecidesFromNoise = policy
        config = self.config
        data = lesson.data
        values = list[Tensor]()
        batch = partial(lesson.recorded, spec=policy.spec)

        def climb(rows: Tensor, drawn: dict[str, Any]) -> Tensor:
            draws = generators["noise"]
            noise = torch.randn((len(rows), *actor.noise_shape), generator=draws, device=draws.device)
            # Through the last step only, memory does not grow with the chain; earlier steps learn by imitation.
            through = None if config.through == "all" else 1
            latents = actor.trajectory(drawn["observation"], noise.to(data.step.device), through)
            action = lesson.interface.to_agent(actor.to_actions(latents[:, -1]))
            # The smallest critic: a single one would be climbed where it errs upwards.
            q = lesson.critic.action_values(data.transitions.state[rows], action).amin(0)
            values.append(q.detach().mean())
            return scaled_ascent(q, config.eta)

        also = climb if config.eta else None
        loss = imitate(policy, batch, len(data), config, step, generators, where, also=also)
        return {"loss": loss, **({"q": float(values[-1])} if values else {})}


def scaled_ascent(q: Tensor, eta: float) -> Tensor:
    """Return -eta mean(Q) / mean|Q| [] of values Q [N]; mean|Q| is detached, so eta is independent of Q's scale."""
    return -eta * q.mean() / q.detach().abs().mean().clamp_min(1e-6)


keep_former_names(__name__, {"gains": "adjoint_gains"})
