"""Critics and actors over state vectors."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.randomness import normal
from robopolicy.nn.members import Members

LOWEST, HIGHEST = -5.0, 2.0
"""Limits of an actor's log standard deviation before squashing."""


class Standardiser(nn.Module):
    """(x - mean) / std, with statistics of the data."""

    mean: Tensor
    std: Tensor

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    @torch.no_grad()
    def fit(self, values: Tensor) -> None:
        """Take mean and standard deviation of values [N, size]."""
        self.mean.copy_(values.mean(0))
        self.std.copy_(values.std(0, correction=0).clamp_min(1e-6))

    def forward(self, x: Tensor) -> Tensor:
        """Standardise [..., size]."""
        return (x - self.mean) / self.std


class Critics(nn.Module):
    """N action values as one batched tensor."""

    def __init__(self, count: int, state: int, action: int, width: int, depth: int, layer_norm: bool = False):
        super().__init__()
        self.count = count
        self.state = Standardiser(state)
        self.members = Members(count, state + action, width, depth, 1, "relu", layer_norm)

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        """Return Q [N, B] of states [B, S] and actions [B, A], or of actions [N, B, A], one set a critic."""
        action = action if action.dim() == 3 else action.expand(self.count, -1, -1)
        x = torch.cat([self.state(state).expand(self.count, -1, -1), action], -1)
        return self.members(x).squeeze(-1)


class Values(nn.Module):
    """A state value."""

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
        """Return actions [B, A] with a path for gradients, and their log densities [B]."""
        return squashed(*self.parameters_of(state), generator)

    def sample_several(self, state: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return `count` actions in each state [B, S], [count, B, A], and their log densities [count, B]."""
        mean, spread = (value.expand(count, -1, -1) for value in self.parameters_of(state))
        return squashed(mean, spread, generator)

    def log_prob(self, state: Tensor, action: Tensor) -> Tensor:
        """Return the log density [B] of actions [B, A], which are kept off the edges of the box."""
        mean, spread = self.parameters_of(state)
        # atanh is infinite at the edges of the box, where recorded actions often lie.
        raw = torch.atanh(action.clamp(-1 + 1e-5, 1 - 1e-5))
        noise = (raw - mean) * (-spread).exp()
        return ((-0.5 * noise.square() - spread - 0.5 * math.log(2 * math.pi)) - log_slope(raw)).sum(-1)

    def forward(self, state: Tensor) -> Tensor:
        """Return the noise-free action [B, A]."""
        return self.parameters_of(state)[0].tanh()


def squashed(mean: Tensor, spread: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return actions tanh(mean + exp(spread) noise) [..., A] and their log densities [...]; `spread` is log std."""
    noise = normal(mean.shape, generator, mean.device)
    raw = mean + spread.exp() * noise
    density = (-0.5 * noise.square() - spread - 0.5 * math.log(2 * math.pi)).sum(-1)
    # Change of variables: log p(tanh x) = log p(x) - log(d tanh x / dx), summed over elements.
    return raw.tanh(), density - log_slope(raw).sum(-1)


def log_slope(raw: Tensor) -> Tensor:
    """Return log(1 - tanh(x)^2) of every element [...], stably: 2 (log 2 - x - softplus(-2x))."""
    return 2 * (math.log(2) - raw - functional.softplus(-2 * raw))
