"""EDM diffusion (Karras et al. 2022, arXiv:2206.00364): training and sampling of all diffusion world models.

A network F reads scaled noisy data and predicts a mixture of data and noise, so that inputs and targets have unit
variance at every noise level sigma: D(x, sigma) = c_skip x + c_out F(c_in x, c_noise). Time runs from noise to data.
Used with three parameter sets: trajectories (policy-guided diffusion), pixels (DIAMOND) and latent video (Ctrl-World).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import normal
from robopolicy.nn.configuration import CHURN_NOISE, RHO, EdmConfig

Network = Callable[[Tensor, Tensor], Tensor]
"""(scaled input [N, ...], c_noise [N]) -> prediction [N, ...], with conditions already bound."""

Guidance = Callable[[Tensor, float], Tensor]
"""(denoised data [N, ...], progress in [0, 1]) -> correction to add to it."""


def levels(config: EdmConfig) -> Tensor:
    """Return the sampler's noise levels [steps + 1], from sigma_max down to 0."""
    ramp = torch.linspace(0, 1, config.steps, dtype=torch.float64) if config.steps > 1 else torch.zeros(1).double()
    top, bottom = config.sigma_max ** (1 / RHO), config.sigma_min ** (1 / RHO)
    return torch.cat([(top + ramp * (bottom - top)) ** RHO, torch.zeros(1, dtype=torch.float64)])


def calls(config: EdmConfig) -> int:
    """Return the number of network evaluations per sampled chain."""
    return config.steps if config.order == 1 else 2 * config.steps - 1


def denoise(network: Network, noisy: Tensor, sigma: Tensor, config: EdmConfig) -> Tensor:
    """Return D(x, sigma), the expected clean data, for noisy [N, ...] and sigma [N]."""
    # c_skip, c_out and c_in give F inputs and targets of unit variance; c_noise is log(sigma) / 4.
    wide, data = sigma.reshape(-1, *[1] * (noisy.dim() - 1)), config.sigma_data
    total = (wide.square() + data**2).sqrt()
    skip = data**2 / total.square()
    out = wide * data / total
    scale = 1 / total
    return skip * noisy + out * network(scale * noisy, sigma.log() / 4)


def training_noise(
    clean: Tensor, config: EdmConfig, generator: torch.Generator, high_fraction: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return noisy data like `clean` [N, C, ...] and its noise levels [N].

    high_fraction: rows, as a fraction, whose level is uniform from 1 to sigma_max instead of log-normal, as in Cosmos
    Policy (arXiv:2601.16163): where the mean over many copies of a number tells it through the usual noise, nothing
    else would be learned.
    """
    device = clean.device
    log_noise = torch.randn(len(clean), generator=generator, device=device)
    sigma = (config.log_mean + config.log_std * log_noise).exp()
    if high_fraction:
        chosen, place = torch.rand(2, len(clean), generator=generator, device=device)
        sigma = torch.where(chosen < high_fraction, 1 + (config.sigma_max - 1) * place, sigma)
    noise = torch.randn(clean.shape, generator=generator, device=device)
    if config.offset_noise:
        channels = clean.shape[:2] + (1,) * (clean.dim() - 2)
        noise = noise + config.offset_noise * torch.randn(channels, generator=generator, device=device)
    return clean + sigma.reshape(-1, *[1] * (clean.dim() - 1)) * noise, sigma


def training_noise_with_starts(
    clean: Tensor, config: EdmConfig, share: float, generator: torch.Generator, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return noisy data like `clean` [N, C, ...], its noise levels [N], and the mask of rows that start from pure
    noise.

    A fraction `share` of the rows is pure noise with deviation `temperature` at sigma_max, as at the start of unscaled
    sampling: there the network must rely on its conditions. Mask: [N] bool.
    """
    noisy, sigma = training_noise(clean, config, generator)
    first = torch.rand(len(clean), generator=generator, device=generator.device).to(clean.device) < share
    start = temperature * torch.randn(clean.shape, generator=generator, device=clean.device)
    noisy = torch.where(first.reshape(-1, *[1] * (clean.dim() - 1)), start, noisy)
    return noisy, torch.where(first, config.sigma_max, sigma), first


def loss(
    network: Network, clean: Tensor, config: EdmConfig, generator: torch.Generator, high_fraction: float = 0.0
) -> Tensor:
    """Return the elementwise squared error of F (equivalently of D, weighted) at random noise levels, [N, ...].

    high_fraction: as in `training_noise`.
    """
    noisy, sigma = training_noise(clean, config, generator, high_fraction)
    return weighted_error(denoise(network, noisy, sigma, config), clean, sigma, config)


def weighted_error(denoised: Tensor, clean: Tensor, sigma: Tensor, config: EdmConfig) -> Tensor:
    """Return the elementwise squared error of F, [N, ...], from the output of D at noise levels [N]."""
    wide, data = sigma.reshape(-1, *[1] * (clean.dim() - 1)), config.sigma_data
    # D = c_skip x + c_out F, so the squared error of F is that of D divided by c_out squared.
    weight = (wide.square() + data**2) / (wide * data).square()
    return weight * (denoised - clean).square()


def sample(
    network: Network,
    noise: Tensor,
    config: EdmConfig,
    generator: torch.Generator | None = None,
    guidance: Guidance | None = None,
    *,
    scaled: bool = True,
) -> Tensor:
    """Generate data from standard normal `noise` [N, ...], without gradients.

    generator: only needed for churn. guidance: shifts the denoised data at every level but the last. scaled=False
    starts from the unscaled noise at sigma_max, as DIAMOND does, which drifts less. Raises ConfigError when
    config.churn is not 0 and there is no generator.
    """
    if config.churn and generator is None:
        raise ConfigError("A sampler with churn samples noise: pass it a generator.")
    sigmas = levels(config)
    x = noise * (config.sigma_max if scaled else 1.0)
    gain = min(config.churn / config.steps, 2**0.5 - 1)
    for step, (sigma, next_sigma) in enumerate(zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True)):
        # Churn: raise the noise a little, variances adding up, and go on from the higher level.
        if generator is not None and gain:
            higher_sigma = sigma * (1 + gain)
            churn_noise = normal(x.shape, generator, x.device) * CHURN_NOISE
            x, sigma = x + churn_noise * (higher_sigma**2 - sigma**2) ** 0.5, higher_sigma
        progress = step / config.steps
        slope = _slope(network, x, sigma, config, guidance if next_sigma > 0 else None, progress)
        proposal = x + (next_sigma - sigma) * slope
        # Heun: go again, with the mean of the slopes at both ends; at the last level, 0, there is no slope.
        if config.order == 2 and next_sigma > 0:
            slope = (slope + _slope(network, proposal, next_sigma, config, guidance, progress)) / 2
            proposal = x + (next_sigma - sigma) * slope
        x = proposal
    return x


@torch.no_grad()
def _denoised(network: Network, x: Tensor, sigma: float, config: EdmConfig) -> Tensor:
    return denoise(network, x, torch.full((len(x),), sigma, dtype=x.dtype, device=x.device), config)


def _slope(
    network: Network, x: Tensor, sigma: float, config: EdmConfig, guidance: Guidance | None, progress: float
) -> Tensor:
    """Return dx / dsigma = (x - D(x, sigma)) / sigma, [N, ...] like x."""
    clean = _denoised(network, x, sigma, config)
    if guidance is not None:
        clean = clean + guidance(clean, progress)
    return (x - clean) / sigma
