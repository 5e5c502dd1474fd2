"""Denoising sampler: generates an action chunk from noise in small, reusable functions.

A chain has K steps. A frozen base takes the first K - K', the fine-tuned network the last K', and only those have
log-probabilities (DPPO, arXiv:2409.00588: the first steps have little influence, and every trained step costs a forward
pass). All random numbers are drawn before the first step, so a decision depends only on the generator. Axes: B row, K
step, K' scored step, P predicted step, A action dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.former_names import keep_former_names
from robopolicy.core.randomness import normal, uniform
from robopolicy.nn.schedules import DiffusionSchedule, FlowSchedule, NoiseSchedule, Normal, truncated_noise
from robopolicy.policies.configuration import DenoisingPolicyConfig, PolicyKind
from robopolicy.policies.latents import CustomLatents
from robopolicy.policies.network import Steps


def make_schedule(config: DenoisingPolicyConfig, **diffusion: Any) -> DiffusionSchedule | FlowSchedule:
    """Build the noise schedule of the configuration; diffusion: additional arguments of a diffusion schedule."""
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
        spacing=config.timestep_spacing,
        **diffusion,
    )


def how_to_explore(network: object) -> str:
    """Return the settings that add noise to noise-free steps, completing the message "fine-tune more steps, or "."""
    if isinstance(network, CustomLatents):
        return network.how_to_explore
    return "set flow_noise=constant, or increase eta or min_sampling_std"


@dataclass(frozen=True)
class NoiseDraws:
    """Random numbers for B action chunks.

    start: initial noise [B, P, A]; steps: noise of every step [K, B, P, A], None for the noise-free sampler; quiet:
    mask of scored steps that are noise-free nevertheless [B, K'] bool, None for none; explored: number of latent
    elements with noise in each step, None for all A.
    """

    start: Tensor
    steps: Tensor | None = None
    quiet: Tensor | None = None
    explored: int | None = None


@dataclass(frozen=True)
class ResumedSteps:
    """Steps kept from earlier action chunks, so that trees can branch inside chains.

    chain: earlier latents [B, K'+1, P, A]; count: number of scored steps to keep [B]: 0 keeps only the input of the
    first one, -1 nothing.
    """

    chain: Tensor
    count: Tensor

    def begin(self, x: Tensor) -> Tensor:
        """Insert the kept inputs of the first scored step into latents [B, P, A]."""
        return torch.where((self.count >= 0)[:, None, None], self.chain[:, 0], x)

    def after(self, x: Tensor, index: int) -> Tensor:
        """Insert the kept results of scored step `index` into latents [B, P, A]."""
        return torch.where((self.count > index)[:, None, None], self.chain[:, index + 1], x)


@dataclass(frozen=True)
class Chain:
    """Scored part of B chains: latents [B, K'+1, P, A], noisiest first; mean and std of every step's Gaussian.

    mean: [B, K', P, A]; std: broadcastable to it.
    """

    latents: Tensor
    normal: Normal

    @property
    def final(self) -> Tensor:
        """The clean latents [B, P, A]."""
        return self.latents[:, -1]


def draw_noise(
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
) -> NoiseDraws:
    """Draw all random numbers for chains of `shape` [B, P, A] on the generator's device, and move them to `device`.

    noisy: whether steps have noise; noise_clip: its bound in standard deviations; scored: slice of scored steps;
    noisy_steps: number of noisy scored steps per decision, None for all; explored: number of elements with noise, None
    for all (padding elements get none).
    """
    start = normal(shape, generator, device)
    if not noisy:
        return NoiseDraws(start)
    steps = truncated_noise((schedule.steps, *shape), noise_clip, generator, axis=1).to(device)
    if explored is not None:
        # After drawing, so that how much is drawn does not depend on what pads an action.
        steps[..., explored:] = 0.0
    quiet_mask = draw_quiet_steps(schedule.density[scored], noisy_steps, shape[0], generator, device)
    return NoiseDraws(start, steps, quiet_mask, explored)


def draw_quiet_steps(
    dense: Tensor, noisy_steps: int | None, batch: int, generator: torch.Generator, device: torch.device
) -> Tensor | None:
    """Draw the scored steps that are noise-free, mask [B, K'] bool; None if all are noisy.

    dense: mask of steps with a density, [K'] bool. `noisy_steps` of them, chosen uniformly, stay noisy: with fewer
    random steps a decision stays closer to the noise-free one, and the return contains less noise from other steps
    (pi_RL keeps one).
    """
    if noisy_steps is None or noisy_steps >= int(dense.sum()):
        return None
    numbers = uniform((batch, len(dense)), generator, device)
    # The largest of equally distributed numbers are a uniform choice; at -1 a step without density is never one.
    noisy = torch.where(dense, numbers, -1.0).topk(noisy_steps, dim=1).indices
    return torch.ones((batch, len(dense)), dtype=torch.bool, device=device).scatter(1, noisy, False)


def sample_chain(
    schedule: NoiseSchedule,
    first: int,
    leading: Steps,
    scored: Steps,
    draws: NoiseDraws,
    *,
    learned_std: Callable[[int], Tensor] | None = None,
    kept: ResumedSteps | None = None,
) -> Chain:
    """Take all K steps and return the chain from step `first` = K - K' on.

    leading: network for the steps before `first`; scored: network for the others; learned_std: step -> std [B, 1, A],
    replaces the schedule's for scored steps; kept: steps taken from earlier chains.
    """
    x = run_base_steps(schedule, first, leading, draws)
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
            noise_free_mean = schedule.transition(x, prediction, step, deterministic=True).mean
            after = torch.where(draws.quiet[:, index, None, None], noise_free_mean, after)
        x = after if kept is None else kept.after(after, index)
        latents.append(x)
        means.append(normal.mean)
        stds.append(normal.std)
    # The schedule's stds are one table for all rows; only learned ones differ from decision to decision.
    std = schedule.table[first:, 4][:, None, None] if learned_std is None else torch.stack(stds, 1)
    return Chain(torch.stack(latents, 1), Normal(torch.stack(means, 1), std))


def run_base_steps(schedule: NoiseSchedule, first: int, leading: Steps, draws: NoiseDraws) -> Tensor:
    """Take the steps before `first` with the frozen base and return the latents [B, P, A] at the input of step `first`.

    The base stays frozen so that the inputs of the scored steps do not change during training.
    """
    x = draws.start
    for step in range(first):
        prediction = leading.one(x, step)
        normal = schedule.transition(x, prediction, step, deterministic=draws.steps is None, explored=draws.explored)
        x = normal.mean if draws.steps is None else normal.sample(draws.steps[step])
    return x


def finish_chain(schedule: NoiseSchedule, first: int, scored: Steps, x: Tensor, next_step: Tensor) -> Tensor:
    """Take noise-free steps from latents x [N, P, A] at the input of scored step next_step [N], 0..K'."""
    for index, step in enumerate(range(first, schedule.steps)):
        after = schedule.transition(x, scored.one(x, step), step, deterministic=True).mean
        # A row further along keeps its latents until the loop has come to its step.
        x = torch.where((next_step <= index)[:, None, None], after, x)
    return x


def trajectory(
    schedule: NoiseSchedule, first: int, leading: Steps, scored: Steps, start: Tensor, through: int | None = None
) -> Tensor:
    """Return every latent [B, K+1, P, A] of the noise-free chain from noise `start` [B, P, A], differentiable in all
    inputs.

    leading: network for the steps before `first`, scored: for the others; through: number of last steps with a
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


def sampled_steps_mask(schedule: NoiseSchedule, first: int, draws: NoiseDraws, kept: ResumedSteps | None) -> Tensor:
    """Return the mask [B, K'] bool of sampled scored steps; only those have a log-probability.

    False for noise-free chains, steps with zero std (the last step of a flow-SDE), quiet steps, and steps kept from
    another decision, to which they belong.
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


keep_former_names(
    __name__,
    {
        "Kept": "ResumedSteps",
        "Draws": "NoiseDraws",
        "draw": "draw_noise",
        "lead": "run_base_steps",
        "choices": "sampled_steps_mask",
    },
)
