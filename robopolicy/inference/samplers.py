"""Samplers as tables: schedules with everything precomputed that is known before sampling.

Every step of the supported chains and of diffusers' deterministic samplers is linear in the previous latents and clean
estimates:

    clean_i = clip(a_i x_i + b_i prediction_i),   x_{i+1} = sum_j u_ij x_j + sum_j w_ij clean_j + std_i noise_i

DDPM, DDIM and the flow's Euler step depend on step i only, DPM-Solver++(2M) also on the previous clean estimate, Heun
on the previous latent. So one loop runs all of them, without a scheduler.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.registry import Registry
from robopolicy.nn.configuration import Prediction
from robopolicy.nn.schedules import DiffusionSchedule, FlowSchedule, NoiseSchedule

SAMPLERS = Registry(
    "sampler",
    "robopolicy.samplers",
    {
        "ddim": "robopolicy.inference.samplers:ddim",
        "dpm++": "robopolicy.inference.samplers:dpm_solver",
        "unipc": "robopolicy.inference.samplers:unipc",
        "euler": "robopolicy.inference.samplers:euler",
        "heun": "robopolicy.inference.samplers:heun",
    },
)
"""Registry of samplers other than a policy's own: functions (schedule, steps) -> `Sampler`."""

Weights = tuple[tuple[int, float], ...]
"""(index of an earlier step, its weight), for non-zero weights."""


@dataclass(frozen=True)
class SamplerStep:
    """One network call and the update after it; names are those of the formula in the module's docstring.

    time: time input of the network in (0, 1], 1 is noise; latents: u; cleans: w.
    """

    time: float
    a: float
    b: float
    latents: Weights
    cleans: Weights
    std: float = 0.0


@dataclass(frozen=True)
class Sampler:
    """A complete chain; clip: bound on the clean estimates, None for none."""

    steps: tuple[SamplerStep, ...]
    clip: float | None

    @property
    def times(self) -> Tensor:
        """Time input of the network in each step, [K]."""
        return torch.tensor([step.time for step in self.steps])

    @property
    def stds(self) -> Tensor:
        """Standard deviation of the noise in each step, [K]."""
        return torch.tensor([step.std for step in self.steps])


type MakesSampler = Callable[[NoiseSchedule, int], Sampler]
"""Type of a sampler factory: returns the sampler with the given number of steps for a policy with this schedule.

Raises ConfigError when such policies are not supported.
"""


def own_sampler(schedule: NoiseSchedule, *, deterministic: bool) -> Sampler:
    """Return the policy's own sampling steps, noise-free or not.

    Raises ConfigError when its steps are not linear in latents and clean estimates, because the noise is not re-derived
    from a bounded estimate.
    """
    if schedule.signals is not None and schedule.clip is not None:
        raise ConfigError(
            "This policy clips its clean estimate without re-deriving the noise (as diffusers' DDIM does by "
            "default), which only engine=reference supports."
        )
    table = schedule.deterministic_table if deterministic else schedule.table
    steps = list[SamplerStep]()
    for place, (time, row) in enumerate(zip(schedule.times.tolist(), table.tolist(), strict=True)):
        a, b, c, d, std = row
        steps.append(SamplerStep(time, a, b, ((place, d),), ((place, c),), std))
    return Sampler(tuple(steps), schedule.clip)


def make_sampler(name: str, schedule: NoiseSchedule, steps: int | None = None) -> Sampler:
    """Return the named sampler; steps None uses the number of steps of the schedule.

    Raises ConfigError when there is no such sampler, or it does not support this schedule or number of steps.
    """
    make: MakesSampler = SAMPLERS.load(name)
    return make(schedule, schedule.steps if steps is None else steps)


def ddim(schedule: NoiseSchedule, steps: int) -> Sampler:
    """DDIM without noise (Song et al. 2021, arXiv:2010.02502), evenly spaced from the noisiest step on."""
    diffusion = _diffusion(schedule, "ddim")
    fewer = DiffusionSchedule(
        diffusion.training_steps,
        steps,
        diffusion.prediction,
        eta=0.0,
        clip=diffusion.clip,
        spacing=diffusion.spacing,
        beta_schedule=diffusion.beta_schedule,
    )
    return own_sampler(fewer, deterministic=True)


def euler(schedule: NoiseSchedule, steps: int) -> Sampler:
    """Euler's method for the flow's ODE, in equal steps."""
    return own_sampler(FlowSchedule(steps, clip=_flow(schedule, "euler").clip), deterministic=True)


def heun(schedule: NoiseSchedule, steps: int) -> Sampler:
    """Heun's method for flows: of every two network calls the second corrects the first.

    x' = x + h/2 (v(x, t) + v(x + h v(x, t), t + h)); at t + h = 0 the velocity of a flow is undefined (no noise is
    left), so the last step to 0 is Euler's. With v = (x - clean) / t everything is linear in latents and clean
    estimates. Raises ConfigError for fewer than 2 steps. steps: network calls.
    """
    flow = _flow(schedule, "heun")
    if steps < 2:
        raise ConfigError(f"heun needs at least 2 network calls, not {steps}: with one step use euler.")
    pairs = (steps - 1) // 2  # two calls each; what is left over, one or two calls, ends with Euler's step to 0
    grid = torch.linspace(1.0, 0.0, pairs + 1 + (steps - 2 * pairs), dtype=torch.float64).tolist()
    sampler_steps: list[SamplerStep] = []
    for place, (time, after) in enumerate(itertools.pairwise(grid)):
        index, share = len(sampler_steps), after / time
        # Euler: x' = x + (t' - t)(x - clean)/t = (t'/t) x + (1 - t'/t) clean.
        sampler_steps.append(SamplerStep(time, 1.0, -time, ((index, share),), ((index, 1 - share),)))
        if place < pairs:
            half = (after - time) / 2
            sampler_steps.append(
                SamplerStep(
                    after,
                    1.0,
                    -after,
                    ((index, 1 + half / time), (index + 1, half / after)),
                    ((index, -half / time), (index + 1, -half / after)),
                )
            )
    return Sampler(tuple(sampler_steps), flow.clip)


def dpm_solver(schedule: NoiseSchedule, steps: int) -> Sampler:
    """DPM-Solver++(2M) of diffusers (Lu et al. 2022, arXiv:2211.01095), for diffusion policies."""
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler

    # Below about 15 steps its last step of second order swings out: diffusers' own switch for that.
    return _probed(DPMSolverMultistepScheduler, schedule, steps, "dpm++", lower_order_final=True)


def unipc(schedule: NoiseSchedule, steps: int) -> Sampler:
    """UniPC of order 2 of diffusers (Zhao et al. 2023, arXiv:2302.04867), for diffusion policies."""
    from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

    return _probed(UniPCMultistepScheduler, schedule, steps, "unipc", lower_order_final=True)


def _probed(kind: type[Any], schedule: NoiseSchedule, steps: int, name: str, **settings: Any) -> Sampler:
    """Return the table of a deterministic diffusers scheduler, determined by stepping it with unit vectors.

    The scheduler is linear in its inputs. With one unit vector for each latent and clean estimate, it therefore returns
    its own weights.
    """
    diffusion = _diffusion(schedule, name)
    if not 2 <= steps <= diffusion.training_steps:
        raise ConfigError(f"{name} needs 2 to {diffusion.training_steps} steps for this policy, not {steps}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, about diffusers' use of it
        scheduler = kind(
            diffusion.training_steps,
            beta_schedule=diffusion.beta_schedule,
            prediction_type="sample",
            timestep_spacing="trailing",
            **settings,
        )
        scheduler.set_timesteps(steps)
    unit = torch.eye(2 * steps, dtype=torch.float64)[:, None, :, None]  # each [batch, elements, 1], as they want it
    sampler_steps: list[SamplerStep] = []
    for place, timestep in enumerate(scheduler.timesteps):
        coefficients = scheduler.step(unit[steps + place], timestep, unit[place]).prev_sample.flatten().tolist()
        alpha = diffusion.alphas[int(timestep)].item()
        time = (int(timestep) + 1) / diffusion.training_steps
        latents, cleans = (_weights(part) for part in (coefficients[:steps], coefficients[steps:]))
        sampler_steps.append(SamplerStep(time, *_to_clean(diffusion.prediction, alpha), latents, cleans))
    return Sampler(tuple(sampler_steps), diffusion.clip)


def _weights(found: Sequence[float]) -> Weights:
    return tuple((index, weight) for index, weight in enumerate(found) if weight)


def _to_clean(prediction: Prediction, alpha: float) -> tuple[float, float]:
    """Return (a, b) with clean = a x + b prediction, where x = sqrt(alpha) clean + sqrt(1 - alpha) epsilon."""
    signal, noise = math.sqrt(alpha), math.sqrt(1 - alpha)
    if prediction is Prediction.EPSILON:
        return 1 / signal, -noise / signal
    if prediction is Prediction.SAMPLE:
        return 0.0, 1.0
    return signal, -noise


def _diffusion(schedule: NoiseSchedule, name: str) -> DiffusionSchedule:
    if not isinstance(schedule, DiffusionSchedule):
        raise ConfigError(f"{name} is a sampler for diffusion policies, and this is a flow policy: use euler or heun.")
    return schedule


def _flow(schedule: NoiseSchedule, name: str) -> FlowSchedule:
    if not isinstance(schedule, FlowSchedule):
        raise ConfigError(
            f"{name} is a sampler for flow policies, and this is a diffusion policy: use ddim, dpm++ or unipc."
        )
    return schedule


type Predicts = Callable[[Tensor, int], Tensor]
"""A network at work on N observations: predicts [N, P, A] of latents [N, P, A] about to take a step, by its number."""


def sample(
    sampler: Sampler,
    predict: Predicts,
    x: Tensor,
    noise: Sequence[Tensor] | Tensor | None = None,
    quiet: Mapping[int, tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Run the chain from noise x [N, P, A] and return the clean latents [N, P, A].

    noise: of every step [K, N, P, A], already scaled; quiet: step -> weights [N or 1, 1, 1 or A] of x_i and clean_i
    that replace the table's, for chains in which some rows or elements use another sampler.
    """
    latents: list[Tensor] = [x]
    cleans: list[Tensor] = []
    for index, step in enumerate(sampler.steps):
        prediction = predict(x, index)
        if step.a:
            prediction = torch.add(prediction * step.b if step.b != 1 else prediction, x, alpha=step.a)
        elif step.b != 1:
            prediction = prediction * step.b
        cleans.append(prediction if sampler.clip is None else prediction.clamp(-sampler.clip, sampler.clip))
        if quiet is not None and index in quiet:
            of_x, of_clean = quiet[index]
            x = of_clean * cleans[index] + of_x * x
        else:
            x = _sum(latents, step.latents, cleans, step.cleans)
        if noise is not None:
            x = x + noise[index]
        latents.append(x)
    return x


def _sum(latents: Sequence[Tensor], u: Weights, cleans: Sequence[Tensor], w: Weights) -> Tensor:
    """Return sum_j u_j latents_j + sum_j w_j cleans_j, skipping zero weights."""
    terms = [(cleans[j], weight) for j, weight in w if weight] + [(latents[j], weight) for j, weight in u if weight]
    total, weight = terms[0]
    total = total if weight == 1 else total * weight
    for term, weight in terms[1:]:
        total = torch.add(total, term, alpha=weight)
    return total
