"""The loop that turns noise into an action chunk, and its noise schedule: one function and small named parts.

A chain has K steps. A frozen base takes the first K - K', the network that is fine-tuned takes the last K', and only
those are scored (DPPO, arXiv:2409.00588: the first steps decide little, and every step that is trained costs a pass).
All that is random is drawn before the first step, so a decision depends on the generator and never on what happens in
the chain. Axes: B row, K step, K' scored step, P predicted step, A action dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.randomness import normal, uniform
from robopolicy.nn.schedules import DiffusionSchedule, FlowSchedule, NoiseSchedule, Normal, truncated_noise
from robopolicy.policies.configuration import DenoisingPolicyConfig, PolicyKind
from robopolicy.policies.latents import OwnLatents
from robopolicy.policies.network import Steps


def make_schedule(config: DenoisingPolicyConfig, **diffusion: Any) -> DiffusionSchedule | FlowSchedule:
    """Build the noise schedule that the configuration describes; diffusion: what it does not say of a diffusion's."""
    if config.kind is PolicyKind.FLOW:
        return FlowSchedule(
            config.sampling_steps,
            noise=config.flow_noise,
            level=config.flow_noise_level,
            bounds=config.flow_noise_bounds,
            min_std=config.min_sampling_std,
            clip=config.clip,
        )
    return DiffusionSchedule(
        config.denoising_steps,
        config.sampling_steps,
        config.prediction,
        eta=config.eta,
        min_std=config.min_sampling_std,
        clip=config.clip,
        spacing=config.spacing,
        **diffusion,
    )


def how_to_explore(network: object) -> str:
    """Return what gives steps noise where none has any, to go on from "fine-tune more steps, or "."""
    if isinstance(network, OwnLatents):
        return network.how_to_explore
    return "set flow_noise=constant, or raise eta or min_sampling_std"


@dataclass(frozen=True)
class Draws:
    """What is drawn for B decisions.

    start: initial noise [B, P, A]; steps: noise of every step [K, B, P, A], None for the noise-free sampler; quiet:
    which scored steps follow the noise-free sampler all the same [B, K'] bool, None for none of them; explored: how
    many elements of a latent do not, in any step, None for all A of them.
    """

    start: Tensor
    steps: Tensor | None = None
    quiet: Tensor | None = None
    explored: int | None = None


@dataclass(frozen=True)
class Kept:
    """What a decision takes over from another one, so that trees can branch inside chains.

    chain: the other's latents [B, K'+1, P, A]; count: how many of its scored steps to keep [B]: 0 keeps only what came
    before the first of them, -1 nothing at all.
    """

    chain: Tensor
    count: Tensor

    def begin(self, x: Tensor) -> Tensor:
        """Put the kept beginnings in the place of latents [B, P, A] about to enter the first scored step."""
        return torch.where((self.count >= 0)[:, None, None], self.chain[:, 0], x)

    def after(self, x: Tensor, index: int) -> Tensor:
        """Put the kept results in the place of latents [B, P, A] that scored step `index` has made."""
        return torch.where((self.count > index)[:, None, None], self.chain[:, index + 1], x)


@dataclass(frozen=True)
class Chain:
    """The scored part of B chains: latents [B, K'+1, P, A], noisiest first; mean and std of every step's Gaussian.

    mean: [B, K', P, A]; std: broadcastable to it.
    """

    latents: Tensor
    normal: Normal

    @property
    def final(self) -> Tensor:
        """The clean latents [B, P, A]."""
        return self.latents[:, -1]


def draw(
    schedule: NoiseSchedule,
    shape: tuple[int, int, int],
    generator: torch.Generator,
    device: torch.device,
    *,
    noisy: bool,
    noise_clip: float | None,
    scored: slice,
    noisy_steps: int | None,
    explored: int | None = None,
) -> Draws:
    """Draw all that chains of `shape` [B, P, A] need, on the generator's device, and move it to `device`.

    noisy: whether the steps have noise at all; noise_clip: bound on it in standard deviations; scored: which steps of
    the schedule are scored; noisy_steps: how many of them are noisy in each decision, None for all;
    explored: how many elements are, None for all: what pads an action explores nothing.
    """
    start = normal(shape, generator, device)
    if not noisy:
        return Draws(start)
    steps = truncated_noise((schedule.steps, *shape), noise_clip, generator, axis=1).to(device)
    if explored is not None:
        # After drawing, so that how much is drawn does not depend on what pads an action.
        steps[..., explored:] = 0.0
    quiet = draw_quiet_steps(schedule.density[scored], noisy_steps, shape[0], generator, device)
    return Draws(start, steps, quiet, explored)


def draw_quiet_steps(
    dense: Tensor, noisy_steps: int | None, batch: int, generator: torch.Generator, device: torch.device
) -> Tensor | None:
    """Draw which scored steps follow the noise-free sampler, [B, K'] bool; None where none of them does.

    dense: which of them have a density at all, [K'] bool. Of the dense ones `noisy_steps` stay noisy, any set of so
    many alike: fewer random steps leave each decision closer to what the policy means, and what its return says about
    a noisy step is mixed with less of the others' noise (pi_RL keeps one).
    """
    if noisy_steps is None or noisy_steps >= int(dense.sum()):
        return None
    drawn = uniform((batch, len(dense)), generator, device)
    # The largest of equally distributed numbers are a uniform choice; at -1 a step without density is never one.
    noisy = torch.where(dense, drawn, -1.0).topk(noisy_steps, dim=1).indices
    return torch.ones((batch, len(dense)), dtype=torch.bool, device=device).scatter(1, noisy, False)


def sample_chain(
    schedule: NoiseSchedule,
    first: int,
    leading: Steps,
    scored: Steps,
    draws: Draws,
    *,
    learned_std: Callable[[int], Tensor] | None = None,
    kept: Kept | None = None,
) -> Chain:
    """Take all K steps and return the chain from step `first` = K - K' on.

    leading: takes the steps before `first`; scored: takes the others; learned_std: step -> std [B, 1, A] in the place
    of the schedule's, for scored steps; kept: what is taken over from other chains.
    """
    x = lead(schedule, first, leading, draws)
    if kept is not None:
        x = kept.begin(x)
    latents = [x]
    means, stds = [], []
    for index, step in enumerate(range(first, schedule.steps)):
        prediction = scored.one(x, step)
        normal = schedule.transition(x, prediction, step, deterministic=draws.steps is None, explored=draws.explored)
        if learned_std is not None:
            normal = Normal(normal.mean, learned_std(step))
        after = normal.mean if draws.steps is None else normal.sample(draws.steps[step])
        if draws.quiet is not None:
            # Not normal.mean: the drift of an SDE's step corrects for its noise, an ODE's step has neither.
            still = schedule.transition(x, prediction, step, deterministic=True).mean
            after = torch.where(draws.quiet[:, index, None, None], still, after)
        x = after if kept is None else kept.after(after, index)
        latents.append(x)
        means.append(normal.mean)
        stds.append(normal.std)
    # The schedule's stds are one table for all rows; only learned ones differ from decision to decision.
    std = schedule.table[first:, 4][:, None, None] if learned_std is None else torch.stack(stds, 1)
    return Chain(torch.stack(latents, 1), Normal(torch.stack(means, 1), std))


def lead(schedule: NoiseSchedule, first: int, leading: Steps, draws: Draws) -> Tensor:
    """Take the steps before `first` and return the latents [B, P, A] that enter it: the frozen base's part.

    It stays frozen so that what the scored steps are given does not move while they learn.
    """
    x = draws.start
    for step in range(first):
        prediction = leading.one(x, step)
        normal = schedule.transition(x, prediction, step, deterministic=draws.steps is None, explored=draws.explored)
        x = normal.mean if draws.steps is None else normal.sample(draws.steps[step])
    return x


def finish_chain(schedule: NoiseSchedule, first: int, scored: Steps, x: Tensor, next_step: Tensor) -> Tensor:
    """Return what noise-free steps make of latents x [N, P, A] about to enter scored step next_step [N], 0..K'."""
    for index, step in enumerate(range(first, schedule.steps)):
        after = schedule.transition(x, scored.one(x, step), step, deterministic=True).mean
        # A row further along keeps its latents until the loop has come to its step.
        x = torch.where((next_step <= index)[:, None, None], after, x)
    return x


def trajectory(
    schedule: NoiseSchedule, first: int, leading: Steps, scored: Steps, start: Tensor, through: int | None = None
) -> Tensor:
    """Return every latent [B, K+1, P, A] of the noise-free chain from noise `start` [B, P, A], differentiable in all.

    leading: takes the steps before `first`, scored: takes the others; through: how many of the last steps have a
    gradient, None for all.
    """
    latents = [start]
    begin = 0 if through is None else schedule.steps - through
    for step in range(schedule.steps):
        x = latents[-1]
        with torch.set_grad_enabled(torch.is_grad_enabled() and step >= begin):
            prediction = (leading if step < first else scored).one(x, step)
            latents.append(schedule.transition(x, prediction, step, deterministic=True).mean)
    return torch.stack(latents, 1)


def choices(schedule: NoiseSchedule, first: int, draws: Draws, kept: Kept | None) -> Tensor:
    """Return which scored steps were choices of this decision, [B, K'] bool: only those have a log-probability.

    None of a noise-free chain; not those whose Gaussian has no width (the last step of a flow-SDE), that were drawn to
    be quiet, or that were taken over from another decision, whose choices they are.
    """
    batch = len(draws.start)
    density = schedule.density[first:].expand(batch, -1)
    if draws.steps is None:
        return torch.zeros_like(density)
    if draws.quiet is not None:
        density = density & ~draws.quiet
    if kept is not None:
        density = density & (torch.arange(density.shape[1], device=density.device) >= kept.count[:, None])
    return density.clone()
