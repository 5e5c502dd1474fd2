"""Schedules of timed sub-goals chosen by the critic that is being trained (TGPO, arXiv:2510.00225); see
`core.scheduled`.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from robopolicy.core.arrays import Array
from robopolicy.core.checkpoints import read_description, read_weights, require_format, restoring, write_checkpoint
from robopolicy.core.errors import ConfigError
from robopolicy.core.modules import device_of
from robopolicy.core.policy import to_tensors
from robopolicy.core.scheduled import SchedulesByValue
from robopolicy.core.spec import Observation, WorldSpec
from robopolicy.core.world import World
from robopolicy.rl.critic import Critic, state_critic
from robopolicy.training.configuration import FinetuneConfig

ROWS = 16384
"""Maximum number of observations valued at once."""


def schedule_by(world: World, critic: nn.Module | None, *, best: bool) -> None:
    """Let `critic` choose the schedules of the episodes of `world`, if it has any; None changes nothing.

    best: the best of several, for judging; else samples by Metropolis-Hastings, for learning.
    """
    if critic is not None and isinstance(world, SchedulesByValue):
        world.choose_by(values_of(critic), best=best)


def save_critic(folder: Path, critic: Critic | None, world: World) -> None:
    """Write the critic of a world's states, to choose its schedules later, atomically; nothing if it has none, or
    without a critic.
    """
    if critic is not None and isinstance(world, SchedulesByValue):
        settings = {"architecture": critic.architecture, "history": world.spec.history}
        write_checkpoint(folder, {"kind": "critic", **settings}, critic)


def load_critic(folder: Path, spec: WorldSpec, device: torch.device | str = "cpu") -> Critic:
    """Return a critic saved by `save_critic`, for worlds with this spec; raises CheckpointError if it does not fit."""
    description = read_description(folder)
    require_format(folder, description)
    with restoring(folder, "a critic"):
        critic = state_critic(
            spec.observation, description["history"], instructions=spec.instructions, **description["architecture"]
        )
    return read_weights(critic, folder, device).eval()


def require_own_schedules(world: World, critic: nn.Module | None, config: FinetuneConfig, *, on_workers: bool) -> None:
    """Raise ConfigError if episodes are played by copies of a world whose schedules the critic chooses, which it does
    not reach. critic: None chooses none.
    """
    if critic is None or not (isinstance(world, SchedulesByValue) and world.by_value):
        return
    reason = "plays episodes in copies of the world, where the critic cannot choose schedules"
    for name in ("shards", "staleness", "policy_lag"):
        if (value := getattr(config, name)) > (name == "shards"):
            raise ConfigError(f"finetune.{name}={value} {reason}: unset it, or set world.options.schedules=uniform.")
    if on_workers:
        raise ConfigError(
            f"workers.pool {reason}: set workers.count=1 workers.pool=local, or world.options.schedules=uniform."
        )


def values_of(critic: nn.Module) -> Callable[[Observation], Array]:
    """Return a function from observations [N, H, ...] to the critic's values [N] with its weights at each call."""

    @torch.no_grad()
    def values(observation: Observation) -> Array:
        count = len(next(iter(observation.values())))
        parts: list[Array] = []
        for first in range(0, count, ROWS):
            part = {key: value[first : first + ROWS] for key, value in observation.items()}
            parts.append(critic(to_tensors(part, device_of(critic))).cpu().double().numpy())
        return np.concatenate(parts)

    return values
