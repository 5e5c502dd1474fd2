"""What benchmarks record: noisy experts, and whole episodes until there is enough."""

from collections.abc import Callable

from robopolicy.core.episodes import Episodes
from robopolicy.core.world import World
from sims.experts import Noise, NoisyController
from sims.registry import load_task


def expert(world: World, noise: float, seed: int) -> NoisyController:
    """Return the expert of the task that `world` simulates, with Gaussian noise."""
    return NoisyController(load_task(world.spec.name).expert(), Noise(gaussian=noise), seed, world.spec.action)


def until(steps: int, played: Callable[[int], Episodes]) -> Episodes:
    """Return the whole episodes that are played, turn after turn, until they have at least so many control steps."""
    parts: list[Episodes] = []
    while sum(part.step_count for part in parts) < steps:
        parts.append(played(len(parts)))
    return Episodes.concatenate(parts)
