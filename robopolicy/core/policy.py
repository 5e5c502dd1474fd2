"""Interfaces of a robot policy: `Policy` acts, `ScoredPolicy` also has log-probabilities, `Trainable` also learns.

A decision of a policy is one action chunk: it predicts P steps, of which the first C are executed. It is generated in K
scored steps (denoising steps, flow steps or tokens), each with a log-probability, which is what policy gradients act
on. Everything is torch tensors. Axes: B row (parallel environment) or N row of a training batch, K scored step, C chunk
step, P >= C predicted steps, A action dimension, H history frame. `robopolicy.testing.policy.check_policy`
tests whether a policy keeps what is promised here.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.core.modules import Module
from robopolicy.core.spec import TASK, Observation, PolicySpec
from robopolicy.core.world import Rows

if TYPE_CHECKING:
    from typing_extensions import TypeIs

TensorObservation = dict[str, Tensor | list[str]]
"""Key -> tensor [B, H, *field.shape] (images uint8, height x width x 3); `task` -> list of B strings."""

CONDITION = "condition"
"""Latents of this name, or "condition.<what>", are a frozen encoder's features of the observation, for `log_prob`."""

_NO_STEPS = torch.zeros(1, 0)
_NOTHING_SAMPLED = _NO_STEPS.bool()


@dataclass(frozen=True)
class Decision:
    """One action chunk per row, with what is needed to compute its log-probability again.

    actions: [B, C, A] in the world's units; latents: what `log_prob` needs to score it again, each [B, ...] (a
    denoising policy keeps its chain of noisy actions [B, K+1, P, A]); logp: [B, K] fp32, log-probabilities under the
    policy that acted; mask: [B, K] bool, True where a step was sampled and has a density. A policy without
    log-probabilities gives actions only; logp and mask are then [B, 0].
    """

    actions: Tensor
    latents: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    logp: Tensor = _NO_STEPS
    mask: Tensor = _NOTHING_SAMPLED

    def __post_init__(self) -> None:
        if self.logp is _NO_STEPS:
            object.__setattr__(self, "logp", torch.empty(self.actions.shape[0], 0, device=self.actions.device))
        if self.mask is _NOTHING_SAMPLED:
            nothing = torch.empty(self.actions.shape[0], 0, dtype=torch.bool, device=self.actions.device)
            object.__setattr__(self, "mask", nothing)


@dataclass(frozen=True)
class Scores:
    """Differentiable log-probabilities and entropies [N, K] of recorded decisions.

    extras: what else there is to say of them, by name, [N, ...] each or, where all rows share it, [1, ...]: the mean
    [N, K, P, A] of Gaussian steps, say.
    """

    logp: Tensor
    entropy: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


@runtime_checkable
class Policy(Protocol):
    """Maps observations to action chunks: enough to evaluate, serve, drive, rank and collect."""

    @property
    def spec(self) -> PolicySpec:
        """Its observations and actions; scored_steps is K, 0 for a policy without log-probabilities."""
        ...

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return an action chunk for every row of an observation [B, H, ...], without gradient.

        deterministic: no exploration noise (the initial noise of a denoising chain remains). Raises SpecError when the
        observation does not fit the spec, NonFiniteError on NaN or infinity.
        """
        ...

    def reset(self, rows: Rows = None) -> None:
        """Clear the memory of `rows` [R] when their episodes begin, None for all (most policies have no memory)."""
        ...


@runtime_checkable
class ScoredPolicy(Policy, Protocol):
    """A policy whose decisions have log-probabilities: enough for importance ratios and KL divergences."""

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Compute log-probabilities of recorded decisions, with gradients (`act` has none).

        At unchanged parameters logp equals that of `act` to 1e-5.

        Optional latents: "chosen" [N, k] int64 selects k of the K steps per row (logp is then [N, k]); "executed"
        [N, C] bool, which steps of the chunk were executed, for policies that score control steps.
        """
        ...


@runtime_checkable
class Trainable(Module, ScoredPolicy, Protocol):
    """A `ScoredPolicy` and torch.nn.Module for pre-training and RL fine-tuning; it acts alike in both modes."""

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As in nn.Module."""
        ...

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the terms of the behaviour cloning loss by name, each [N].

        batch: "observation" (key -> [N, H, ...]), "actions" [N, P, A] in the world's units, "action_valid" [N, P] bool,
        False on padding after the end of an episode.
        """
        ...

    def trainable_parameters(self) -> Iterable[nn.Parameter]:
        """The weights that an optimiser may change."""
        ...

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Prepare for policy gradients through the last `steps` scored steps, None for as many as its config says.

        train_encoder: whether the observation encoder is trained as well. A policy that is prepared already stays as it
        is. Raises ConfigError where that cannot be done.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write a self-describing checkpoint, atomically."""
        ...


@runtime_checkable
class BecomesTrainable(Protocol):
    """A policy that only acts, of which a `Trainable` can be made that decides alike."""

    def to_trainable(self) -> Trainable:
        """Return it; raises ConfigError, saying why, where that cannot be."""
        ...


@runtime_checkable
class Resumes(Protocol):
    """A policy that can resume a partly generated decision, for tree search in denoising chains or token sequences."""

    def resume(
        self, observation: TensorObservation, latents: Mapping[str, Tensor], count: Tensor, generator: torch.Generator
    ) -> Decision:
        """Decide like `act`, but keep the first count[b] steps [B] of `latents` where count is not negative.

        Kept steps are not sampled again: mask is False there. count 0 keeps what came before the first step (the
        initial noise of a chain; of tokens nothing), -1 nothing at all.
        """
        ...


@runtime_checkable
class FinishesChain(Protocol):
    """A policy that can finish a denoising chain without noise, to see which action an intermediate step leads to."""

    def finish_chain(self, observation: TensorObservation, latents: Tensor, next_step: Tensor) -> Tensor:
        """Return the actions [N, C, A] that noise-free steps make of latents [N, P, A] about to enter step `next_step`.

        next_step: [N] int64, the scored step 0..K at which each row goes on; K means that the latents are finished.
        """
        ...


@runtime_checkable
class DecidesFromNoise(Protocol):
    """A policy whose noise-free decision is a differentiable function of its initial noise: a diffusion, a flow.

    What steers it by its noise (DSRL), climbs a critic through its steps (Diffusion-QL) or distils it leans on this.
    """

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Predicted steps P and size A of the noise that a decision begins with, standard normal."""
        ...

    def trajectory(self, observation: TensorObservation, noise: Tensor, through: int | None = None) -> Tensor:
        """Return the latents [N, K+1, P, A] of the noise-free chain from noise [N, P, A], which is the first of them.

        Differentiable in noise and weights, or in the weights of the last `through` steps alone. Raises SpecError or
        NonFiniteError on a bad observation.
        """
        ...

    def to_actions(self, latents: Tensor) -> Tensor:
        """Return what is executed of clean latents [N, P, A], in the world's units and bounds: [N, C, A]."""
        ...


@runtime_checkable
class ActsFromNoise(Policy, Protocol):
    """A policy that can act, noise-free and without gradients, from noise that it is given: what engines make of one
    that `DecidesFromNoise`.
    """

    def from_noise(self, observation: TensorObservation, noise: Tensor) -> Tensor:
        """Return what is executed, [B, C, A], of noise [B, P, A]. Raises SpecError or NonFiniteError."""
        ...


@runtime_checkable
class PolicyWrapper(Policy, Protocol):
    """A policy that decides by means of another one, which an engine may compute in its place."""

    @property
    def inner(self) -> Policy:
        """The other one."""
        ...

    def around(self, inner: Policy) -> Policy:
        """Return this policy, weights shared, that acts by means of `inner`.

        Raises ConfigError where `inner` lacks what is asked of it.
        """
        ...


def innermost(policy: Policy) -> Policy:
    """Return by means of what a policy decides in the end: itself, unless it is a `PolicyWrapper`."""
    while isinstance(policy, PolicyWrapper):
        policy = policy.inner
    return policy


@runtime_checkable
class TakesAdapters(Protocol):
    """A policy that can be fine-tuned by low-rank adapters (LoRA) instead of its weights."""

    def add_lora(self, rank: int) -> None:
        """Freeze the weights and add trainable adapters of this rank (LoRA)."""
        ...


@runtime_checkable
class PlansInternally(Protocol):
    """A policy that plans before it acts (model-predictive control)."""

    def without_planning(self) -> "Policy | None":
        """Return the same policy without planning, None where it does not plan anyway."""
        ...


@runtime_checkable
class RecordsMeans(Protocol):
    """A policy whose steps are Gaussian, and whose decisions hold their means on request.

    record_means: whether `Decision.latents` has "mean" [B, K, P, A], the mean of every scored step when it was drawn.
    """

    record_means: bool


@runtime_checkable
class LowersPrecision(Protocol):
    """A policy that multiplies in the precision that a run learns in, alike in `act`, `log_prob` and `loss`.

    lowers_precision: True; see `robopolicy.nn.precision`.
    """

    lowers_precision: bool


@runtime_checkable
class MatchesNoise(Protocol):
    """A policy whose decisions may be scored by denoising their own action, which is made noisy at K levels.

    scored_by_matching: whether they are; `spec.scored_steps` is then the number of levels.
    """

    @property
    def scored_by_matching(self) -> bool:
        """See the class."""
        ...

    def noisy_actions(self, latents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what the levels of recorded decisions make of their actions, [N, K, P, A], and the times [N, K].

        A time is in [0, 1]: 0 is the (normalised) action itself, 1 is noise alone.
        """
        ...


@runtime_checkable
class CachesCondition(Protocol):
    """A policy that encodes images once, when it acts, with a frozen encoder; `log_prob` reuses the features.

    caches_condition: whether its decisions hold latents named as `CONDITION` says, and `log_prob` uses them.
    """

    @property
    def caches_condition(self) -> bool:
        """See the class."""
        ...


@runtime_checkable
class EncodesObservation(CachesCondition, Protocol):
    """A policy that can be asked for what its decisions would keep of an observation, where it `caches_condition`."""

    def encode(self, observation: TensorObservation) -> Mapping[str, Tensor]:
        """Return what the encoder makes of observations [N, H, ...], name -> [N, ...]."""
        ...


@runtime_checkable
class LearnsFromCondition(EncodesObservation, Protocol):
    """A policy whose `loss` takes what `encode` made of a batch's observations, where it `caches_condition`.

    learns_from_condition: whether it does; the batch holds it under the names that `encode` gave it.
    """

    learns_from_condition: bool


def is_condition(name: str) -> bool:
    """Whether a latent of this name holds cached features of the observation (see `CONDITION`)."""
    return name == CONDITION or name.startswith(f"{CONDITION}.")


def is_policy(actor: object) -> "TypeIs[Policy]":
    """Whether `actor` is a `Policy`, not a `Controller`: that too acts and resets, and may keep a world's spec."""
    if not isinstance(actor, Policy):  # which compares the names of members, so a Controller may come this far
        return False
    return isinstance(actor.spec, PolicySpec)  # pyright: ignore[reportUnnecessaryIsInstance]


def missing_members(policy: object, level: type) -> tuple[str, ...]:
    """Return the names of the members of a `level` (Policy, ScoredPolicy or Trainable) that `policy` lacks."""
    protocols = [kind for kind in level.__mro__ if getattr(kind, "_is_protocol", False) and kind is not Protocol]
    names = [name for kind in reversed(protocols) for name in vars(kind) if not name.startswith("_")]
    return tuple(name for name in dict.fromkeys(names) if inspect.getattr_static(policy, name, None) is None)


def require_trainable(policy: Policy) -> Trainable:
    """Return `policy`, or what it becomes, as `Trainable`; raises ConfigError naming the members that it lacks."""
    if isinstance(policy, BecomesTrainable):
        return policy.to_trainable()
    missing = missing_members(policy, Trainable)
    if missing:
        raise ConfigError(
            f"{type(policy).__name__} acts but cannot be trained: it lacks {', '.join(missing)} "
            "(see Trainable in robopolicy/core/policy.py). Evaluate, serve, collect and rank take it as it is."
        )
    assert isinstance(policy, Trainable)
    return policy


def to_tensors(observation: Observation, device: torch.device | str = "cpu") -> TensorObservation:
    """Copy a numpy observation [B, H, ...] to `device`: floats become fp32, images stay uint8, `task` is texts."""
    tensors: TensorObservation = {}
    for key, value in observation.items():
        if key == TASK:
            tensors[key] = [str(text) for text in value]
            continue
        array = np.asarray(value)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        tensors[key] = torch.tensor(array, device=device)
    return tensors
