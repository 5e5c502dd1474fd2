"""What a policy is, in three protocols: it acts; it also scores what it did; it can also be trained.

A decision is an action chunk; inside it are steps with log-probabilities. A policy speaks torch. Axes: N or B row, K
scored step (denoising step, flow step or token), C chunk step, P >= C predicted steps, A action dimension, H history
frame. `robopolicy.core.policy_conformance.check_policy` tests the promises made here.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import TASK, Observation, PolicySpec
from robopolicy.core.world import Rows

if TYPE_CHECKING:
    from typing_extensions import TypeIs

TensorObservation = dict[str, Tensor | list[str]]
"""Key -> tensor [B, H, *field.shape] (images uint8, height x width x 3); `task` -> list of B strings."""

CONDITION = "condition"
"""Latents of this name, or "condition.<what>", are what a frozen encoder made of the observation, kept for scoring."""

_NO_STEPS = torch.zeros(0, 0)


@dataclass(frozen=True)
class Decision:
    """One action chunk per row and how it came about.

    actions: [B, C, A] in the world's units; latents: what `log_prob` needs to score it again, each [B, ...] (a
    denoising policy keeps its chain [B, K+1, P, A]); logp: [B, K] fp32 under the policy that acted; mask: [B, K] bool,
    True where a step was a choice (has a density). A policy that scores nothing leaves all but actions out; logp and
    mask are then [B, 0].
    """

    actions: Tensor
    latents: dict[str, Tensor] = field(default_factory=dict)
    logp: Tensor = _NO_STEPS
    mask: Tensor = _NO_STEPS

    def __post_init__(self) -> None:
        empty = (len(self.actions), 0)
        if self.logp is _NO_STEPS:
            object.__setattr__(self, "logp", torch.zeros(empty, device=self.actions.device))
        if self.mask is _NO_STEPS:
            object.__setattr__(self, "mask", torch.zeros(empty, dtype=torch.bool, device=self.actions.device))


@dataclass(frozen=True)
class Scores:
    """Differentiable scores of recorded decisions: logp, entropy [N, K]; extras by name, e.g. mean [N, K, P, A]."""

    logp: Tensor
    entropy: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Policy(Protocol):
    """Acts in worlds: enough to evaluate, serve, drive, rank and collect."""

    @property
    def spec(self) -> PolicySpec:
        """What it reads and writes; scored_steps is 0 where it scores nothing."""
        ...

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Decide for every row of an observation [B, H, ...] without gradient.

        deterministic: no exploration noise (the initial noise remains). Raises SpecError when the observation does not
        fit the spec, NonFiniteError on NaN or infinity.
        """
        ...

    def reset(self, rows: Rows = None) -> None:
        """Forget what was remembered about `rows` [R], all of them for None (most policies remember nothing)."""
        ...


@runtime_checkable
class ScoredPolicy(Policy, Protocol):
    """A policy whose decisions have log-probabilities: enough to compare what it did with what it would do."""

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Score recorded decisions: the only differentiable path. At unchanged parameters logp equals `act`'s to 1e-5.

        Optional latents: "chosen" [N, k] int64 selects k of the K steps per row (logp is then [N, k]); "executed"
        [N, C] bool, which steps of the chunk were executed, for policies that score control steps.
        """
        ...


@runtime_checkable
class Trainable(ScoredPolicy, Protocol):
    """A `ScoredPolicy` and torch.nn.Module that pre-training and fine-tuning change; the module's part comes first."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As in nn.Module."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """As in nn.Module: all that fine-tuning changes, so that runs resume exactly."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """As in nn.Module."""
        ...

    def train(self, mode: bool = True) -> Self:
        """As in nn.Module; both modes act alike."""
        ...

    def eval(self) -> Self:
        """As in nn.Module."""
        ...

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As in nn.Module."""
        ...

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the parts of behaviour cloning's loss by name, each [N].

        batch: "observation" (key -> [N, H, ...]), "actions" [N, P, A] in the world's units, "action_valid" [N, P] bool,
        False on padding behind an episode's end.
        """
        ...

    def trainable_parameters(self) -> Iterable[nn.Parameter]:
        """The weights that an optimiser may change."""
        ...

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Get ready for policy gradients in the last `steps` scored steps, None for as many as its config says.

        train_encoder: whether what reads the observation goes on learning. A policy that is prepared already stays as
        it is. Raises ConfigError where that cannot be done.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write a self-describing checkpoint, atomically."""
        ...


@runtime_checkable
class Resumes(Protocol):
    """A policy that can go on from the middle of a decision: its tree branches inside chains or token sequences."""

    def resume(
        self, observation: TensorObservation, latents: Mapping[str, Tensor], count: Tensor, generator: torch.Generator
    ) -> Decision:
        """Decide like `act`, but keep the first count[b] steps [B] of `latents` where count is not negative.

        Kept steps are no choices of this decision: mask is False there. count 0 keeps what came before the first step
        (the initial noise of a chain; of tokens nothing), -1 nothing at all.
        """
        ...


@runtime_checkable
class Finishes(Protocol):
    """A policy that can complete a half-made decision without noise, to see where a step leads."""

    def finish(self, observation: TensorObservation, latents: Tensor, begun: Tensor) -> Tensor:
        """Return the actions [N, C, A] that noise-free steps make of latents [N, P, A] about to enter step `begun`.

        begun: [N] int64, 0..K counts the scored steps; K are finished latents.
        """
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """A policy of which low-rank adapters can learn instead of its weights."""

    def add_lora(self, rank: int) -> None:
        """Freeze the weights and add trainable adapters of this rank (LoRA)."""
        ...


@runtime_checkable
class PlansItself(Protocol):
    """A policy that looks ahead by itself before it acts."""

    def unplanned(self) -> "Policy | None":
        """Return the same policy without looking ahead, None where it does not anyway."""
        ...


@runtime_checkable
class KeepsMeans(Protocol):
    """A policy whose steps are Gaussian, and whose decisions hold their means on request.

    keep_means: whether `Decision.latents` has "mean" [B, K, P, A], the mean of every scored step when it was drawn.
    """

    keep_means: bool


@runtime_checkable
class CachesCondition(Protocol):
    """A policy whose frozen encoder reads images once, when it acts: what it made spares `log_prob` the images.

    caches_condition: whether its decisions hold latents named as `CONDITION` says, and `log_prob` uses them.
    """

    @property
    def caches_condition(self) -> bool:
        """See the class."""
        ...


def is_condition(name: str) -> bool:
    """Whether a latent of this name is what an encoder made of the observation (see `CONDITION`)."""
    return name == CONDITION or name.startswith(f"{CONDITION}.")


def is_policy(actor: object) -> "TypeIs[Policy]":
    """Whether `actor` is a `Policy`, not a `Controller`: that too acts and resets, and may keep a world's spec."""
    return isinstance(actor, Policy) and isinstance(actor.spec, PolicySpec)


def lacking(policy: object, level: type) -> tuple[str, ...]:
    """Return the names of what a `level` (Policy, ScoredPolicy or Trainable) has and `policy` has not."""
    protocols = [kind for kind in level.__mro__ if getattr(kind, "_is_protocol", False) and kind is not Protocol]
    names = [name for kind in reversed(protocols) for name in vars(kind) if not name.startswith("_")]
    return tuple(name for name in dict.fromkeys(names) if inspect.getattr_static(policy, name, None) is None)


def require_trainable(policy: Policy) -> Trainable:
    """Return `policy` as what can be fine-tuned; raises ConfigError naming what it lacks for that."""
    missing = lacking(policy, Trainable)
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
