"""What agents with a deterministic actor share: two critics, smoothed targets, an actor that is moved less often.

Source: TD3, Fujimoto et al. 2018, arXiv:1802.09477. What keeps an actor with the data is each agent's
own; of TD3+BC (Fujimoto & Gu 2021, arXiv:2106.06860) it is the distance to the recorded action.
"""

import copy
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.transitions import Transitions
from robopolicy.nn.members import Members, follow
from robopolicy.rl.offline.agent import OfflineAgent
from robopolicy.rl.offline.configuration import Td3BcConfig, Td3Config
from robopolicy.rl.offline.networks import Critics, Standardiser


class DeterministicActor(torch.nn.Module):
    """Actions in [-1, 1] from states."""

    def __init__(self, state: int, action: int, width: int, depth: int):
        super().__init__()
        self.state = Standardiser(state)
        self.members = Members(1, state, width, depth, action, "relu")

    def forward(self, state: Tensor) -> Tensor:
        """Return actions [B, A]."""
        return self.members(self.state(state)[None])[0].tanh()


class Td3(OfflineAgent):
    """An agent but for its `actor_loss`; actions are in [-1, 1]."""

    def __init__(self, config: Td3Config, state: int, action: int, seed: int):
        super().__init__()
        self.config, self.updates = config, 0
        with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
            torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
            self.actor = DeterministicActor(state, action, config.width, config.depth)
            self.critics = Critics(2, state, action, config.width, config.depth, config.layer_norm)
        self.slow_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.slow_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.optimisers = {
            "actor": torch.optim.Adam(self.actor.parameters(), config.rate),
            "critics": torch.optim.Adam(self.critics.parameters(), config.rate),
        }

    @torch.no_grad()
    def start_small(self, seed: int) -> None:
        """Draw output layers from U(-1e-3, 1e-3), the actor's, and U(-3e-3, 3e-3), the critics'; slow copies alike.

        It begins in the middle of the box, with values that no target has to undo (ReBRAC, arXiv:2305.09836).
        """
        draws = torch.Generator().manual_seed(seed)
        starts = ((self.actor, self.slow_actor, 1e-3), (self.critics, self.slow_critics, 3e-3))
        for part, slow, bound in starts:
            part.members.weights[-1].uniform_(-bound, bound, generator=draws)
            slow.load_state_dict(part.state_dict())

    @abstractmethod
    def actor_loss(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return the loss [] of what the actor would do, [B, A], in the batch's states."""

    def following(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return what the next states are worth to the critics' targets, [B], if `action` [B, A] is taken there."""
        return self.slow_critics(batch.next_state, action).min(0).values

    def fit_statistics(self, state: Tensor) -> None:
        """Standardise states as these [N, S] are, everywhere alike."""
        for part in (self.actor, self.critics, self.slow_actor, self.slow_critics):
            part.state.fit(state)

    def target(self, batch: Transitions, generator: torch.Generator) -> Tensor:
        """Return r + decay (1 - terminated) following(s', a' + clipped noise), [B]; of single steps discount decays."""
        config = self.config
        with torch.no_grad():
            noise = torch.randn(batch.action.shape, generator=generator, device=batch.action.device)
            # Target smoothing: a narrow peak of Q, often an error, must not set the target.
            noise = (config.policy_noise * noise).clamp(-config.noise_clip, config.noise_clip)
            action = (self.slow_actor(batch.next_state) + noise).clamp(-1, 1)
            return batch.backup(self.following(batch, action), config.discount)

    def update(self, batch: Transitions, generator: torch.Generator) -> dict[str, Tensor]:
        """Take one step of the critics, and every `delay` of them one of the actor; returns figures by name, scalars.

        batch: B transitions, states [B, S] and actions [B, A] in [-1, 1].
        """
        values = self.critics(batch.state, batch.action)
        critic_loss = (values - self.target(batch, generator)).square().mean(1).sum()
        self.step("critics", critic_loss)
        self.updates += 1
        # The actor waits for critics that have settled: TD3's delayed updates, slow copies included.
        if self.updates % self.config.delay == 0:
            self.step("actor", self.actor_loss(batch, self.actor(batch.state)))
            follow(self.slow_actor, self.actor, self.config.tau)
            follow(self.slow_critics, self.critics, self.config.tau)
        return {"critic_loss": critic_loss.detach(), "value": values.detach().mean()}

    @torch.no_grad()
    def value(self, state: Tensor) -> Tensor:
        """Return the value [B] of acting without noise: the smaller Q."""
        return self.critics(state, self.actor(state)).min(0).values

    @torch.no_grad()
    def act(self, state: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return actions [B, A]; it has no noise of its own."""
        return self.actor(state)

    def log_prob(self, state: Tensor, action: Tensor) -> Tensor:
        """Return the log density [B], up to a constant, of a step Gaussian around what it would do."""
        return -0.5 * (action - self.actor(state)).square().sum(-1)

    def tree(self) -> dict[str, Any]:
        """Return a copy of weights and moments, and how often it was updated."""
        return {**super().tree(), "updates": self.updates}

    def restore(self, tree: dict[str, Any]) -> None:
        """Go on from `tree`."""
        super().restore(tree)
        self.updates = tree["updates"]


def climb_and_stay(value: Tensor, action: Tensor, anchor: Tensor, alpha: float) -> Tensor:
    """Return -alpha mean(Q) / mean|Q| + mean((action - anchor)^2), []: climb Q, as far from the anchor as it pays.

    value: Q [B] of `action` [B, A]; anchor: [B, A]. mean|Q| is held fixed, so that alpha means the same whatever the
    scale of rewards.
    """
    scale = alpha / value.abs().mean().detach().clamp_min(1e-6)
    return -(scale * value).mean() + (action - anchor).square().mean()


class Td3Bc(Td3):
    """TD3+BC: the actor climbs Q and stays with the data; actions are in [-1, 1]."""

    config: Td3BcConfig

    def actor_loss(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return -alpha Q1 / mean|Q1| + (pi - a)^2, [], for what the actor would do, [B, A]; means over all."""
        return climb_and_stay(self.critics(batch.state, action)[0], action, batch.action, self.config.alpha)
