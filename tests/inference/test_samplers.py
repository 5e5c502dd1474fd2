"""Tables of samplers: what their loop makes equals the schedulers and formulas that they come from."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.inference.samplers import make_sampler, own_sampler, sample
from robopolicy.nn.configuration import FlowNoise, Prediction, Spacing
from robopolicy.nn.schedules import DiffusionSchedule, FlowSchedule

Network = Callable[[Tensor, float], Tensor]


def _network(x: Tensor, time: float) -> Tensor:
    """Something nonlinear in latents and time that is no denoiser of anything."""
    return torch.tanh(1.3 * x + time) - 0.2 * x * time


def _noise() -> Tensor:
    return torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _run(name: str, schedule: DiffusionSchedule | FlowSchedule, steps: int) -> Tensor:
    table = make_sampler(name, schedule, steps)
    return sample(table, lambda x, step: _network(x, table.steps[step].time), _noise())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # numpy's, about diffusers
@pytest.mark.parametrize("prediction", list(Prediction))
@pytest.mark.parametrize("steps", [2, 5, 10])
@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("dpm++", "DPMSolverMultistepScheduler", {"lower_order_final": True}),
        ("unipc", "UniPCMultistepScheduler", {"lower_order_final": True}),
        ("ddim", "DDIMScheduler", {"clip_sample": False}),
    ],
)
def test_tables_are_diffusers_schedulers(name, kind, settings, prediction: Prediction, steps: int):
    """Against their own loop, which holds a scheduler, for every prediction; without a clip, which they lack."""
    import diffusers

    schedule = DiffusionSchedule(100, 50, prediction, clip=None, spacing=Spacing.TRAILING)
    names = {Prediction.EPSILON: "epsilon", Prediction.SAMPLE: "sample", Prediction.VELOCITY: "v_prediction"}
    theirs = getattr(diffusers, kind)(
        100,
        beta_schedule="squaredcos_cap_v2",
        prediction_type=names[prediction],
        timestep_spacing="trailing",
        **settings,
    )
    theirs.set_timesteps(steps)
    x = _noise()
    for timestep in theirs.timesteps:
        x = theirs.step(_network(x, (int(timestep) + 1) / 100), timestep, x).prev_sample
    assert torch.allclose(_run(name, schedule, steps), x, atol=1e-4, rtol=1e-4)


def test_euler_and_heun_solve_the_flow_as_written():
    """x' = x + h v, and with Heun's x + h/2 (v + v'); the step to 0 is Euler's."""
    schedule = FlowSchedule(10, clip=None)
    x = _noise()
    for step in range(4):
        x = x - _network(x, 1 - step / 4) / 4
    assert torch.allclose(_run("euler", schedule, 4), x, atol=1e-5)
    x = _noise()
    for time, after in ((1.0, 2 / 3), (2 / 3, 1 / 3)):
        first = _network(x, time)
        second = _network(x + (after - time) * first, after)
        x = x + (after - time) / 2 * (first + second)
    x = x - _network(x, 1 / 3) / 3
    assert torch.allclose(_run("heun", schedule, 5), x, atol=1e-5)


def test_heun_is_of_second_order():
    """The error against the exact solution of v = x falls with the square of the step, Euler's with the step."""
    schedule, linear = FlowSchedule(10, clip=None), lambda x, step: x
    exact = _noise() * math.exp(-1 + 1e-3)
    errors = []
    for steps in (21, 41):
        table = make_sampler("heun", schedule, steps)
        whole = sample(table, linear, _noise())
        errors.append(float((whole - exact).abs().max()))
    assert errors[1] < errors[0]


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_policy_s_own_steps_are_the_schedule_s(clip: float | None, deterministic: bool):
    for schedule in (
        DiffusionSchedule(20, 5, Prediction.EPSILON, min_std=0.1, clip=clip),
        FlowSchedule(5, noise=FlowNoise.SDE, clip=clip),
    ):
        table, noise = own_sampler(schedule, deterministic=deterministic), torch.randn(5, 3, 4, 2)
        x = start = _noise().float()
        times: list[float] = schedule.times.tolist()
        for step in range(5):
            normal = schedule.transition(x, _network(x, times[step]), step, deterministic=deterministic)
            x = normal.sample(noise[step])
        scaled = noise * table.stds[:, None, None, None]
        sample_end = sample(table, lambda x, step, at=times: _network(x, at[step]), start, scaled)
        assert torch.allclose(sample_end, x, atol=1e-5)


def test_samplers_of_other_policies_and_step_counts_are_refused():
    flow, diffusion = FlowSchedule(10), DiffusionSchedule(20, 10)
    for name, schedule, steps, message in (
        ("ddim", flow, 5, "use euler or heun"),
        ("heun", diffusion, 5, "use ddim"),
        ("heun", flow, 1, "at least 2 network calls"),
        ("dpm++", diffusion, 1, "2 to 20"),
        ("ddim", diffusion, 21, "must be from 1 to the 20"),
        ("dim", diffusion, 5, "Did you mean"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_sampler(name, schedule, steps)


def test_ddim_keeps_the_schedules_betas():
    schedule = DiffusionSchedule(50, 10, eta=0.0, beta_schedule="linear")
    assert make_sampler("ddim", schedule, 10) == own_sampler(schedule, deterministic=True)


def test_steps_that_a_table_cannot_say_are_refused():
    """Where the bound leaves the noise as it was, a step is not linear in latents and bounded estimates."""
    with pytest.raises(ConfigError, match="only engine=reference"):
        own_sampler(DiffusionSchedule(20, 10, rederived=False), deterministic=True)
    own_sampler(DiffusionSchedule(20, 10, clip=None, rederived=False), deterministic=True)
