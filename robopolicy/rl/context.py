"""What mechanisms are given: the circumstances of an iteration, and a scored minibatch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts


@dataclass(frozen=True)
class Context:
    """The circumstances of an iteration.

    generator: for mechanisms that draw; discount: per control step; gae_lambda: per decision; iteration of iterations;
    scored_steps: K of a whole decision; history: mean outcome of recent groups, newest last (never longer than 256).
    """

    generator: torch.Generator
    discount: float = 0.99
    gae_lambda: float = 0.95
    iteration: int = 0
    iterations: int = 1
    scored_steps: int = 1
    history: tuple[float, ...] = ()

    @property
    def share(self) -> float:
        """How much of the run is done, in [0, 1); schedules run along it."""
        return self.iteration / max(1, self.iterations)


@dataclass(frozen=True)
class Scored:
    """A minibatch that the current policy has scored, without gradient; all tensors [b, t, K] unless said otherwise.

    logp: current; log_ratio: current to proximal, reduced to the configured level and clamped; clamped: where that
    happened; staleness: log(proximal / behaviour), per step; advantage; mask; clip_low, clip_high: widths around 1
    (broadcastable); chosen: index of each sampling step in its decision; rollouts: the minibatch itself, [b, t]; knobs:
    what controllers set, by name; share: how much of the run is done; extra: name -> an extra of the policy's
    evaluation (or "entropy"), [b, t, K, ...], 0 outside `mask`.
    """

    logp: Tensor
    log_ratio: Tensor
    clamped: Tensor
    staleness: Tensor
    advantage: Tensor
    mask: Tensor
    clip_low: Tensor
    clip_high: Tensor
    chosen: Tensor
    rollouts: Rollouts
    knobs: Mapping[str, float] = field(default_factory=dict)
    share: float = 0.0
    extra: Callable[[str], Tensor] = lambda name: torch.empty(0)

    @property
    def ratio(self) -> Tensor:
        """pi / pi_proximal at the configured level."""
        return self.log_ratio.exp()


Coefficients = tuple[Tensor, Mapping[str, Tensor]]
"""c [b, t, K] and scalars worth logging."""
