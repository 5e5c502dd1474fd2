"""Policy interfaces: `Policy` acts, `ScoredPolicy` adds log-probabilities, `Trainable` adds a loss.

A decision (one policy call) is one action chunk: P predicted steps, of which the first C are executed. It is generated
in K steps with a log-probability each (denoising steps, flow steps or tokens), on which policy gradients act. All data
are torch tensors. Axes: B row (parallel environment) or N row of a training batch, K generation step, C chunk step, P
>= C predicted steps, A action dimension, H history frame. `robopolicy.testing.policy.check_policy` tests whether a
policy fulfils this contract.
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
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.modules import Module
from robopolicy.core.spec import TASK, Observation, PolicySpec
from robopolicy.core.world import Rows

if TYPE_CHECKING:
    from typing_extensions import TypeIs

TensorObservation = dict[str, Tensor | list[str]]
"""Key -> tensor [B, H, *field.shape] (images uint8, height x width x 3); `task` -> list of B strings."""

CONDITION = "condition"
"""Name of latents ("condition" or "condition.<what>") that cache a frozen encoder's features of the observation for
`log_prob`.
"""
RECENT = "recent"
"""Name of latents [N] int64 of a policy with memory: the number of newest frames of its window that `log_prob` has
gradients for. The decision itself stores all; partial updates store those of the newest part.
"""

_NO_STEPS = torch.zeros(1, 0)
_NOTHING_SAMPLED = _NO_STEPS.bool()


@dataclass(frozen=True)
class Decision:
    """One action chunk per row, with the data needed to recompute its log-probability.

    actions: [B, C, A] in world units; latents: the inputs that `log_prob` needs to recompute log-probabilities, each
    [B, ...] (a denoising policy stores its chain of noisy actions [B, K+1, P, A]); logp: [B, K] fp32, log-probabilities
    under the policy that acted; mask: [B, K] bool, True for sampled steps with a density. A policy without
    log-probabilities returns actions only; logp and mask are then [B, 0].
    """

    actions: Tensor
    latents: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    logp: Tensor = _NO_STEPS
    mask: Tensor = _NOTHING_SAMPLED

    def __post_init__(self) -> None:
        if self.logp is _NO_STEPS:
            object.__setattr__(self, "logp", torch.empty(self.actions.shape[0], 0, device=self.actions.device))
        if self.mask is _NOTHING_SAMPLED:
            no_mask = torch.empty(self.actions.shape[0], 0, dtype=torch.bool, device=self.actions.device)
            object.__setattr__(self, "mask", no_mask)


@dataclass(frozen=True)
class Scores:
    """Differentiable log-probabilities and entropies [N, K] of recorded action chunks.

    extras: additional outputs by name, [N, ...] each or, if shared by all rows, [1, ...]; for example the mean [N, K,
    P, A] of Gaussian steps.
    """

    logp: Tensor
    entropy: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


@runtime_checkable
class Policy(Protocol):
    """Maps observations to action chunks: sufficient to evaluate, serve, drive, rank and collect."""

    @property
    def spec(self) -> PolicySpec:
        """Observation and action spec; scored_steps is K, 0 for a policy without log-probabilities."""
        ...

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return an action chunk for every row of an observation [B, H, ...], without gradients.

        deterministic: no exploration noise (the initial noise of a denoising chain remains). Raises SpecError when the
        observation does not match the spec, NonFiniteError on NaN or infinity.
        """
        ...

    def reset(self, rows: Rows = None) -> None:
        """Clear the memory of `rows` [R] when their episodes start; None clears all (most policies have no memory)."""
        ...


@runtime_checkable
class ScoredPolicy(Policy, Protocol):
    """A policy whose action chunks have log-probabilities: sufficient for importance ratios and KL divergences."""

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Compute log-probabilities of recorded action chunks, with gradients (`act` has none).

        With unchanged parameters logp equals that of `act` to 1e-5.

        Optional latents: "chosen" [N, k] int64 selects k of the K steps per row (logp is then [N, k]); "executed" [N,
        C] bool marks the executed chunk steps, for policies with one log-probability per control step.
        """
        ...


@runtime_checkable
class Trainable(Module, ScoredPolicy, Protocol):
    """A `ScoredPolicy` and torch.nn.Module for pre-training and RL fine-tuning; train and eval mode behave
    identically.
    """

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As in nn.Module."""
        ...

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the named terms of the behaviour cloning loss, each [N].

        batch: "observation" (key -> [N, H, ...]), "actions" [N, P, A] in world units, "action_valid" [N, P] bool, False
        on padding after the end of an episode.
        """
        ...

    def trainable_parameters(self) -> Iterable[nn.Parameter]:
        """Weights that an optimiser may change."""
        ...

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Prepare for policy gradients through the last `steps` generation steps; None uses the number in its config.

        train_encoder: whether the observation encoder is trained as well. A policy that is already prepared is
        unchanged. Raises ConfigError when this is impossible.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write a self-describing checkpoint atomically."""
        ...


@runtime_checkable
class ConvertibleToTrainable(Protocol):
    """A policy that can only act but can be converted into an equivalent `Trainable`."""

    def to_trainable(self) -> Trainable:
        """Return the trainable policy; raises ConfigError with the reason when conversion is impossible."""
        ...


@runtime_checkable
class ResumesDecision(Protocol):
    """A policy that can resume a partly generated action chunk, for trees in denoising chains or token sequences."""

    def resume(
        self, observation: TensorObservation, latents: Mapping[str, Tensor], count: Tensor, generator: torch.Generator
    ) -> Decision:
        """Act like `act`, but keep the first count[b] steps [B] of `latents` where count is not negative.

        Kept steps are not resampled: mask is False there. count 0 keeps the input of the first step (the initial noise
        of a chain; nothing for tokens), -1 keeps nothing.
        """
        ...


@runtime_checkable
class FinishesChain(Protocol):
    """A policy that can finish a denoising chain without noise, to show the action that an intermediate step leads
    to.
    """

    def finish_chain(self, observation: TensorObservation, latents: Tensor, next_step: Tensor) -> Tensor:
        """Return the actions [N, C, A] obtained by noise-free steps from latents [N, P, A] at the input of step
        `next_step`.

        next_step: [N] int64, the step 0..K at which each row continues; K means that the latents are final.
        """
        ...


@runtime_checkable
class DecidesFromNoise(Protocol):
    """A policy whose noise-free action is a differentiable function of its initial noise, e.g. diffusion or flow
    matching.

    Required for noise steering (DSRL), gradients of a critic through the chain (Diffusion-QL) and distillation.
    """

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Number of predicted steps P and action size A of the standard normal initial noise."""
        ...

    def trajectory(self, observation: TensorObservation, noise: Tensor, through: int | None = None) -> Tensor:
        """Return the latents [N, K+1, P, A] of the noise-free chain, starting with the initial noise [N, P, A].

        Differentiable in noise and weights, or only in the weights of the last `through` steps. Raises SpecError or
        NonFiniteError on an invalid observation.
        """
        ...

    def to_actions(self, latents: Tensor) -> Tensor:
        """Convert clean latents [N, P, A] to executed actions [N, C, A], in world units and within bounds."""
        ...


@runtime_checkable
class ActsFromNoise(Policy, Protocol):
    """A policy that acts from given noise, noise-free and without gradients; inference engines provide it for policies
    with `DecidesFromNoise`.
    """

    def from_noise(self, observation: TensorObservation, noise: Tensor) -> Tensor:
        """Return the executed actions [B, C, A] for initial noise [B, P, A]. Raises SpecError or NonFiniteError."""
        ...


@runtime_checkable
class ActsWithoutMemory(Policy, Protocol):
    """A policy that says whether it has memory between calls; without, evaluations leave out rows that have ended.

    memoryless: whether a row's actions depend on its present observation [H, ...] and its noise alone.
    """

    @property
    def memoryless(self) -> bool:
        """See above; of a policy around another one, whether both are."""
        ...


def is_memoryless(policy: Policy) -> bool:
    """Whether a policy says that it has no memory between calls.

    False for one that says nothing, and for a subclass with a `reset` of its own that does not say it again.
    """
    classes = type(policy).__mro__
    says = next((each for each in classes if {"memoryless", "reset"} & vars(each).keys()), object)
    return "memoryless" in vars(says) and isinstance(policy, ActsWithoutMemory) and policy.memoryless


@runtime_checkable
class PolicyWrapper(Policy, Protocol):
    """A policy that wraps another policy, which an inference engine may replace."""

    @property
    def inner(self) -> Policy:
        """The wrapped policy."""
        ...

    def around(self, inner: Policy) -> Policy:
        """Return this policy, with shared weights, wrapped around `inner`.

        Raises ConfigError if `inner` lacks a required method.
        """
        ...


def innermost(policy: Policy) -> Policy:
    """Return the innermost wrapped policy; the policy itself unless it is a `PolicyWrapper`."""
    while isinstance(policy, PolicyWrapper):
        policy = policy.inner
    return policy


@runtime_checkable
class SupportsLora(Protocol):
    """A policy that supports fine-tuning with low-rank adapters (LoRA) instead of all weights."""

    def add_lora(self, rank: int) -> None:
        """Freeze the weights and add trainable LoRA adapters of this rank."""
        ...


@runtime_checkable
class PlansInternally(Protocol):
    """A policy that plans before it acts (model-predictive control)."""

    def without_planning(self) -> "Policy | None":
        """Return the same policy without planning; None if it does not plan."""
        ...


@runtime_checkable
class RecordsMeans(Protocol):
    """A policy with Gaussian steps that can store their means in each `Decision`.

    record_means: whether `Decision.latents` contains "mean" [B, K, P, A], the mean of every step at sampling time.
    Extras of its `Scores`: "mean" and "std", and "logp_precision" [N, K, P, A], the weights w with which squared
    deviations enter a log-probability, -1/2 sum w (x - mean)^2 + constant.
    """

    record_means: bool


@runtime_checkable
class SupportsMixedPrecision(Protocol):
    """A policy that computes in the run's training precision, consistently in `act`, `log_prob` and `loss`.

    lowers_precision: True; see `robopolicy.nn.precision`.
    """

    lowers_precision: bool


@runtime_checkable
class AnswersInTokens(Protocol):
    """A token policy that can go on after the tokens of a chunk, in its own vocabulary.

    answers_in_tokens: whether its decoding can.
    """

    @property
    def answers_in_tokens(self) -> bool:
        """Whether it can; see the class."""
        ...

    def answer_log_probs(
        self, observation: TensorObservation, latents: Mapping[str, Tensor], answers: Tensor
    ) -> Tensor:
        """Return the log-probabilities [N, L, V] of each of L tokens after those of the chunk, given those before it.

        answers: [N, L] int64, of which the last is not read.
        """
        ...


@runtime_checkable
class MatchingLikelihood(Protocol):
    """A policy whose log-probabilities can be computed by denoising its own action, noised at K levels.

    scored_by_matching: whether this is enabled; `spec.scored_steps` is then the number of noise levels.
    """

    @property
    def scored_by_matching(self) -> bool:
        """Whether log-probabilities are computed by matching; see the class."""
        ...

    def noisy_actions(self, latents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the actions of recorded action chunks noised at each level, [N, K, P, A], and the times [N, K].

        Times are in [0, 1]: 0 is the (normalised) action itself, 1 is pure noise.
        """
        ...


@runtime_checkable
class ComparesPredictions(Protocol):
    """A policy scored by matching that compares predictions as its log-probabilities compare them with the target."""

    def prediction_error(self, first: Tensor, second: Tensor, latents: Mapping[str, Tensor]) -> Tensor:
        """Return the mean squared difference of predictions [N, n, P, A] over the executed actions, [N, n]."""
        ...


@runtime_checkable
class RecoversLatents(Protocol):
    """A policy that can recover the latents of actions that it did not choose; see `recovers_latents`."""

    def steps_of(self, actions: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the latents [N, ...] that `act` would have stored for action chunks [N, C, A]."""
        ...


def recovers_latents(policy: object) -> bool:
    """Whether a policy can compute log-probabilities of given actions; denoising policies only by matching."""
    by_chain = isinstance(policy, MatchingLikelihood) and not policy.scored_by_matching
    return isinstance(policy, RecoversLatents) and not by_chain


@runtime_checkable
class CachesCondition(Protocol):
    """A policy that encodes images once, when it acts, with a frozen encoder; `log_prob` reuses the features.

    caches_condition: whether its decisions store latents with the names in `CONDITION`, and `log_prob` uses them.
    """

    @property
    def caches_condition(self) -> bool:
        """Whether policy calls cache the encoded observation; see the class."""
        ...


@runtime_checkable
class EncodesObservation(CachesCondition, Protocol):
    """A policy that can compute the features that its policy calls would cache, if it `caches_condition`."""

    def encode(self, observation: TensorObservation) -> Mapping[str, Tensor]:
        """Encode observations [N, H, ...] into features, name -> [N, ...]."""
        ...


@runtime_checkable
class LearnsFromCondition(EncodesObservation, Protocol):
    """A policy whose `loss` accepts the output of `encode` for a batch's observations, if it `caches_condition`.

    learns_from_condition: whether it does; the batch then contains the features under the names from `encode`.
    """

    learns_from_condition: bool


def is_condition(name: str) -> bool:
    """Whether the latent with this name contains cached features of the observation (see `CONDITION`)."""
    return name == CONDITION or name.startswith(f"{CONDITION}.")


def is_policy(actor: object) -> "TypeIs[Policy]":
    """Whether `actor` is a `Policy` and not a `Controller`, which also has act and reset and may have a world's
    spec.
    """
    if not isinstance(actor, Policy):  # which compares the names of members, so a Controller may come this far
        return False
    return isinstance(actor.spec, PolicySpec)  # pyright: ignore[reportUnnecessaryIsInstance]


def missing_members(policy: object, level: type) -> tuple[str, ...]:
    """Return the members of an interface `level` (Policy, ScoredPolicy or Trainable) that `policy` lacks."""
    protocols = [kind for kind in level.__mro__ if getattr(kind, "_is_protocol", False) and kind is not Protocol]
    names = [name for kind in reversed(protocols) for name in vars(kind) if not name.startswith("_")]
    return tuple(name for name in dict.fromkeys(names) if inspect.getattr_static(policy, name, None) is None)


def require_trainable(policy: Policy) -> Trainable:
    """Return `policy`, converted if needed, as `Trainable`; raises ConfigError naming the members that it lacks."""
    if isinstance(policy, ConvertibleToTrainable):
        return policy.to_trainable()
    missing_names = missing_members(policy, Trainable)
    if missing_names:
        raise ConfigError(
            f"{type(policy).__name__} can act but cannot be trained: it lacks {', '.join(missing_names)} (see "
            "Trainable in robopolicy/core/policy.py). It can still be evaluated, served, recorded (collect) and "
            "ranked."
        )
    assert isinstance(policy, Trainable)
    return policy


def to_tensors(observation: Observation, device: torch.device | str = "cpu") -> TensorObservation:
    """Copy a numpy observation [B, H, ...] to `device`: floats become fp32, images stay uint8, `task` stays a list of
    strings.
    """
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


keep_former_names(
    __name__,
    {
        "BecomesTrainable": "ConvertibleToTrainable",
        "Resumes": "ResumesDecision",
        "TakesAdapters": "SupportsLora",
        "LowersPrecision": "SupportsMixedPrecision",
        "MatchesNoise": "MatchingLikelihood",
    },
)
