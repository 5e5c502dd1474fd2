"""EDM against closed forms and against diffusers: levels, preconditioning, samplers, guidance."""

import math

import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.nn.configuration import EdmConfig
from robopolicy.nn.edm import denoise, levels, loss, sample, training_noise

MEAN, STD = 0.3, 0.5


def perfect(config):
    """The network F whose D is the posterior mean of data ~ N(MEAN, STD^2)."""

    def network(scaled, noise_label):
        sigma = (4 * noise_label).exp().reshape(-1, *[1] * (scaled.dim() - 1))
        total = (sigma.square() + config.sigma_data**2).sqrt()
        x = scaled * total
        best = (STD**2 * x + sigma.square() * MEAN) / (STD**2 + sigma.square())
        return (best - config.sigma_data**2 / total.square() * x) / (sigma * config.sigma_data / total)

    return network


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_levels_and_euler_steps_are_those_of_diffusers():
    from diffusers import EDMEulerScheduler

    config = EdmConfig(steps=12, order=1)
    theirs = EDMEulerScheduler(sigma_min=config.sigma_min, sigma_max=config.sigma_max, sigma_data=config.sigma_data)
    theirs.set_timesteps(12)
    assert torch.allclose(theirs.sigmas.double(), levels(config), rtol=1e-4)
    noise = torch.randn(6, 3, generator=generator())
    network = perfect(config)
    x = noise * config.sigma_max
    for step in theirs.timesteps:
        scaled = theirs.scale_model_input(x, step)
        x = theirs.step(network(scaled, step.expand(6)), step, x, generator=generator()).prev_sample
    assert torch.allclose(x, sample(network, noise, config), atol=1e-4)


@pytest.mark.parametrize(("order", "churn"), [(1, 0.0), (2, 0.0), (2, 40.0)])
def test_samples_have_the_distribution_of_the_data(order, churn):
    config = EdmConfig(steps=60, order=order, churn=churn)
    samples = sample(perfect(config), torch.randn(20000, 1, generator=generator()), config, generator(1))
    assert float(samples.mean()) == pytest.approx(MEAN, abs=0.02)
    assert float(samples.std()) == pytest.approx(STD, abs=0.03)


def test_heun_is_closer_to_the_exact_flow_than_euler():
    noise = torch.randn(500, 1, generator=generator())

    def error(order):
        config = EdmConfig(steps=40, order=order)
        start, end = config.sigma_max, 0.0
        exact = MEAN + (start * noise - MEAN) * math.sqrt((STD**2 + end**2) / (STD**2 + start**2))
        return float((sample(perfect(config), noise, config) - exact).abs().mean())

    assert error(2) < 0.2 * error(1)


def test_the_loss_is_least_at_the_posterior_mean_and_its_inputs_have_unit_variance():
    config = EdmConfig()
    clean = MEAN + STD * torch.randn(4000, 2, generator=generator())
    best = loss(perfect(config), clean, config, generator(1)).mean()
    off = loss(lambda x, c: perfect(config)(x, c) + 0.1, clean, config, generator(1)).mean()
    assert float(off - best) == pytest.approx(0.01, abs=0.005)
    noisy, sigma = training_noise(clean - MEAN, config, generator(2))
    scaled = noisy / (sigma.square() + config.sigma_data**2).sqrt()[:, None]
    assert float(scaled.std()) == pytest.approx(1.0, abs=0.05)


def test_a_fraction_of_noise_levels_is_uniform_up_to_the_highest():
    config = EdmConfig(log_mean=-3.0, log_std=0.1, sigma_max=21.0)
    _, sigma = training_noise(torch.zeros(20_000, 1), config, generator(), high_fraction=0.3)
    high = sigma[sigma > 0.5]  # the others are about exp(-3) = .05
    assert len(high) / 20_000 == pytest.approx(0.3, abs=0.01)
    assert float(high.min()) >= 1 and float(high.max()) <= 21
    assert float(high.mean()) == pytest.approx(11, abs=0.2)
    assert float(high.std()) == pytest.approx(20 / 12**0.5, abs=0.2)
    same = [training_noise(torch.ones(5, 1), config, generator(3), *more) for more in ((), (0.0,))]
    assert torch.equal(same[0][0], same[1][0])  # 0 draws nothing more


def test_offset_noise_is_one_draw_a_channel():
    config = EdmConfig(offset_noise=1.0, log_mean=0.0, log_std=0.0)
    noisy, _ = training_noise(torch.zeros(200, 3, 64, 64), config, generator())
    assert float(noisy.mean((2, 3)).std()) == pytest.approx(1.0, abs=0.1)


def test_guidance_moves_samples_and_unscaled_noise_starts_smaller():
    config = EdmConfig(steps=20, sigma_max=5.0)
    noise = torch.randn(2000, 1, generator=generator())
    plain = sample(perfect(config), noise, config)
    pushed = sample(perfect(config), noise, config, guidance=lambda clean, share: torch.full_like(clean, 0.2))
    assert float((pushed - plain).mean()) > 0.1
    assert float(sample(perfect(config), noise, config, scaled=False).std()) < float(plain.std())
    assert torch.allclose(
        denoise(perfect(config), noise, torch.full((2000,), 1e4), config), torch.tensor(MEAN), atol=1e-2
    )


def test_nonsense_is_refused():
    with pytest.raises(ConfigError, match="generator"):
        sample(perfect(EdmConfig()), torch.zeros(1, 1), EdmConfig(churn=1.0))
    with pytest.raises(ConfigError, match="order"):
        EdmConfig(order=3)
    with pytest.raises(ConfigError, match="sigma_min"):
        EdmConfig(sigma_min=100.0)
