"""A critic that is told outcomes, and an improver that imitates what ended well, for `robopolicy offline`."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from robopolicy.rl.offline.agent import Critics, OfflineAgent
from robopolicy.rl.offline.configuration import AgentConfig
from robopolicy.training.offline.improvers import imitate


@dataclass(frozen=True)
class OutcomesConfig(AgentConfig):
    """Regression on discounted returns."""

    builds: ClassVar[str] = "outside_robotics.offline:Outcomes"
    members: int = 2
    """Independent critics."""


class Outcomes(OfflineAgent):
    """Q(s, a) is what followed; it has no actor of its own."""

    def __init__(self, config: OutcomesConfig, state: int, action: int, seed: int):
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.critics = Critics(config.members, state, action, config.width, config.depth, config.layer_norm)
        self.optimisers = {"critics": torch.optim.Adam(self.critics.parameters(), config.learning_rate)}
        self.register_buffer("mean", torch.zeros(action))

    def fit_statistics(self, state):
        """Standardise states."""
        self.critics.state.fit(state)

    def update(self, batch, generator):
        """One step of regression; decisions that a time limit cut count for what was paid."""
        outcome = torch.where(batch.outcome.isfinite(), batch.outcome, batch.reward)
        loss = (self.critics(batch.state, batch.action) - outcome).square().mean()
        self.step("critics", loss)
        self.mean.lerp_(batch.action.mean(0), 0.01)
        return {"critic_loss": loss.detach()}

    @torch.no_grad()
    def act(self, state, generator=None):
        """The mean of what was recorded."""
        return self.mean.expand(len(state), -1)

    @torch.no_grad()
    def value(self, state):
        """What that is worth."""
        return self.critics(state, self.act(state)).amin(0)


@dataclass(frozen=True)
class NearerConfig:
    """Imitation of recorded decisions of positive advantage."""

    builds: ClassVar[str] = "outside_robotics.offline:Nearer"
    steps: int = 20
    """Updates."""
    batch_size: int = 32
    """Rows an update."""
    learning_rate: float = 1e-3
    """Of the policy."""


class Nearer:
    """Makes candidates."""

    def __init__(self, config: NearerConfig):
        self.config = config

    def prepare(self, policy):
        """Nothing is to be done."""

    def improve(self, policy, lesson, generators, step, where):
        """Imitate what the critic finds better than average."""
        data, spec = lesson.data, policy.spec
        q, v = lesson.values(data.transitions.state, data.transitions.action)
        good = data.step[q > v]

        def batch(rows):
            return lesson.episodes.windows(good[rows], spec.history, spec.prediction)

        return {"loss": imitate(policy, batch, len(good), self.config, step, generators, where)}
