"""What mechanisms are given: the circumstances of an iteration, a scored minibatch, and whom they may ask."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Policy, ScoredPolicy, Scores, TensorObservation, Trainable, is_condition
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.spec import Field
from robopolicy.core.stages import Stage


def _nothing_kept(rollouts: Rollouts) -> Mapping[str, Tensor]:
    return {}


@dataclass(frozen=True)
class Context:
    """The circumstances of an iteration.

    generator: for mechanisms that draw; discount: per control step; gae_lambda: per decision; iteration of iterations;
    scored_steps: K of a whole decision; history: mean returns of recent groups, newest last (never longer than 256);
    memory: what mechanisms remember from one iteration to the next, by their name; JSON values, part of checkpoints;
    instructions: of the world; stages: of its task, none where that names none; conditions: rollouts -> latents
    [B, T, ...] that the policy's frozen encoder makes of what they saw, {} of a policy that keeps none.
    """

    generator: torch.Generator
    discount: float = 0.99
    gae_lambda: float = 0.95
    iteration: int = 0
    iterations: int = 1
    scored_steps: int = 1
    history: tuple[float, ...] = ()
    memory: dict[str, Any] = field(default_factory=dict[str, Any])
    instructions: tuple[str, ...] = ("",)
    stages: tuple[Stage, ...] = ()
    conditions: Callable[[Rollouts], Mapping[str, Tensor]] = _nothing_kept

    @property
    def share(self) -> float:
        """How much of the run is done, in [0, 1); schedules run along it."""
        return self.iteration / max(1, self.iterations)


@dataclass(frozen=True)
class Scored:
    """A minibatch that the current policy has scored, without gradient; all tensors [b, t, K] unless said otherwise.

    logp: current; log_ratio: current to proximal, reduced to the configured level and clamped; clamped: where that
    happened; staleness: log(proximal / behaviour), per step; advantage; mask; clip_low, clip_high: widths around 1
    (broadcastable); chosen: index of each step in its decision; rollouts: the minibatch itself, [b, t],
    without its next observations; knobs: what controllers set, by name; share: how much of the run is done; extra:
    name -> an extra of the policy's scores (or "entropy"), [b, t, K, ...], 0 outside `mask`; raises ConfigError
    where the policy gives none; limit: where log-ratios are clamped.
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
    knobs: Mapping[str, float] = field(default_factory=dict[str, float])
    share: float = 0.0
    extra: Callable[[str], Tensor] = lambda name: torch.empty(0)
    limit: float = math.inf

    @property
    def step_log_ratio(self) -> Tensor:
        """log pi / pi_proximal of every step by itself, [b, t, K], clamped like log_ratio; 0 outside `mask`.

        Whatever the level: for what sums over an episode's steps, which at a summed level already hold sums.
        """
        proximal = self.rollouts.proximal.gather(-1, self.chosen)
        return torch.where(self.mask, self.logp - proximal, 0.0).clamp(-self.limit, self.limit)

    @property
    def ratio(self) -> Tensor:
        """pi / pi_proximal at the configured level, [b, t, K]."""
        return self.log_ratio.exp()


Coefficients = tuple[Tensor, Mapping[str, Tensor]]
"""c [b, t, K] and scalars worth logging."""


@dataclass(frozen=True)
class Tools:
    """What a side model may build on.

    policy: what is fine-tuned; base: a frozen copy of what it came from (None unless Need.BASE is declared); teacher:
    another policy or None; fields: what the world shows, by key; history: H frames; instructions: of the world;
    observe: (rollouts, where [B, T]) -> the observation that a policy is given; score: (policy, rollouts, where
    [B, T]) -> differentiable scores of the n decisions `where`.
    """

    policy: Trainable
    base: ScoredPolicy | None
    teacher: Policy | None
    fields: Mapping[str, Field]
    history: int
    instructions: tuple[str, ...]
    observe: Callable[[Rollouts, Tensor], TensorObservation]
    score: Callable[[ScoredPolicy, Rollouts, Tensor], Scores]


class SideModel(Protocol):
    """What is learned beside the policy and says more than an outcome does."""

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Learn from the rollouts, then add to their extras or rewards."""
        ...

    def tree(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        ...

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        ...


@runtime_checkable
class ActionValues(Protocol):
    """A side model that knows what actions are worth, as Need.VALUES promises."""

    def values(self, observation: Mapping[str, Any]) -> Tensor:
        """Return V [N] of an observation [N, H, ...]."""
        ...

    def action_values(self, observation: Mapping[str, Any], actions: Tensor) -> Tensor:
        """Return Q [N] of action chunks [N, C, A]."""
        ...


@dataclass(frozen=True)
class AuxiliaryInputs:
    """What an auxiliary loss may use of the minibatch's n decisions.

    observation, latents: what the policy was given to score, [n, ...]; mask: [n, k] bool, which steps were choices;
    scores: its differentiable scores; policy: what is fine-tuned; base: the frozen policy that fine-tuning started
    from (None unless Need.BASE is declared); teacher: another policy, or None; experts: batches of recorded decisions
    for `policy.loss`, or None; models: what is learned beside the policy, by name; proximal: log-probabilities of
    the same steps [n, k] under the policy before the update, or whatever else is clipped around.
    """

    observation: TensorObservation
    latents: Mapping[str, Tensor]
    mask: Tensor
    scores: Scores
    policy: Trainable
    context: Context
    base: ScoredPolicy | None = None
    teacher: Policy | None = None
    experts: Iterator[dict[str, Any]] | None = None
    models: Mapping[str, SideModel] = field(default_factory=dict[str, SideModel])
    proximal: Tensor | None = None

    @property
    def action_values(self) -> ActionValues:
        """The side model that knows what actions are worth; raises ConfigError where there is none."""
        return given(next((model for model in self.models.values() if isinstance(model, ActionValues)), None), "values")


def given[T](value: T | None, name: str) -> T:
    """Return `value`; raises ConfigError where it is None: a mechanism reads what it has not declared as a need."""
    if value is None:
        raise ConfigError(f"This mechanism reads '{name}', which it does not declare among its needs.")
    return value


def score_extra(scores: Scores, name: str) -> Tensor:
    """Return an extra of a policy's scores, such as mean [N, K, P, A]; raises ConfigError where there is none."""
    if name not in scores.extras:
        has = ", ".join(scores.extras) or "none"
        raise ConfigError(f"This mechanism reads '{name}' of the policy's scores, whose extras are: {has}.")
    return scores.extras[name]


def for_another_policy(latents: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return latents [n, ...] that any policy with the same steps can score: without what the encoder that acted made.

    Another policy has to encode the observation for itself.
    """
    return {name: value for name, value in latents.items() if not is_condition(name)}
