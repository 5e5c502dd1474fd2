"""The noise schedule of a denoising policy."""

from typing import Any

from robopolicy.nn.schedules import DiffusionSchedule, FlowSchedule
from robopolicy.policies.configuration import DenoisingPolicyConfig, PolicyKind


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
