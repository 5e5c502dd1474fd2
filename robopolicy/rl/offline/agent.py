"""Base class of offline RL agents: critics and actors over state vectors, inference interface, checkpointing."""

import copy
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.candidates import ScoreCandidates
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import TensorObservation
from robopolicy.core.randomness import normal
from robopolicy.core.transitions import Transitions
from robopolicy.nn.blocks import Members
from robopolicy.nn.normalizer import with_constants_kept
from robopolicy.nn.optimisers import optimiser_tree, restore_optimiser
from robopolicy.rl.offline.interface import Interface

LOWEST, HIGHEST = -5.0, 2.0
"""Bounds of an actor's log standard deviation before squashing."""


class Standardiser(nn.Module):
    """Standardise values with the data's statistics: (x - mean) / std.

    Elements that the data never varied are centred but not divided: a word, pose or goal that only appears later would
    otherwise be enormous.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    @torch.no_grad()
    def fit(self, values: Tensor) -> None:
        """Fit mean and standard deviation of values [N, size]."""
        self.mean.copy_(values.mean(0))
        self.std.copy_(with_constants_kept(values.std(0, correction=0)))

    def forward(self, x: Tensor) -> Tensor:
        """Standardise [..., size]."""
        return (x - self.mean) / self.std


class Critics(nn.Module):
    """Ensemble of N action values as one batched tensor."""

    def __init__(self, count: int, state: int, action: int, width: int, depth: int, layer_norm: bool = False):
        super().__init__()
        self.count = count
        self.state = Standardiser(state)
        self.members = Members(count, state + action, width, depth, 1, "relu", layer_norm)

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        """Return Q [N, B] of states [B, S] and actions [B, A], or of actions [N, B, A], one set per critic."""
        action = action if action.dim() == 3 else action.expand(self.count, -1, -1)
        x = torch.cat([self.state(state).expand(self.count, -1, -1), action], -1)
        return self.members(x).squeeze(-1)


class Values(nn.Module):
    """State value network."""

    def __init__(self, state: int, width: int, depth: int):
        super().__init__()
        self.state = Standardiser(state)
        self.members = Members(1, state, width, depth, 1, "relu")

    def forward(self, state: Tensor) -> Tensor:
        """Return V [B] of states [B, S]."""
        return self.members(self.state(state)[None])[0, :, 0]


class Actor(nn.Module):
    """A squashed Gaussian over actions in [-1, 1]: tanh(mean + std * noise)."""

    def __init__(self, state: int, action: int, width: int, depth: int):
        super().__init__()
        self.state = Standardiser(state)
        self.members = Members(1, state, width, depth, 2 * action, "relu")

    def parameters_of(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation [B, A] before squashing."""
        mean, spread = self.members(self.state(state)[None])[0].chunk(2, -1)
        return mean, spread.clamp(LOWEST, HIGHEST)

    def sample(self, state: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return actions [B, A] with gradients (reparameterised), and their log densities [B]."""
        return squashed_sample(*self.parameters_of(state), generator)

    def sample_several(self, state: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return `count` actions in each state [B, S], [count, B, A], and their log densities [count, B]."""
        mean, spread = (value.expand(count, -1, -1) for value in self.parameters_of(state))
        return squashed_sample(mean, spread, generator)

    def log_prob(self, state: Tensor, action: Tensor) -> Tensor:
        """Return the log density [B] of actions [B, A], which are clamped away from the edges of the box."""
        mean, spread = self.parameters_of(state)
        # atanh is infinite at the edges of the box, where recorded actions often lie.
        raw = torch.atanh(action.clamp(-1 + 1e-5, 1 - 1e-5))
        noise = (raw - mean) * (-spread).exp()
        return ((-0.5 * noise.square() - spread - 0.5 * math.log(2 * math.pi)) - log_slope(raw)).sum(-1)

    def forward(self, state: Tensor) -> Tensor:
        """Return the noise-free action [B, A]."""
        return self.parameters_of(state)[0].tanh()


def squashed_sample(mean: Tensor, spread: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return actions tanh(mean + exp(spread) noise) [..., A] and their log densities [...]; `spread` is log std."""
    noise = normal(mean.shape, generator, mean.device)
    raw = mean + spread.exp() * noise
    density = (-0.5 * noise.square() - spread - 0.5 * math.log(2 * math.pi)).sum(-1)
    # Change of variables: log p(tanh x) = log p(x) - log(d tanh x / dx), summed over elements.
    return raw.tanh(), density - log_slope(raw).sum(-1)


def log_slope(raw: Tensor) -> Tensor:
    """Return log(1 - tanh(x)^2) of every element [...], stably: 2 (log 2 - x - softplus(-2x))."""
    return 2 * (math.log(2) - raw - functional.softplus(-2 * raw))


class OfflineAgent(torch.nn.Module, ABC):
    """A critic and an actor with their optimisers, by name; `config` contains the discount per step.

    States are vectors [N, S], actions vectors [N, A] in [-1, 1]: a single step or a flattened chunk. It is constructed
    by Class(config, state, action, seed) with the sizes S and A.
    """

    config: Any
    critics: Critics
    optimisers: dict[str, torch.optim.Optimizer]

    @abstractmethod
    def fit_statistics(self, state: Tensor) -> None:
        """Fit the state standardisation of all networks on states [N, S]; nothing else is learned."""

    def begin(self, data: Transitions) -> None:
        """Set the training `data`: N transitions, states [N, S], actions [N, A] in [-1, 1].

        Call it before the first update, again after `restore` with the same data (which is not saved), and when the
        data has changed. Raises DataError if the data lacks what this agent learns from.
        """
        self.fit_statistics(data.state)

    @abstractmethod
    def update(self, batch: Transitions, generator: torch.Generator) -> dict[str, Tensor]:
        """Take one gradient step of all networks on transitions [N]; returns metrics by name, scalars."""

    @abstractmethod
    def act(self, state: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return actions [N, A]; without noise if generator is None."""

    @abstractmethod
    def value(self, state: Tensor) -> Tensor:
        """Return the expected return from states [N, S], [N]."""

    def action_values(self, state: Tensor, action: Tensor) -> Tensor:
        """Return every critic's Q [M, N], differentiable in the actions; agents use the minimum."""
        return self.critics(state, action)

    @property
    def discount(self) -> float:
        """Discount factor per step."""
        return self.config.discount

    def step(self, name: str, loss: Tensor) -> None:
        """Take one optimiser step on the scalar `loss` []; no other weights get gradients."""
        optimiser = self.optimisers[name]
        optimiser.zero_grad()
        parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        loss.backward(inputs=parameters)  # pyright: ignore[reportUnknownMemberType]
        optimiser.step()

    def tree(self) -> dict[str, Any]:
        """Return a copy of weights and moments, in a serialisable form."""
        moments = {name: optimiser_tree(each) for name, each in self.optimisers.items()}
        return copy.deepcopy({"weights": dict(self.state_dict()), "optimisers": moments})

    def restore(self, tree: dict[str, Any]) -> None:
        """Restore the state from `tree`."""
        self.load_state_dict(tree["weights"])
        for name, optimiser in self.optimisers.items():
            restore_optimiser(optimiser, tree["optimisers"][name])


def minimum_value_of(critic: OfflineAgent, interface: Interface) -> ScoreCandidates:
    """Build a scoring function for candidate chunks [N, C, A] in the world's units: the minimum over the critics of
    `critic`, [N].
    """

    def score(several: TensorObservation, actions: Tensor) -> Tensor:
        return critic.action_values(interface.state(several), interface.to_agent(actions)).amin(0)

    return score


keep_former_names(__name__, {"smallest_value": "minimum_value_of", "squashed": "squashed_sample"})
