"""Play a batch of seeded episodes to their ends: the one loop under success rates and videos.

A wave is as many episodes as the world has rows. Rows that end are left alone (worlds skip them) and not refilled, so
an episode's result depends on its wave alone, never on how fast its neighbours end.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from robopolicy.core.errors import SpecError
from robopolicy.core.policy import Policy, is_policy, to_tensors
from robopolicy.core.randomness import derive
from robopolicy.core.spec import Observation, WorldSpec, require_fit, validate_observation
from robopolicy.core.world import Controller, Step, World


class Actor:
    """A policy or a controller as one thing that turns a numpy observation into an action chunk.

    deterministic: no exploration noise (a denoising policy's initial noise remains); device: where a policy computes.
    A controller has no noise: both modes are the same.
    """

    def __init__(self, policy: Policy | Controller, *, deterministic: bool = True, device: torch.device | str = "cpu"):
        self.policy = policy
        self.deterministic = deterministic
        self.device = torch.device(device)

    def reset(self) -> None:
        """Forget what was remembered about every row."""
        self.policy.reset()

    def check(self, spec: WorldSpec, observation: Observation) -> None:
        """Raise SpecError unless a policy finds its observation fields and the world takes its actions."""
        if not is_policy(self.policy):
            return
        require_fit(self.policy.spec, spec)
        validate_observation(observation, self.policy.spec.observation, history=self.policy.spec.history)

    def decide(self, observation: Observation, generator: torch.Generator) -> np.ndarray:
        """Return the next chunk, [B, C, A] float64; a controller's is one step long."""
        if is_policy(self.policy):
            decision = self.policy.act(
                to_tensors(observation, self.device), generator, deterministic=self.deterministic
            )
            return decision.actions.detach().cpu().numpy().astype(np.float64)
        return np.asarray(self.policy.act(observation), dtype=np.float64)[:, None]


@dataclass(frozen=True)
class Wave:
    """Outcomes of n episodes, each [n]: success, cut (imagination stopped early) bool; returns; lengths in steps."""

    success: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray
    cut: np.ndarray


def waves(seeds: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    """Yield positions into `seeds`, at most `batch_size` at a time, in the order of the seeds' values.

    The order in which a caller lists seeds therefore cannot change any episode.
    """
    order = np.argsort(seeds, kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def play_wave(
    world: World,
    actor: Actor,
    seeds: np.ndarray,
    noise_seed: int,
    after_step: Callable[[Step | None], Any] | None = None,
) -> Wave:
    """Play one episode per seed, [n <= B], until all have ended.

    The actor's noise comes from a generator derived from `noise_seed` and the wave's first seed: two policies meet the
    same starts and, if they draw alike, the same noise. Spare rows repeat the wave's seeds and are not counted.
    after_step: called with None after the reset, then after every control step (the chunk is then run step by step).
    Raises SpecError if an episode outlasts the world's own horizon.
    """
    count, rows = len(seeds), world.batch_size
    generator = torch.Generator(actor.device).manual_seed(derive(noise_seed, f"wave {int(seeds[0])}"))
    observation = world.reset(seeds=np.resize(seeds, rows))
    actor.reset()
    actor.check(world.spec, observation)
    if after_step is not None:
        after_step(None)
    returns, lengths = np.zeros(rows), np.zeros(rows, dtype=np.int64)
    cut = np.zeros(rows, dtype=bool)
    step: Step | None = None
    while step is None or not step.ended[:count].all():
        if lengths.max() > world.spec.horizon or (step is not None and not step.valid.any()):
            raise SpecError(f"'{world.spec.name}' has a horizon of {world.spec.horizon} steps but did not end there.")
        chunk = actor.decide(observation, generator)
        parts = [chunk] if after_step is None else [chunk[:, [index]] for index in range(chunk.shape[1])]
        for part in parts:
            step = world.step(part)
            returns += np.where(step.valid, step.reward, 0.0).sum(-1)
            lengths += step.valid.sum(-1)
            if after_step is not None:
                after_step(step)
            if step.ended[:count].all():
                break
        assert step is not None
        observation = step.observation
    if step.horizon_end is not None:
        cut = step.horizon_end & ~step.terminated & ~step.truncated
    return Wave(step.success[:count].copy(), returns[:count], lengths[:count], cut[:count])
