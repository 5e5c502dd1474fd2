"""The noisy experts that benchmarks record."""

from robopolicy.core.world import World
from sims.experts import Noise, NoisyController
from sims.registry import load_task


def expert(world: World, noise: float, seed: int) -> NoisyController:
    """Return the expert of the task that `world` simulates, with Gaussian noise."""
    return NoisyController(load_task(world.spec.name).expert(), Noise(gaussian=noise), seed, world.spec.action)
