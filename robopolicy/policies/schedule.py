"""The noise schedule of a denoising policy, and what gives its steps noise."""

from typing import Any

from robopolicy.nn.schedules import DiffusionSchedule, FlowSchedule
from robopolicy.policies.configuration import DenoisingPolicyConfig, PolicyKind
from robopolicy.policies.latents import Explores


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


def how_to_explore(network: object) -> str:
    """Return what gives steps noise where none has any, to go on from "fine-tune more steps, or "."""
    if isinstance(network, Explores):
        return network.how_to_explore
    return "set flow_noise=constant, or raise eta or min_sampling_std"
