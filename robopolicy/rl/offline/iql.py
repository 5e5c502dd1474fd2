"""Implicit Q-learning: values from the better recorded actions, without evaluating other actions.

Source: Kostrikov et al. 2021, arXiv:2110.06169.
"""

import copy

import torch
from torch import Tensor

from robopolicy.core.transitions import Transitions
from robopolicy.nn.blocks import follow
from robopolicy.rl.offline.agent import Actor, Critics, OfflineAgent, Values
from robopolicy.rl.offline.configuration import IqlConfig


class Iql(OfflineAgent):
    """Offline RL agent; actions are in [-1, 1]."""

    def __init__(self, config: IqlConfig, state: int, action: int, seed: int):
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
            torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
            self.actor = Actor(state, action, config.width, config.depth)
            self.critics = Critics(config.critics, state, action, config.width, config.depth, config.layer_norm)
            self.values = Values(state, config.width, config.depth)
        with torch.no_grad():  # values begin near 0, where no target has to undo them, and actions mid-box
            for part in (self.actor, self.critics, self.values):
                part.members.weights[-1].mul_(0.01)
        self.slow = copy.deepcopy(self.critics).requires_grad_(False)
        self.optimisers = {
            name: torch.optim.Adam(part.parameters(), config.learning_rate)
            for name, part in (("actor", self.actor), ("critics", self.critics), ("values", self.values))
        }

    def fit_statistics(self, state: Tensor) -> None:
        """Fit the state standardisation of all networks on states [N, S]."""
        for part in (self.actor, self.critics, self.values, self.slow):
            part.state.fit(state)

    def update(self, batch: Transitions, generator: torch.Generator) -> dict[str, Tensor]:
        """Take one step of values, critics and actor; returns metrics by name, scalars. It uses no random numbers.

        batch: N transitions, states [N, S] and actions [N, A] in [-1, 1].
        """
        config = self.config
        with torch.no_grad():
            data_value = self.slow(batch.state, batch.action).min(0).values
            # V of the next state stands for the maximum over actions: none that was not recorded is ever asked.
            target = batch.backup(self.values(batch.next_state), config.discount)
        value = self.values(batch.state)
        value_loss = expectile_loss(data_value - value, config.expectile).mean()
        critic_loss = (self.critics(batch.state, batch.action) - target).square().mean(1).sum()
        # Detached: imitation must not move V to make its weights larger.
        weight = (config.temperature * (data_value - value.detach())).exp().clamp(max=config.max_weight)
        actor_loss = -(weight * self.actor.log_prob(batch.state, batch.action)).mean()
        for name, loss in (("values", value_loss), ("critics", critic_loss), ("actor", actor_loss)):
            self.step(name, loss)
        follow(self.slow, self.critics, config.tau)
        return {"critic_loss": critic_loss.detach(), "value": value.detach().mean(), "weight": weight.mean()}

    @torch.no_grad()
    def value(self, state: Tensor) -> Tensor:
        """Return V [B]."""
        return self.values(state)

    @torch.no_grad()
    def act(self, state: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return actions [B, A]; without noise if generator is None."""
        return self.actor(state) if generator is None else self.actor.sample(state, generator)[0]

    def log_prob(self, state: Tensor, action: Tensor) -> Tensor:
        """Return the actor's log density [B] of actions in (-1, 1)."""
        return self.actor.log_prob(state, action)


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Return |expectile - 1(difference < 0)| difference^2, [N], minimal where the expectile of the differences is 0."""
    return (expectile - (difference < 0).float()).abs() * difference.square()
