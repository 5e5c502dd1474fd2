"""An online method of somebody else: an agent that adds a bounded residual to what a policy does, for `online`."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import nn

from robopolicy.core.policy import Decision
from robopolicy.rl.offline.configuration import AGENTS
from robopolicy.training.critics import LearnsOnline, fields_of
from robopolicy.training.online_methods import InitialState, OnlineMethod, interface_for


@dataclass(frozen=True)
class ResidualConfig:
    """A residual policy; only its size is a setting."""

    builds: ClassVar[str] = "outside_robotics.online:Residual"
    size: float = 0.1
    """Largest change, as a fraction of half the action range."""


class ResidualPolicy(LearnsOnline, nn.Module):
    """It does what the base does, and a little of what the agent says."""

    def __init__(self, base, agent, interface, size):
        super().__init__()
        self.base, self.agent, self.interface, self.size = base, agent, interface, size

    @property
    def spec(self):
        """What it reads."""
        spec = self.base.spec
        return replace(spec, observation={**spec.observation, **fields_of(self.interface)}, scored_steps=0)

    def reset(self, rows=None):
        """Reset the base."""
        self.base.reset(rows)

    def enable_agent(self):
        """It acts from the beginning."""

    def actions_of(self, observation, action):
        """Add the agent's actions to those of the base."""
        base = self.interface.to_agent(self.base.act(observation, torch.Generator(), deterministic=True).actions)
        return self.interface.chunks((base + self.size * action).clamp(-1, 1))

    def act(self, observation, generator, *, deterministic=False):
        """Return the sum."""
        state = self.interface.state(observation)
        return Decision(self.actions_of(observation, self.agent.act(state, None if deterministic else generator)))

    def save(self, folder):
        """Save the base alone."""
        self.base.save(folder)


@dataclass
class Residual(OnlineMethod):
    """Builds the policy."""

    config: ResidualConfig = field(default_factory=ResidualConfig)
    learns: ClassVar[type] = ResidualPolicy

    def start(self, start):
        """Begin with a new agent."""
        base = start.require_policy("residual")
        interface = interface_for(base, start.world, start.episodes(), base.spec.chunk)
        agent = AGENTS.builds(start.agent)(start.agent_config, interface.size, interface.actions, start.seed)
        policy = ResidualPolicy(base, agent, interface, self.config.size)
        silent = lambda seen, state, generator: torch.zeros(len(state), interface.actions)  # noqa: E731
        return InitialState(policy, silent, "warm-up")
