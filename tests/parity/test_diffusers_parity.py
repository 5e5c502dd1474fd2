"""Our one transition against diffusers' scheduler.step, on shared noise."""

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from robopolicy.nn.configuration import FlowNoise, Prediction, Spacing
from robopolicy.nn.schedules import DiffusionSchedule, FlowSchedule

pytestmark = pytest.mark.long

NAMES = {Prediction.EPSILON: "epsilon", Prediction.SAMPLE: "sample", Prediction.VELOCITY: "v_prediction"}
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def _latents(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, 3, generator=generator), torch.randn(6, 4, 3, generator=generator)


def _noise(seed: int) -> torch.Tensor:
    return torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("prediction", list(Prediction))
def test_ddpm_steps_match(prediction: Prediction):
    scheduler = DDPMScheduler(
        20, beta_schedule="squaredcos_cap_v2", prediction_type=NAMES[prediction], variance_type="fixed_small"
    )
    scheduler.set_timesteps(20)
    schedule = DiffusionSchedule(20, 20, prediction)
    x, output = _latents()
    for unit, step in enumerate(scheduler.timesteps):
        generator = torch.Generator().manual_seed(unit)
        expected = scheduler.step(output, int(step), x, generator=generator).prev_sample
        sample = schedule.transition(x, output, unit).sample(_noise(unit))
        assert torch.allclose(sample, expected, **TOLERANCE), f"unit {unit}"


@pytest.mark.parametrize("prediction", list(Prediction))
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("spacing", list(Spacing))
def test_ddim_steps_match(prediction: Prediction, eta: float, spacing: Spacing):
    scheduler = DDIMScheduler(
        100, beta_schedule="squaredcos_cap_v2", prediction_type=NAMES[prediction], timestep_spacing=spacing.value
    )
    scheduler.set_timesteps(10)
    schedule = DiffusionSchedule(100, 10, prediction, eta=eta, spacing=spacing)
    x, output = _latents()
    for unit, step in enumerate(scheduler.timesteps):
        noise = _noise(unit)
        expected = scheduler.step(
            output, int(step), x, eta=eta, use_clipped_model_output=True, variance_noise=noise
        ).prev_sample
        sample = schedule.transition(x, output, unit).sample(noise)
        assert torch.allclose(sample, expected, **TOLERANCE), f"unit {unit}"


def test_ddim_steps_match_without_clipping():
    scheduler = DDIMScheduler(100, beta_schedule="squaredcos_cap_v2", clip_sample=False)
    scheduler.set_timesteps(10)
    schedule = DiffusionSchedule(100, 10, eta=0.0, clip=None, spacing=Spacing.LEADING)
    x, output = _latents()
    for unit, step in enumerate(scheduler.timesteps):
        expected = scheduler.step(output, int(step), x, eta=0.0).prev_sample
        assert torch.allclose(schedule.transition(x, output, unit).mean, expected, **TOLERANCE)


def test_the_training_corruption_matches():
    scheduler = DDPMScheduler(50, beta_schedule="squaredcos_cap_v2")
    schedule = DiffusionSchedule(50, 10, Prediction.VELOCITY)
    clean, noise = _latents()
    level = schedule.levels(6, torch.Generator().manual_seed(0))
    assert torch.allclose(schedule.corrupt(clean, noise, level), scheduler.add_noise(clean, noise, level), **TOLERANCE)
    expected = scheduler.get_velocity(clean, noise, level)
    assert torch.allclose(schedule.target(clean, noise, level), expected, **TOLERANCE)


def test_flow_steps_match():
    steps = 8
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[1 - unit / steps for unit in range(steps)])
    schedule = FlowSchedule(steps, noise=FlowNoise.ODE, clip=None)
    x, velocity = _latents()
    for unit, time in enumerate(scheduler.timesteps):
        expected = scheduler.step(velocity, time, x).prev_sample
        assert torch.allclose(schedule.transition(x, velocity, unit).mean, expected, **TOLERANCE)
        x = expected
