"""The `WorldModel` contract: what learned (or oracle) dynamics must offer so that `ImaginedWorld` can be a `World`.

A world model speaks torch. Axes: B row, A action dimension. An imagined episode is a pure function of its seed and its
actions: whatever noise a model draws, it derives from the seed and the step that the latent carries, so episodes do not
depend on rows or batches, and a copied latent branches exactly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.modules import Module
from robopolicy.core.policy import Policy, PolicyWrapper
from robopolicy.core.randomness import uniforms
from robopolicy.core.regression import Staged
from robopolicy.core.spec import Field, WorldSpec
from robopolicy.nn.branches import Caching

Latent = dict[str, Tensor]
"""What a model carries from step to step, name -> [B, ...]."""

LATENT = "observation.latent"
"""Key under which a model without a decoder shows its latent."""


def counters(seeds: np.ndarray, device: torch.device | str) -> Latent:
    """Return what `draws_of` reads of a latent: the episode's seed and the number of the next step, [R] int64 each."""
    given = torch.from_numpy(np.asarray(seeds, dtype=np.int64)).to(device)
    return {"seed": given, "step": torch.zeros_like(given)}


def draws_of(latent: Latent, count: int) -> np.ndarray:
    """Return `count` uniforms in [0, 1) a row, [B, count]: a function of its episode's seed and step number alone."""
    # The factor, a prime, is above any episode's length, so that neighbouring seeds share no (seed, step) pair. int64
    # may wrap around, which is harmless: `uniforms` only hashes the number.
    seeds = latent["seed"].cpu().numpy() * np.int64(1_000_003) + latent["step"].cpu().numpy()
    return uniforms(seeds, count)


@dataclass(frozen=True)
class Context:
    """Where R imagined episodes begin: H frames each, the last of them the present one (H = 1 after a reset).

    observation: key -> [R, H, *shape]; task: [R] texts, or none where there is one instruction; actions: [R, H - 1, A],
    what was done between the frames, None where that is not known; state: what a simulator needs to go on from there,
    name -> [R, ...], if known.
    """

    observation: Mapping[str, np.ndarray]
    task: np.ndarray | None = None
    actions: np.ndarray | None = None
    state: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.observation.values())))

    def last(self, key: str) -> np.ndarray:
        """Return the present frame [R, *shape]."""
        return self.observation[key][:, -1]

    def connected(self) -> "Context":
        """Return the frames between which actions are known: all of them, or the present one where none is known."""
        if self.actions is not None:
            return self
        return replace(self, observation={key: value[:, -1:] for key, value in self.observation.items()})


Starts = Callable[[np.ndarray], Context]
"""Episode seeds [R] -> where these episodes begin."""


@dataclass(frozen=True)
class Imagined:
    """One imagined control step of B rows.

    observation: the new frame, key -> [B, *shape], the fields of the model's spec; rewards: name -> [B]; success: [B]
    bool, the goal is reached; terminated: [B] bool, the task ended (success included, where that ends it); uncertainty:
    [B], in the model's units.
    """

    observation: Mapping[str, Tensor]
    rewards: Mapping[str, Tensor]
    success: Tensor
    terminated: Tensor
    uncertainty: Tensor


def combined(parts: Sequence[Imagined], combine: Callable[[list[Tensor]], Tensor]) -> Imagined:
    """Return one step made of several: `combine` takes a tensor of each part, [rows of the part, ...], at a time."""
    return Imagined(
        {key: combine([part.observation[key] for part in parts]) for key in parts[0].observation},
        {name: combine([part.rewards[name] for part in parts]) for name in parts[0].rewards},
        combine([part.success for part in parts]),
        combine([part.terminated for part in parts]),
        combine([part.uncertainty for part in parts]),
    )


@runtime_checkable
class WorldModel(Protocol):
    """Predicts what actions lead to."""

    @property
    def spec(self) -> WorldSpec:
        """The spec of the world it imitates, with the reward terms that it predicts and the fields that it shows.

        Those are the world's own, or fewer, or fields that the model makes itself: see `DecoderFree`.
        """
        ...

    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the latent of episodes with `seeds` [R] that begin in `context`."""
        ...

    def imagine(self, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
        """Advance every row by one control step with actions [B, A] in the world's units, without gradient."""
        ...


@runtime_checkable
class ChunkModel(WorldModel, Protocol):
    """A world model that imagines several steps together faster than one by one, and to the same end."""

    def generate(self, latent: Latent, actions: Tensor) -> tuple[Latent, list[Imagined]]:
        """Advance every row by T control steps with actions [B, T, A], without gradient; one `Imagined` a step."""
        ...


@runtime_checkable
class Cacheable(WorldModel, Protocol):
    """A world model that denoises what it imagines, with a network whose branches can be remembered in a chain."""

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the residual branches, in the order of their computation."""
        ...

    @property
    def calls(self) -> int:
        """How often a chain calls the network."""
        ...

    @property
    def chunk(self) -> int:
        """Most steps that one chain imagines."""
        ...

    def with_caching(self, caching: Caching | None) -> Self:
        """Return a model of the same weights whose chains remember by `caching`, None for nothing.

        Raises ConfigError where that is made for other branches or another number of calls. Rows stay apart from one
        another where `caching` lets them, as plans do.
        """
        ...


@runtime_checkable
class DecoderFree(WorldModel, Protocol):
    """A world model that cannot decode observations: its spec has its latent as a field, `LATENT` say, and no other.

    Imagined episodes show that field from their first frame on, and policies that learn there read it. The real world
    does not show it: there `EncodedPolicy` turns what is observed into it, and `encoded` turns recorded episodes into
    episodes on which such a policy can be pre-trained (both in `worldmodels.encoding`, both by `initial` and `show`).
    """

    @property
    def reads(self) -> Mapping[str, Field]:
        """Fields of the imitated world's own observation that `initial` reads, by key."""
        ...

    def show(self, latent: Latent) -> Mapping[str, Tensor]:
        """Return what is seen where a latent is, key -> [B, *shape], without gradient: the fields of `spec`."""
        ...


@runtime_checkable
class BehindEncoder(PolicyWrapper, Protocol):
    """A policy of the real world that decides by means of one which reads what a model without a decoder shows."""

    @property
    def encoder(self) -> DecoderFree:
        """The model that encodes what is observed."""
        ...

    def around(self, inner: Policy) -> "BehindEncoder":
        """Return the encoder before another policy, which reads the same."""
        ...

    def save(self, folder: Path) -> None:
        """Write the inner policy's checkpoint with the encoder inside, atomically."""
        ...


@runtime_checkable
class HasEncoder(DecoderFree, Protocol):
    """A `DecoderFree` whose latents of recorded frames depend on an encoder alone, which other models may share."""

    def encoder_weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the encoder, name -> [...]: models of equal ones show equal latents."""
        ...


@runtime_checkable
class DrawsLatents(DecoderFree, Protocol):
    """A `DecoderFree` that can draw what it imagines, for people to look at: policies never see that."""

    def drawn(self, shown: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return images of what is shown, key -> [B, *shape]: camera's key -> uint8 [B, height, width, 3]."""
        ...


def encoder_weights(model: DecoderFree) -> Mapping[str, Tensor]:
    """Return what latents of recorded frames depend on, name -> [...]: an encoder, or all where none is told apart."""
    return model.encoder_weights() if isinstance(model, HasEncoder) else cast(Module, model).state_dict()


def fields_read(model: WorldModel) -> Mapping[str, Field]:
    """Return the fields of a context from which `model` begins episodes: those that it shows, if it can decode them."""
    return model.reads if isinstance(model, DecoderFree) else model.spec.observation


@runtime_checkable
class LearnedModel(WorldModel, Staged, Module, Protocol):
    """A world model with weights, an nn.Module: trained in stages, and able to describe itself for a checkpoint.

    `robopolicy.testing.world_model.check_world_model` tests every promise of it.
    """

    @property
    def uncertainty_quantiles(self) -> Tensor:
        """[101]: quantiles of the uncertainty of single steps on held-out data."""
        ...

    @property
    def context(self) -> int:
        """Frames of a context that `initial` makes use of, at least 1; it accepts fewer (one) and more."""
        ...

    @classmethod
    def build(cls, config: Any, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Return an untrained model of the world of `spec`, its statistics read off `episodes`.

        config: the settings of this kind; its weights follow from `seed`, not from global randomness. Raises DataError
        where the episodes are not of that world or lack what is learned.
        """
        ...

    def calibrate(self, episodes: Episodes) -> None:
        """Set thresholds and `uncertainty_quantiles` on held-out episodes, after training."""
        ...

    def description(self) -> dict[str, Any]:
        """Return what `restore` needs besides spec and weights, as JSON."""
        ...

    @classmethod
    def restore(cls, description: Mapping[str, Any], spec: WorldSpec, weights: Mapping[str, Tensor]) -> Self:
        """Return a model into which `weights` can be loaded.

        weights: name -> [...], as `state_dict` gives them, to read shapes off. Raises ConfigError, KeyError or
        TypeError where description and weights do not make a model; `load_world_model` turns these into
        CheckpointError.
        """
        ...
