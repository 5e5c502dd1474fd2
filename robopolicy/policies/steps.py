"""Describe the scored steps of built-in policies, for `core.steps.DescribesSteps`.

Axes: K scored step, P predicted step, L latent element, A action dimension.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.former_names import keep_former_names
from robopolicy.nn.schedules import DiffusionSchedule, FlowSchedule, Schedule
from robopolicy.policies.configuration import DenoisingPolicyConfig, Likelihood
from robopolicy.policies.latents import ExecutedSlice
from robopolicy.policies.network import DenoisingNetwork, learns_noise

PROBED_ACTIONS = "actions at the normalised values -0.5 and 0.5"
PROBES = (-0.5, 0.5)
"""Two probe values per element: they identify every normaliser, since each is an elementwise map with two
parameters.
"""


def probed_actions(to_actions: Callable[[Tensor], Tensor], size: int, device: torch.device) -> dict[str, Tensor]:
    """Return the actions [2, 1, A] for the latents [2, 1, L] of `PROBES`, L = size, as a named entry."""
    probes = torch.tensor(PROBES, device=device)[:, None, None].expand(-1, 1, size)
    with torch.no_grad():
        return {PROBED_ACTIONS: to_actions(probes)}


def denoising_steps(
    config: DenoisingPolicyConfig,
    schedule: Schedule,
    network: DenoisingNetwork,
    first: int,
    part: ExecutedSlice,
    latent_size: int,
    to_actions: Callable[[Tensor], Tensor],
) -> dict[str, Any]:
    """Return the properties of a denoising policy's scored steps by name; see `DescribesSteps`.

    The prediction type (noise or clean action) is not included: the next latent follows from the clean estimate in both
    cases. The exploration noise is: log-probabilities are densities under it. first: schedule index of the first scored
    step; part: executed part of a latent; latent_size: L; to_actions: converts latents [2, 1, L] to actions [2, 1, A].
    """
    kind = {DiffusionSchedule: "diffusion", FlowSchedule: "flow"}.get(type(schedule), type(schedule).__name__)
    description: dict[str, Any] = {"kind": f"{kind}, log-probabilities by {config.likelihood.value}"}
    if config.likelihood is Likelihood.MATCHING:
        description |= {"training noise levels": _training_levels(schedule), "prediction": _predicted(schedule)}
    else:
        scored_steps = slice(first, None)
        description |= {
            "noise levels": _levels(schedule)[scored_steps],
            "weight of the clean estimate in the next latent": schedule.table[scored_steps, 2],
            "weight of a latent in the next one": schedule.table[scored_steps, 3],
            "standard deviations": None if learns_noise(config) else schedule.table[scored_steps, 4],
            "bounds of learned standard deviations": config.flow_noise_bounds if learns_noise(config) else None,
            "bound on the clean estimate": schedule.clip,
            "noise estimate under that bound": None if schedule.signals is None else schedule.signals[scored_steps],
            "minimum standard deviation in log-probabilities": config.min_logprob_std,
            "bounds of log-probabilities": config.logp_clamp,
            "reduction of log-probabilities": config.logp_reduction.value,
        }
    description |= {
        "predicted steps": config.prediction_steps,
        "executed steps": part.count,
        "first executed step": part.first,
        "size of a latent": latent_size,
    }
    return description | probed_actions(to_actions, latent_size, schedule.table.device)


def _levels(schedule: Schedule) -> Tensor:
    """Return the noise level of latents before each step, [K]: the fraction of noise in a flow, of signal in a
    diffusion.
    """
    if isinstance(schedule, DiffusionSchedule):
        return schedule.alphas[(schedule.times * schedule.training_steps).round().long() - 1]
    return schedule.times


def _training_levels(schedule: Schedule) -> Tensor | None:
    return schedule.alphas if isinstance(schedule, DiffusionSchedule) else None


def _predicted(schedule: Schedule) -> str | None:
    return schedule.prediction.value if isinstance(schedule, DiffusionSchedule) else None


keep_former_names(__name__, {"STOOD_FOR": "PROBED_ACTIONS", "stood_for": "probed_actions"})
