"""Inputs of mechanisms: the context of an iteration, a scored minibatch, and the policies and models available to
them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.extras import Extras
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import Policy, ScoredPolicy, Scores, TensorObservation, Trainable, is_condition
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.spec import Field
from robopolicy.core.stages import Stage
from robopolicy.rl.weights import step_mean


def _nothing_kept(rollouts: Rollouts) -> Mapping[str, Tensor]:
    return {}


def _unchanged(rollouts: Rollouts) -> Rollouts:
    return rollouts


@dataclass(frozen=True)
class Context:
    """Context of an iteration.

    generator: for random draws of mechanisms; discount: per control step; gae_lambda: per action chunk; iteration of
    iterations; scored_steps: K of a complete chunk; history: mean returns of recent groups, newest last (at most 256);
    memory: state of mechanisms between iterations, by name (JSON values, part of checkpoints); figures: of this
    iteration, which mechanisms add and metrics.jsonl shows; instructions: of the world; stages: of its task, empty if
    it defines none; conditions: rollouts -> outputs [B, T, ...] of the policy's frozen encoder for their observations,
    {} if the policy stores none; judged_anew: rollouts with next observations -> the same with values and advantages
    of the current weights.
    """

    generator: torch.Generator
    discount: float = 0.99
    gae_lambda: float = 0.95
    iteration: int = 0
    iterations: int = 1
    scored_steps: int = 1
    history: tuple[float, ...] = ()
    memory: dict[str, Any] = field(default_factory=dict[str, Any])
    figures: dict[str, float] = field(default_factory=dict[str, float])
    instructions: tuple[str, ...] = ("",)
    stages: tuple[Stage, ...] = ()
    conditions: Callable[[Rollouts], Mapping[str, Tensor]] = _nothing_kept
    judged_anew: Callable[[Rollouts], Rollouts] = _unchanged

    @property
    def share(self) -> float:
        """Fraction of the run completed, in [0, 1); schedules depend on it."""
        return self.iteration / max(1, self.iterations)


@dataclass(frozen=True)
class Scored:
    """A minibatch with log-probabilities under the current policy, without gradient; all tensors [b, t, K] unless
    stated otherwise.

    logp: under the current policy; log_ratio: current to proximal, reduced to the configured level and clamped;
    clamped: mask of clamped entries; staleness: log(proximal / behaviour), per step; advantage; mask; clip_low,
    clip_high: widths around 1 (broadcastable; if the coefficient does not read them, a note says that settings of the
    clip range have no effect); chosen: index of each step in its chunk; rollouts: the minibatch itself, [b, t], without
    its next observations; knobs: values set by controllers, by name; share: fraction of the run completed; extra: name
    -> an extra of the policy's scores (or "entropy"), [b, t, K, ...], 0 outside `mask`, raises ConfigError if the
    policy provides none; limit: bound at which log-ratios are clamped; generator: for random draws.
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
    generator: torch.Generator | None = None

    @property
    def step_log_ratio(self) -> Tensor:
        """log pi / pi_proximal of every single step, [b, t, K], clamped like log_ratio; 0 outside `mask`.

        It is independent of the ratio level, for mechanisms that sum over an episode's steps; at a summed level
        log_ratio already contains sums.
        """
        proximal = self.rollouts.proximal.gather(-1, self.chosen)
        return torch.where(self.mask, self.logp - proximal, 0.0).clamp(-self.limit, self.limit)

    @property
    def ratio(self) -> Tensor:
        """pi / pi_proximal at the configured level, [b, t, K]."""
        return self.log_ratio.exp()


Coefficients = tuple[Tensor, Mapping[str, Tensor]]
"""Coefficients c [b, t, K] and scalars to log."""


@dataclass(frozen=True)
class Tools:
    """Inputs for building a side model.

    policy: the policy being fine-tuned; base: a frozen copy of its initial state (None unless Need.BASE is declared);
    teacher: another policy or None; fields: the world's observation fields, by key; history: H frames; instructions: of
    the world; observe: (rollouts, where [B, T]) -> the policy's observation; score: (policy, rollouts, where [B, T]) ->
    differentiable scores of the n chunks `where`.
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
    """A model trained together with the policy that provides more information than the outcome."""

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Train on the rollouts, then add predictions to their extras or rewards."""
        ...

    def tree(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        ...

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        ...


@runtime_checkable
class HoldsWeights(Protocol):
    """A side model that changes the policy's weights after every step of its optimiser."""

    def hold_weights(self) -> None:
        """Set weights back that must not change."""
        ...


@runtime_checkable
class ActionValues(Protocol):
    """A side model that predicts action values, as promised by Need.VALUES."""

    def values(self, observation: Mapping[str, Any]) -> Tensor:
        """Return V [N] of an observation [N, H, ...]."""
        ...

    def action_values(self, observation: Mapping[str, Any], actions: Tensor) -> Tensor:
        """Return Q [N] of action chunks [N, C, A]."""
        ...


@runtime_checkable
class ScoresChunks(Protocol):
    """A side model that scores chunks, for allocators that continue episodes."""

    def chunk_scores(self, rollouts: Rollouts) -> Tensor:
        """Return the scores of chunks, [B, T] between -1 and 1; 0 on padding."""
        ...


@dataclass(frozen=True)
class AuxiliaryInputs:
    """Inputs of an auxiliary loss for the minibatch's n chunks.

    observation, latents: inputs of the policy's scores, [n, ...]; mask: [n, k] bool, steps that were sampled; scores:
    differentiable scores; policy: the policy being fine-tuned; base: the frozen policy that fine-tuning started from
    (None unless Need.BASE is declared); teacher: another policy, or None; experts: batches of recorded chunks for
    `policy.loss`, or None; models: side models, by name; proximal: log-probabilities of the same steps [n, k] under the
    policy before the update, or any other clipping reference; extras: columns of the chunks' rollouts, [n, ...] each;
    steps_per_row: mean number of sampled steps per chunk of the minibatch, None if these are all its chunks.

    In a data-parallel run every process gets its n chunks of a minibatch, and its loss counts by their number: use
    means over chunks, or `step_weights`. Random numbers [n, ...] are those of its chunks. A mechanism that compares
    chunks, or draws other numbers, declares Need.WHOLE_MINIBATCHES and gets all chunks, with scores without gradient.
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
    extras: Extras = field(default_factory=Extras)
    steps_per_row: float | None = None

    @property
    def step_weights(self) -> Tensor:
        """Weights [n, k] of a mean over the minibatch's sampled steps."""
        if self.steps_per_row is None:
            return step_mean(self.mask)
        return self.mask.float() / max(1.0, self.steps_per_row * len(self.mask))

    @property
    def action_values(self) -> ActionValues:
        """The side model that predicts action values; raises ConfigError if there is none."""
        return require_input(
            next((model for model in self.models.values() if isinstance(model, ActionValues)), None), "values"
        )


def require_input[T](value: T | None, name: str) -> T:
    """Return `value`; raises ConfigError if it is None, i.e. if a mechanism reads an input that it has not declared as
    a need.
    """
    if value is None:
        raise ConfigError(f"This mechanism reads '{name}', which it does not declare among its needs.")
    return value


def score_extra(scores: Scores, name: str) -> Tensor:
    """Return an extra of a policy's scores, such as mean [N, K, P, A]; raises ConfigError if it is missing."""
    if name not in scores.extras:
        has = ", ".join(scores.extras) or "none"
        raise ConfigError(f"This mechanism reads '{name}' of the policy's log_prob result, whose extras are: {has}.")
    return scores.extras[name]


def latents_for_other_policy(latents: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return latents [n, ...] that any policy with the same steps can score, without the acting policy's encoder
    output.

    Another policy must encode the observation itself.
    """
    return {name: value for name, value in latents.items() if not is_condition(name)}


keep_former_names(__name__, {"given": "require_input", "for_another_policy": "latents_for_other_policy"})
