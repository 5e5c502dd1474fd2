"""Schedules in closed form: posteriors, marginals, floors, densities, and prediction round trips."""

import math

import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.nn.configuration import FlowNoise, Prediction, Spacing
from robopolicy.nn.schedules import DiffusionSchedule, FlowSchedule, Normal, truncated_noise


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_normal_is_the_gaussian_and_has_no_density_without_noise():
    generator = _generator()
    mean, value = torch.randn(4, 3, generator=generator), torch.randn(4, 3, generator=generator)
    std = torch.tensor(0.3)
    reference = torch.distributions.Normal(mean, std)
    assert torch.allclose(Normal(mean, std).log_prob(value), reference.log_prob(value), atol=1e-5)
    assert torch.allclose(Normal(mean, std).entropy(), reference.entropy()[0, 0])
    floored = torch.distributions.Normal(mean, torch.tensor(0.5))
    assert torch.allclose(Normal(mean, std).log_prob(value, min_std=0.5), floored.log_prob(value), atol=1e-5)
    still = Normal(mean, torch.tensor(0.0))
    assert torch.equal(still.log_prob(value), torch.zeros(4, 3))
    assert torch.equal(still.sample(value), mean)


def test_noise_is_truncated_not_clamped():
    noise = truncated_noise((200_000,), 3.0, _generator())
    assert noise.abs().max() <= 3.0
    assert (noise.abs() > 2.999).float().mean() < 1e-4  # clamping would put .0027 of the mass on the bounds
    assert noise.mean().abs() < 0.01
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    variance = 1 - 6 * density / math.erf(3 / math.sqrt(2))
    assert noise.var().item() == pytest.approx(variance, abs=0.01)
    assert truncated_noise((10_000,), None, _generator()).abs().max() > 3


def test_ddpm_is_the_bayes_posterior():
    """q(x_{k-1} | x_k, x_0) by conditioning the joint Gaussian, not by the formula of the code."""
    steps = 20
    schedule = DiffusionSchedule(steps, steps, Prediction.SAMPLE, clip=None)
    alphas = torch.cat([schedule.alphas.double().flip(0), torch.ones(1, dtype=torch.float64)])
    clean, x = torch.full((1, 1, 1), 0.3), torch.full((1, 1, 1), -0.7)
    for unit in range(steps - 1):
        now, after = alphas[unit], alphas[unit + 1]
        step = (now / after).sqrt()  # x_now = step * x_after + sqrt(1 - step^2) * noise
        prior_mean, prior_variance = after.sqrt() * 0.3, 1 - after
        gain = prior_variance * step / (step**2 * prior_variance + 1 - step**2)
        mean = prior_mean + gain * (-0.7 - step * prior_mean)
        std = (prior_variance * (1 - gain * step)).sqrt()
        normal = schedule.transition(x, clean, unit)
        assert normal.mean.item() == pytest.approx(mean.item(), abs=1e-5)
        assert normal.std.item() == pytest.approx(std.item(), abs=1e-5)
    assert schedule.transition(x, clean, steps - 1).mean.item() == pytest.approx(0.3, abs=1e-5)


@pytest.mark.parametrize("prediction", list(Prediction))
@pytest.mark.parametrize("deterministic", [False, True])
def test_predictions_of_the_same_sample_give_the_same_transition(prediction: Prediction, deterministic: bool):
    generator = _generator()
    clean = torch.rand(5, 4, 2, generator=generator) * 2 - 1
    noise = torch.randn(5, 4, 2, generator=generator)
    reference = DiffusionSchedule(50, 10, Prediction.SAMPLE, clip=None)
    schedule = DiffusionSchedule(50, 10, prediction, clip=None)
    for unit in range(1, 10):  # unit 0 is nearly pure noise: 1 / sqrt(alpha) is 2000 and fp32 has 1e-7
        level = (schedule.times[unit] * 50).round().long().expand(5) - 1
        x = schedule.corrupt(clean, noise, level)
        target = schedule.target(clean, noise, level)
        assert torch.allclose(schedule.clean_estimate(x, target, unit), clean, atol=1e-4)
        transition = schedule.transition(x, target, unit, deterministic=deterministic)
        expected = reference.transition(x, clean, unit, deterministic=deterministic)
        assert torch.allclose(transition.mean, expected.mean, atol=1e-4)
        assert torch.equal(transition.std, expected.std)


def test_eta_zero_is_the_deterministic_sampler():
    generator = _generator()
    x, prediction = torch.randn(3, 4, 2, generator=generator), torch.randn(3, 4, 2, generator=generator)
    ddim, ddpm = DiffusionSchedule(eta=0.0), DiffusionSchedule(eta=1.0)
    assert not ddim.density.any()
    for unit in range(ddim.steps):
        expected = ddpm.transition(x, prediction, unit, deterministic=True)
        transition = ddim.transition(x, prediction, unit)
        assert torch.equal(transition.mean, expected.mean)
        assert not transition.std.any() and not expected.std.any()


def test_exploration_floor_acts_on_noise_but_not_on_means():
    plain, floored = DiffusionSchedule(), DiffusionSchedule(min_std=0.1)
    assert torch.equal(floored.table[:, :4], plain.table[:, :4])
    assert torch.equal(floored.table[:, 4], plain.table[:, 4].clamp_min(0.1))
    assert plain.density.tolist() == [True] * 9 + [False]
    assert floored.density.all()
    assert not floored.deterministic_table[:, 4].any()


def test_units_may_be_indices_slices_or_tensors():
    generator = _generator()
    schedule = DiffusionSchedule(min_std=0.1)
    x, prediction = torch.randn(3, 10, 4, 2, generator=generator), torch.randn(3, 10, 4, 2, generator=generator)
    whole = schedule.transition(x, prediction, slice(None))
    chosen = torch.tensor([[1, 7], [0, 9], [4, 2]])
    rows = torch.arange(3)[:, None]
    part = schedule.transition(x[rows, chosen], prediction[rows, chosen], chosen)
    assert torch.equal(part.mean, whole.mean[rows, chosen])
    single = schedule.transition(x[:, 3], prediction[:, 3], 3)
    assert torch.equal(single.mean, whole.mean[:, 3])
    assert torch.equal(single.std.squeeze(), whole.std[3].squeeze())


@pytest.mark.parametrize("spacing", list(Spacing))
def test_spacing_keeps_one_end_of_the_grid(spacing: Spacing):
    times = DiffusionSchedule(100, 10, spacing=spacing).times
    assert (times[:-1] > times[1:]).all()
    if spacing is Spacing.TRAILING:
        assert times[0].item() == 1.0
    else:
        assert times[-1].item() == pytest.approx(0.01)


def test_a_perfect_prediction_denoises_exactly():
    clean = torch.rand(6, 4, 2, generator=_generator()) * 2 - 1
    x = torch.randn(6, 4, 2, generator=_generator(1))
    flow = FlowSchedule(7, noise=FlowNoise.ODE)
    diffusion = DiffusionSchedule(40, 8, Prediction.SAMPLE, eta=0.0)
    latents = [x, x]
    for unit in range(7):
        velocity = (latents[0] - clean) / flow.times[unit]
        latents[0] = flow.transition(latents[0], velocity, unit).mean
    for unit in range(8):
        latents[1] = diffusion.transition(latents[1], clean, unit).mean
    for sample_end in latents:
        assert torch.allclose(sample_end, clean, atol=1e-5)


def test_flow_targets_invert_to_the_clean_sample():
    generator = _generator()
    schedule = FlowSchedule(5)
    clean, noise = torch.rand(8, 3, 2, generator=generator) - 0.5, torch.randn(8, 3, 2, generator=generator)
    level = schedule.levels(8, generator)
    assert ((level >= 0) & (level < 1)).all()
    x = schedule.corrupt(clean, noise, level)
    velocity = schedule.target(clean, noise, level)
    assert torch.allclose(x - level[:, None, None] * velocity, clean, atol=1e-6)


def test_flow_sde_keeps_the_marginals_of_the_flow():
    """Gaussian data: the exact velocity is affine in x, so mean and variance propagate in closed form."""
    steps, mean_data, std_data = 4000, 0.4, 0.3
    schedule = FlowSchedule(steps, noise=FlowNoise.SDE, level=0.7, clip=None)
    assert schedule.density.tolist() == [True] * (steps - 1) + [False]
    a, b, c, d, std = schedule.table.double().unbind(-1)
    time = torch.arange(steps, 0, -1, dtype=torch.float64) / steps
    mean, variance = 0.0, 1.0
    for unit in range(steps):
        t = time[unit].item()
        spread = (1 - t) ** 2 * std_data**2 + t**2
        slope = (t - (1 - t) * std_data**2) / spread  # E[noise - data | x] = -mean_data + slope (x - (1 - t) mean_data)
        offset = -mean_data - slope * (1 - t) * mean_data
        clean_slope, clean_offset = a[unit].item() + b[unit].item() * slope, b[unit].item() * offset
        gain = c[unit].item() * clean_slope + d[unit].item()
        mean = gain * mean + c[unit].item() * clean_offset
        variance = gain**2 * variance + std[unit].item() ** 2
    assert mean == pytest.approx(mean_data, abs=5e-3)
    assert math.sqrt(variance) == pytest.approx(std_data, abs=5e-3)


def _stds(schedule: FlowSchedule, std_data: float) -> list[float]:
    """Return by what factor the latents after each step but the last are noisier than trained, data ~ N(0, std^2)."""
    steps = schedule.steps
    a, b, c, d, std = schedule.table.double().unbind(-1)
    variance, stds = 1.0, []
    for unit in range(steps - 1):
        t, after = 1 - unit / steps, 1 - (unit + 1) / steps
        slope = (t - (1 - t) * std_data**2) / ((1 - t) ** 2 * std_data**2 + t**2)  # E[noise - data | x] / x
        gain = c[unit].item() * (a[unit].item() + b[unit].item() * slope) + d[unit].item()
        variance = gain**2 * variance + std[unit].item() ** 2
        stds.append(math.sqrt(variance / ((1 - after) ** 2 * std_data**2 + after**2)))
    return stds


@pytest.mark.parametrize("level", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("std_data", [0.1, 0.3, 1.0])
def test_a_floor_under_an_sde_keeps_the_marginals_of_the_flow(level: float, std_data: float):
    """Gaussian data in closed form: as noisy as trained, but for an error that is of first order in a step's length."""
    noise, stds_of_flow = FlowNoise.SDE, []
    for steps in (200, 400):
        # The noise of level 0.7 in the middle: the floor bites in some steps or in all of them.
        floor = 0.7 * math.sqrt(1 / steps)
        schedule = FlowSchedule(steps, noise=noise, level=level, min_std=floor)
        plain = FlowSchedule(steps, noise=noise, level=level).table
        low = plain[:, 4] < floor
        low[-1] = False
        assert low.any() and torch.equal(schedule.table[~low], plain[~low])
        assert schedule.table[low, 4].unique().tolist() == pytest.approx([floor])
        stds_of_flow.append(_stds(schedule, std_data))
    # To the time 0.1, behind which a step's noise is more than there is at all.
    coarse, fine = (max(abs(each - 1) for each in wrong[: round(0.9 * len(wrong))]) for wrong in stds_of_flow)
    assert fine < 0.012
    assert fine < (0.6 if low[:-1].all() else 0.95) * coarse  # a level's first steps err by less than that


def test_an_sde_of_the_default_floor_is_nearly_as_noisy_as_trained():
    """In 10 steps, of data that is one point: with the drift of a smaller noise it would be 1.58 times at the end."""
    assert max(_stds(FlowSchedule(10, noise=FlowNoise.SDE, level=0.1, min_std=0.1), 0.0)[:-1]) < 1.07
    assert max(_stds(FlowSchedule(10, noise=FlowNoise.SDE, level=0.1, min_std=0.1), 0.0)) < 1.3


@pytest.mark.parametrize("steps", [10, 100])
def test_a_floor_above_all_noise_of_a_level_takes_no_more_away_than_there_is(steps: int):
    """Data that is one point: where the floor is more than a level's noise, latents are as noisy as the floor says."""
    stds = _stds(FlowSchedule(steps, noise=FlowNoise.SDE, level=0.1, min_std=0.2), 0.0)
    for unit, wrong in enumerate(stds):
        left = 1 - (unit + 1) / steps
        assert wrong * left < max(1.3 * left, 0.3)
    assert stds[-1] / steps == pytest.approx(0.2, abs=1e-5)


def test_a_raised_noise_has_flow_grpos_drift():
    """Its own formula, with the sigma of the noise that is drawn."""
    steps, floor = 10, 0.15
    schedule = FlowSchedule(steps, noise=FlowNoise.SDE, level=0.05, min_std=floor, clip=None)
    generator = _generator()
    x, velocity = torch.randn(2, 3, 2, generator=generator), torch.randn(2, 3, 2, generator=generator)
    for unit in range(steps - 1):
        t, sigma = 1 - unit / steps, floor * math.sqrt(steps)
        expected = x - (velocity + sigma**2 / (2 * t) * (x + (1 - t) * velocity)) / steps
        normal = schedule.transition(x, velocity, unit)
        assert torch.allclose(normal.mean, expected, atol=1e-5) and normal.std.item() == pytest.approx(floor)


def test_flow_sde_equals_the_form_with_noise_at_zero():
    """Openpi's convention: s = 1 - t, v' = -v; mean = x0 w0 + x1 w1 with x0 = x - v' s, x1 = x + v' (1 - s)."""
    steps, level = 10, 0.5
    schedule = FlowSchedule(steps, noise=FlowNoise.SDE, level=level, clip=None)
    generator = _generator()
    x, velocity = torch.randn(2, 3, 2, generator=generator), torch.randn(2, 3, 2, generator=generator)
    step = 1 / steps
    for unit in range(1, steps - 1):
        s = unit / steps
        sigma = level * math.sqrt((1 - s) / s)
        start, end = x + velocity * s, x - velocity * (1 - s)
        expected = start * (1 - (s + step) - sigma**2 * step / (2 * (1 - s))) + end * (s + step)
        normal = schedule.transition(x, velocity, unit)
        assert torch.allclose(normal.mean, expected, atol=1e-5)
        assert normal.std.item() == pytest.approx(sigma * math.sqrt(step), abs=1e-6)
    first = level * math.sqrt((1 - step) / step) * math.sqrt(step)  # t = 1 takes the next grid value
    assert schedule.table[0, 4].item() == pytest.approx(first, abs=1e-6)


def test_flow_noise_respects_bounds_and_floor():
    assert FlowSchedule(4, level=1.0).table[:, 4].tolist() == pytest.approx([0.24] * 4)
    assert FlowSchedule(4, level=0.0).table[:, 4].tolist() == pytest.approx([0.05] * 4)
    assert FlowSchedule(4, level=0.1, min_std=0.2).table[:, 4].tolist() == pytest.approx([0.2] * 4)
    assert not FlowSchedule(4, noise=FlowNoise.ODE, min_std=0.2).density.any()
    sde = FlowSchedule(4, noise=FlowNoise.SDE, level=0.01, min_std=0.2)
    assert sde.table[:, 4].tolist() == pytest.approx([0.2, 0.2, 0.2, 0.0])


def test_the_clean_estimate_is_clipped():
    x, prediction = torch.zeros(1, 1, 1), torch.full((1, 1, 1), 5.0)
    for schedule in (DiffusionSchedule(20, 5, Prediction.SAMPLE, clip=1.0), FlowSchedule(5, clip=1.0)):
        large = schedule.transition(x, prediction, 2).mean
        larger = schedule.transition(x, 2 * prediction, 2).mean
        assert torch.equal(large, larger)


def test_impossible_schedules_are_refused():
    with pytest.raises(ConfigError, match="training steps"):
        DiffusionSchedule(10, 11)
    with pytest.raises(ConfigError, match="eta"):
        DiffusionSchedule(eta=1.5)
    with pytest.raises(ConfigError, match="at least one"):
        FlowSchedule(0)
