"""Somebody else's ways of deciding: an engine, a sampler, a block cache's schedule, and what to do during a delay."""

from dataclasses import replace

import torch
from torch import Tensor

from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.spec import PolicySpec
from robopolicy.core.world import Rows
from robopolicy.inference.calibration import Calibration
from robopolicy.inference.chunking import Delay
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.samplers import Sampler, own_sampler
from robopolicy.inference.schedules import CacheConfig
from robopolicy.nn.branches import Caching
from robopolicy.nn.schedules import NoiseSchedule


class Careful:
    """A policy that acts by another one, its actions made smaller."""

    def __init__(self, policy: Policy, share: float):
        self.policy, self.share = policy, share

    @property
    def spec(self) -> PolicySpec:
        """That of the other one."""
        return self.policy.spec

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Decide as the other one does, less."""
        decision = self.policy.act(observation, generator, deterministic=deterministic)
        return replace(decision, actions=self.share * decision.actions)

    def reset(self, rows: Rows = None) -> None:
        """Reset the other one."""
        self.policy.reset(rows)


def halving(policy: Policy, config: InferenceConfig, caching: Caching | None = None) -> Policy:
    """An engine: everything at half the speed, but for the robot."""
    return Careful(policy, 0.5)


def late(schedule: NoiseSchedule, steps: int) -> Sampler:
    """A sampler: the policy's own steps, as many as it has."""
    return own_sampler(schedule, deterministic=True)


def alternating(calibration: Calibration, config: CacheConfig) -> Tensor:
    """A schedule: every other step, all blocks."""
    updates = torch.zeros(len(calibration.blocks), calibration.steps, dtype=torch.bool)
    updates[:, ::2] = True
    return updates


def timid(policy: Policy, delay: Delay) -> Policy:
    """A chunking: the longer a decision takes, the smaller its actions."""
    return Careful(policy, 1 / (1 + delay.steps))
