"""Noise schedules: one transition function both samples denoising or flow steps and computes their log-probability.

Time convention: 0 = data, 1 = noise. Sampling steps are counted from the noisiest (step 0) to the cleanest
(step K-1). Every step of DDPM, DDIM(eta), rectified flow and flow-SDE has the same affine form

    clean = clip(a x + b prediction),   mean = c clean + d x,   std

so a schedule is a table of (a, b, c, d, std) with one row per step, and training is affine as well.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import integers, normal, uniform
from robopolicy.nn.configuration import FlowNoise, Prediction, Spacing


@dataclass(frozen=True)
class Normal:
    """Elementwise Gaussian; std broadcasts against mean, and std = 0 denotes a deterministic step (no density)."""

    mean: Tensor
    std: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        """Return mean + std * noise for standard normal noise [..., P, A]."""
        return self.mean + self.std * noise

    def log_prob(self, value: Tensor, min_std: float = 0.0) -> Tensor:
        """Return the log-density of each element of value [..., P, A], std raised to `min_std`; zero where std = 0."""
        dense = self.std > 0
        std = torch.where(dense, self.std.clamp_min(min_std), torch.ones_like(self.std))
        constant = std.log() + 0.5 * math.log(2 * math.pi)
        return ((value - self.mean) / std).square().mul(-0.5).sub(constant) * dense

    def entropy(self, min_std: float = 0.0) -> Tensor:
        """Return each element's entropy, std's shape [..., 1 or P, 1 or A]; zero where std = 0."""
        dense = self.std > 0
        std = torch.where(dense, self.std.clamp_min(min_std), torch.ones_like(self.std))
        return (std.log() + 0.5 * math.log(2 * math.pi * math.e)) * dense


class NoiseSchedule(nn.Module):
    """Common affine form of a schedule with K steps; base of `DiffusionSchedule` and `FlowSchedule`.

    times [K]: the denoiser's time input in (0, 1]; density [K] bool: steps with std > 0. table, deterministic_table:
    [K, 5] rows (a, b, c, d, std). clip: bound on the clean estimate, None for no bound. signals [K]: sqrt(alpha) if the
    noise estimate is not re-derived from the bounded clean estimate, None if it is.
    """

    times: Tensor
    density: Tensor
    table: Tensor
    deterministic_table: Tensor
    signals: Tensor | None

    def __init__(self, times: Tensor, table: Tensor, deterministic_table: Tensor, clip: float | None):
        super().__init__()
        self.clip = clip
        self.register_buffer("times", times.float(), persistent=False)
        self.register_buffer("table", table.float(), persistent=False)
        self.register_buffer("deterministic_table", deterministic_table.float(), persistent=False)
        self.register_buffer("density", self.table[:, 4] > 0, persistent=False)
        self.register_buffer("signals", None, persistent=False)

    @property
    def steps(self) -> int:
        """Number of sampling steps K."""
        return len(self.times)

    def transition(
        self,
        x: Tensor,
        prediction: Tensor,
        step: Tensor | slice | int,
        *,
        deterministic: bool = False,
        explored: int | None = None,
    ) -> Normal:
        """Return the Gaussian of the next latent given x, prediction [..., P, A] and the steps' indices.

        x: [..., P, A]; step: an index, a slice, or indices that broadcast against its leading axes. deterministic: the
        noise-free sampler on the same grid (DDIM with eta 0, or the flow's ODE), std 0. explored: number of the A
        elements that get noise, None for all; the others have the noise-free mean, and std does not apply to them.
        """
        if explored is not None and explored < x.shape[-1] and not deterministic:
            # An SDE's drift corrects for its noise: what gets none must not have it either.
            noisy = self.transition(x, prediction, step)
            noise_free_mean = self.transition(x, prediction, step, deterministic=True).mean
            return Normal(torch.cat([noisy.mean[..., :explored], noise_free_mean[..., explored:]], -1), noisy.std)
        table = self.deterministic_table if deterministic else self.table
        a, b, c, d, std = table[step][..., None, None].unbind(-3)
        clean = a * x + b * prediction
        if self.clip is None:
            return Normal(c * clean + d * x, std)
        bounded = clean.clamp(-self.clip, self.clip)
        mean = c * bounded + d * x
        if self.signals is not None:
            # The noise is (x - signal clean) / noise; c and d take the bounded clean for it, this puts the other back.
            mean = mean + d * self.signals[step][..., None, None] * (bounded - clean)
        return Normal(mean, std)

    def clean_estimate(self, x: Tensor, prediction: Tensor, step: Tensor | slice | int) -> Tensor:
        """Return the estimate of the clean sample, [..., P, A], before it is clipped."""
        a, b = self.table[step][..., None, None].unbind(-3)[:2]
        return a * x + b * prediction

    def levels(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw training noise levels [count]: times uniform in [0, 1)."""
        return uniform((count,), generator)

    def level_times(self, level: Tensor) -> Tensor:
        """Return the denoiser's time input [count]: the level itself."""
        return level


class DiffusionSchedule(NoiseSchedule):
    """DDPM (Ho 2020) and DDIM (Song 2021) with the alphas and timesteps of diffusers' DDIMScheduler.

    training_steps T: grid on which the denoiser is trained; sampling_steps K <= T: number of sampling steps; eta 1 with
    K = T is DDPM's ancestral sampling, eta 0 is DDIM. The noise is re-derived from the clipped clean estimate
    (diffusers' use_clipped_model_output), which makes DDPM and DDIM(eta = 1) one formula, unless `rederived` is False,
    as in diffusers' default DDIM. min_std: lower bound of the exploration noise (DPPO: .1 for acting and
    log-probabilities); the deterministic sampler has none.
    """

    alphas: Tensor

    def __init__(
        self,
        training_steps: int = 100,
        sampling_steps: int = 10,
        prediction: Prediction = Prediction.EPSILON,
        *,
        eta: float = 1.0,
        min_std: float = 0.0,
        clip: float | None = 1.0,
        spacing: Spacing = Spacing.TRAILING,
        beta_schedule: str = "squaredcos_cap_v2",
        rederived: bool = True,
    ):
        if not 1 <= sampling_steps <= training_steps:
            raise ConfigError(f"sampling_steps={sampling_steps} must be from 1 to the {training_steps} training steps.")
        if not 0.0 <= eta <= 1.0:
            raise ConfigError(f"eta={eta} must be from 0 (DDIM) to 1 (DDPM).")
        alphas = cumulative_alphas(training_steps, beta_schedule).double()
        steps = sampled_steps(training_steps, sampling_steps, spacing)
        tables = [_diffusion_table(alphas, steps, prediction, value) for value in (eta, 0.0)]
        tables[0][:, 4] = tables[0][:, 4].clamp_min(min_std)
        super().__init__((steps + 1).double() / training_steps, tables[0], tables[1], clip)
        self.prediction = prediction
        self.training_steps = training_steps
        self.beta_schedule = beta_schedule
        self.spacing = spacing
        self.register_buffer("alphas", alphas.float(), persistent=False)
        if not rederived:
            self.signals = alphas[steps].sqrt().float()

    def levels(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw training noise levels [count]: uniform step indices in [0, T)."""
        return integers(self.training_steps, (count,), generator)

    def level_times(self, level: Tensor) -> Tensor:
        """Return the denoiser's time input [count] in (0, 1] of step indices."""
        return (level + 1).to(self.times.dtype) / self.training_steps

    def corrupt(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Return sqrt(alpha) clean + sqrt(1 - alpha) noise, [N, P, A]."""
        alpha = self.alphas[level][:, None, None]
        return alpha.sqrt() * clean + (1 - alpha).sqrt() * noise

    def target(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Return the denoiser's prediction target, [N, P, A]."""
        if self.prediction is Prediction.EPSILON:
            return noise
        if self.prediction is Prediction.SAMPLE:
            return clean
        alpha = self.alphas[level][:, None, None]
        return alpha.sqrt() * noise - (1 - alpha).sqrt() * clean


def cumulative_alphas(training_steps: int, beta_schedule: str) -> Tensor:
    """Return the cumulative products of 1 - beta [T] float32 of a diffusers schedule, bitwise equal to diffusers.

    squaredcos_cap_v2: the cosine of Nichol 2021 (arXiv:2102.09672, eq. 17); linear: Ho 2020; scaled_linear: linear in
    the square root (Rombach 2022). Reimplemented because importing diffusers takes seconds. Raises ConfigError for
    other names.
    """
    low, high = 1e-4, 2e-2
    if beta_schedule == "squaredcos_cap_v2":
        signal = [
            math.cos((step / training_steps + 0.008) / 1.008 * math.pi / 2) ** 2 for step in range(training_steps + 1)
        ]
        betas = torch.tensor([min(1 - after / before, 0.999) for before, after in pairwise(signal)])
    elif beta_schedule == "linear":
        betas = torch.linspace(low, high, training_steps)
    elif beta_schedule == "scaled_linear":
        betas = torch.linspace(low**0.5, high**0.5, training_steps).square()
    else:
        names = "squaredcos_cap_v2, linear or scaled_linear"
        raise ConfigError(f"The noise schedule '{beta_schedule}' is not known: choose {names}.")
    return torch.cumprod(1 - betas, 0)


def sampled_steps(training_steps: int, sampling_steps: int, spacing: Spacing) -> Tensor:
    """Return the training steps [K] int64 that are sampled, noisiest first (arXiv:2305.08891, table 2)."""
    if spacing is Spacing.LEADING:
        return torch.arange(sampling_steps).flip(0) * (training_steps // sampling_steps)
    grid = np.arange(training_steps, 0, -training_steps / sampling_steps)
    return torch.from_numpy(np.round(grid).astype(np.int64) - 1)


def _diffusion_table(alphas: Tensor, steps: Tensor, prediction: Prediction, eta: float) -> Tensor:
    """Rows (a, b, c, d, std) of formulas 12 and 16 of DDIM (arXiv:2010.02502), fp64, [K, 5]."""
    alpha = alphas[steps]
    previous = torch.cat([alpha[1:], torch.ones(1, dtype=alpha.dtype)])
    signal, noise = alpha.sqrt(), (1 - alpha).sqrt()
    std = eta * ((1 - previous) / (1 - alpha) * (1 - alpha / previous)).clamp_min(0).sqrt()
    direction = (1 - previous - std.square()).clamp_min(0).sqrt()
    if prediction is Prediction.EPSILON:
        a, b = 1 / signal, -noise / signal
    elif prediction is Prediction.SAMPLE:
        a, b = torch.zeros_like(signal), torch.ones_like(signal)
    else:
        a, b = signal, -noise
    return torch.stack([a, b, previous.sqrt() - direction * signal / noise, direction / noise, std], -1)


class FlowSchedule(NoiseSchedule):
    """Rectified flow x_t = (1 - t) data + t noise, velocity = noise - data, K equal steps from t = 1 to 0.

    noise: ODE (none); SDE (Flow-GRPO, arXiv:2505.05470): sigma_t = level * sqrt(t / (1 - t)), with the singular t = 1
    replaced by the next grid value; its last step is noise-free (sigma vanishes at t = 0), so it has no density and is
    masked out; where min_std is larger, drift and noise follow `_raised_table`, so that latents stay as noisy as in
    training; CONSTANT (after ReinFlow, arXiv:2505.22094, with a fixed instead of a learned level): std = level within
    `bounds` on every step. min_std: lower bound of non-zero exploration noise. clip: bound on the clean estimate x - t
    v (not in the papers; None disables it).
    """

    def __init__(
        self,
        sampling_steps: int = 10,
        *,
        noise: FlowNoise = FlowNoise.CONSTANT,
        level: float = 0.1,
        bounds: tuple[float, float] = (0.05, 0.24),
        min_std: float = 0.0,
        clip: float | None = 1.0,
    ):
        if sampling_steps < 1:
            raise ConfigError(f"A flow needs at least one sampling step, but got {sampling_steps}.")
        time = torch.arange(sampling_steps, 0, -1, dtype=torch.float64) / sampling_steps
        step = 1 / sampling_steps
        ode = _flow_table(time, step, torch.zeros_like(time))
        table = ode.clone()
        if noise is FlowNoise.SDE:
            safe = torch.where(time < 1, time, time - step)
            sigma = level * (safe / (1 - safe)).sqrt()
            sigma[-1] = 0.0
            table = _flow_table(time, step, sigma)
            low = table[:, 4] < min_std
            low[-1] = False
            table = torch.where(low[:, None], _raised_table(time, step, min_std), table)
        elif noise in (FlowNoise.CONSTANT, FlowNoise.LEARNED):  # learned: where the network starts from
            table[:, 4] = max(min(max(level, bounds[0]), bounds[1]), min_std)
        super().__init__(time, table, ode, clip)

    def corrupt(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Return (1 - t) clean + t noise, [N, P, A]."""
        time = level[:, None, None]
        return (1 - time) * clean + time * noise

    def target(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Return the velocity noise - clean, [N, P, A]."""
        return noise - clean


class EstimateSchedule(NoiseSchedule):
    """X-VLA's sampler (arXiv:2510.10274) as in LeRobot 0.6.1: every step predicts the clean data directly.

    Data and noise mix as in a flow, x_t = (1 - t) data + t noise, on K equal steps from t = 1 to 0. A step continues
    from the initial noise, whereas an Euler step would use the noise implied by x_t and the estimate:

        estimate = network(x_t, t),   x_s = (1 - s) estimate + s noise,   s = t - 1/K

    x_t alone does not determine the next latent, so a latent contains both, [estimate, noise], and is twice as wide as
    the data; the network mixes them (`mixed`) and passes the noise on unchanged. The estimate in the first latent has
    zero weight. Exploration adds noise of std `level` to every x_s, equivalent to level / (1 - s) on the estimate.
    """

    def __init__(self, sampling_steps: int = 10, level: float = 0.0):
        if sampling_steps < 1:
            raise ConfigError(f"A chain needs at least one sampling step, but got {sampling_steps}.")
        time = torch.arange(sampling_steps, 0, -1, dtype=torch.float64) / sampling_steps
        none, ones = torch.zeros_like(time), torch.ones_like(time)
        std = level / (1 - time + 1 / sampling_steps)
        tables = [torch.stack([none, ones, ones, none, noise], -1) for noise in (std, none)]
        super().__init__(time, tables[0], tables[1], None)

    @staticmethod
    def mixed(latents: Tensor, time: Tensor) -> Tensor:
        """Return x_t [N, P, L] of latents [N, P, 2L] at times [N]."""
        estimate, noise = latents.chunk(2, -1)
        t = time[:, None, None]
        return noise * t + estimate * (1 - t)

    def corrupt(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Return latents [N, P, 2L] with the first half of `clean` and the second half of `noise`, both [N, P, 2L]."""
        return torch.cat([clean.chunk(2, -1)[0], noise.chunk(2, -1)[1]], -1)

    def target(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Return the target of the estimate, [N, P, 2L], in its first half."""
        return clean


Schedule = DiffusionSchedule | FlowSchedule | EstimateSchedule
"""A schedule with training levels."""


def _flow_table(time: Tensor, step: float, sigma: Tensor) -> Tensor:
    """Rows (a, b, c, d, std) of one Euler-Maruyama step of length `step` towards t = 0, fp64, [K, 5].

    mean = x - step (v + sigma^2 / (2 t) (x + (1 - t) v)), std = sigma sqrt(step), with v = (x - clean) / t.
    """
    drift = sigma.square() / (2 * time)
    velocity = step * (1 + drift * (1 - time)) / time
    return torch.stack(
        [torch.ones_like(time), -time, velocity, 1 - step * drift - velocity, sigma * math.sqrt(step)], -1
    )


def _raised_table(time: Tensor, step: float, std: float) -> Tensor:
    """Rows (a, b, c, d, std) of steps of length `step` towards t = 0 with noise of this std, fp64, [K, 5].

    An SDE has the flow's marginals for any sigma, provided that the drift uses the same sigma. With sigma^2 = std^2 /
    step, s = t - step and (clean, noise) = (x - t v, x + (1 - t) v), the mean of `_flow_table` is (1 - s) clean + kept
    noise, where kept = s - std^2 / 2t. It is bounded below by 0, since no more noise can be removed than there is.
    """
    after = time - step
    from_x = (after - std**2 / (2 * time)).clamp_min(0) / time
    return torch.stack(
        [torch.ones_like(time), -time, 1 - after - from_x * (1 - time), from_x, torch.full_like(time, std)], -1
    )


def truncated_noise(
    shape: tuple[int, ...], limit: float | None, generator: torch.Generator, *, axis: int = 0
) -> Tensor:
    """Draw standard normal noise truncated to [-limit, limit] (None: not truncated), on the generator's device.

    axis: the axis of rows, see `core.randomness.normal`. Unlike clamping, truncation changes the Gaussian's density
    inside the limit only by a constant factor, which cancels in probability ratios, so log-probabilities stay exact.
    """
    if limit is None:
        return normal(shape, generator, axis=axis)
    mass = math.erf(limit / math.sqrt(2))
    numbers = uniform(shape, generator, axis=axis, dtype=torch.float64)
    return (math.sqrt(2) * torch.erfinv((2 * numbers - 1) * mass)).float().clamp_(-limit, limit)
