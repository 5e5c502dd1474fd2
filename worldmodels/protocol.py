"""The `WorldModel` protocol: what learned (or oracle) dynamics must implement for `ImaginedWorld` to be a `World`.

World models use torch. Axes: B row, A action dimension. An imagined episode is a pure function of its seed and its
actions: all noise is derived from the seed and the step in the latent. Episodes therefore do not depend on rows or
batches, and a copied latent branches exactly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.modules import Module
from robopolicy.core.policy import Policy, PolicyWrapper
from robopolicy.core.randomness import uniforms
from robopolicy.core.regression import Staged
from robopolicy.core.spec import Field, WorldSpec
from robopolicy.nn.branches import Caching

Latent = dict[str, Tensor]
"""State of a model between steps, name -> [B, ...]."""

LATENT = "observation.latent"
"""Observation key of the latent of a model without a decoder."""


def counters(seeds: np.ndarray, device: torch.device | str) -> Latent:
    """Return the inputs of `uniforms_of` from a latent: the episode's seed and the number of the next step, [R] int64
    each.
    """
    seed_tensor = torch.from_numpy(np.asarray(seeds, dtype=np.int64)).to(device)
    return {"seed": seed_tensor, "step": torch.zeros_like(seed_tensor)}


def uniforms_of(latent: Latent, count: int) -> np.ndarray:
    """Return `count` uniforms in [0, 1) per row, [B, count]; they depend only on its episode's seed and step."""
    # The factor, a prime, is above any episode's length, so that neighbouring seeds share no (seed, step) pair. int64
    # may wrap around, which is harmless: `uniforms` only hashes the number.
    seeds = latent["seed"].cpu().numpy() * np.int64(1_000_003) + latent["step"].cpu().numpy()
    return uniforms(seeds, count)


@dataclass(frozen=True)
class Context:
    """Initial context of R imagined episodes: H frames each, the last one current (H = 1 after a reset).

    observation: key -> [R, H, *shape]; task: [R] texts, or none when there is one instruction; actions: [R, H - 1, A],
    between the frames, None when unknown; state: simulator state to continue from, name -> [R, ...], if known.
    """

    observation: Mapping[str, np.ndarray]
    task: np.ndarray | None = None
    actions: np.ndarray | None = None
    state: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.observation.values())))

    def last(self, key: str) -> np.ndarray:
        """Return the current frame [R, *shape]."""
        return self.observation[key][:, -1]

    def connected(self) -> "Context":
        """Return the frames between which actions are known: all, or only the current one when actions are unknown."""
        if self.actions is not None:
            return self
        return replace(self, observation={key: value[:, -1:] for key, value in self.observation.items()})


Starts = Callable[[np.ndarray], Context]
"""Episode seeds [R] -> initial contexts of these episodes."""


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


def merge_steps(parts: Sequence[Imagined], combine: Callable[[list[Tensor]], Tensor]) -> Imagined:
    """Merge several steps into one: `combine` merges one tensor of all parts, [rows of the part, ...], at a time."""
    return Imagined(
        {key: combine([part.observation[key] for part in parts]) for key in parts[0].observation},
        {name: combine([part.rewards[name] for part in parts]) for name in parts[0].rewards},
        combine([part.success for part in parts]),
        combine([part.terminated for part in parts]),
        combine([part.uncertainty for part in parts]),
    )


@runtime_checkable
class WorldModel(Protocol):
    """Predicts the outcome of actions."""

    @property
    def spec(self) -> WorldSpec:
        """Spec of the imitated world, with the reward terms that it predicts and the fields that it outputs.

        The fields are the world's own, a subset, or fields that the model computes itself: see `DecoderFree`.
        """
        ...

    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the latent of episodes with `seeds` [R] that start in `context`."""
        ...

    def imagine(self, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
        """Advance every row by one control step with actions [B, A] in the world's units, without gradient."""
        ...


@runtime_checkable
class ChunkModel(WorldModel, Protocol):
    """A world model that imagines several steps together faster than one by one, with the same result."""

    def generate(self, latent: Latent, actions: Tensor) -> tuple[Latent, list[Imagined]]:
        """Advance every row by T control steps with actions [B, T, A], without gradient; one `Imagined` per step."""
        ...


@runtime_checkable
class Cacheable(WorldModel, Protocol):
    """A world model that denoises its predictions with a network whose branches can be cached within a chain."""

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the residual branches, in order of computation."""
        ...

    @property
    def calls(self) -> int:
        """Number of network calls per chain."""
        ...

    @property
    def chunk(self) -> int:
        """Maximum number of steps that one chain imagines."""
        ...

    def with_caching(self, caching: Caching | None) -> Self:
        """Return a model with the same weights whose chains use the cache plan `caching`, None for no caching.

        Raises ConfigError when the plan is for other branches or another number of calls. Rows stay independent if
        `caching` allows it, as plans do.
        """
        ...


@runtime_checkable
class DecoderFree(WorldModel, Protocol):
    """A world model without an observation decoder: its spec has its latent as the only field, for example `LATENT`.

    Imagined episodes contain that field from their first frame on, and policies trained there read it. The real world
    does not provide it. There, `EncodedPolicy` computes it from observations, and `encoded` converts recorded episodes
    for pre-training such a policy (both in `worldmodels.encoding`, both by `initial` and `show`).
    """

    @property
    def reads(self) -> Mapping[str, Field]:
        """Fields of the imitated world's observation that `initial` reads, by key."""
        ...

    def show(self, latent: Latent) -> Mapping[str, Tensor]:
        """Return the observation of a latent, key -> [B, *shape], without gradient: the fields of `spec`."""
        ...


@runtime_checkable
class EncodesForPolicy(PolicyWrapper, Protocol):
    """A real-world policy that encodes observations for an inner policy, which reads the latent of a model without a
    decoder.
    """

    @property
    def encoder(self) -> DecoderFree:
        """The model that encodes observations."""
        ...

    def around(self, inner: Policy) -> "EncodesForPolicy":
        """Put the encoder before another policy with the same inputs."""
        ...

    def save(self, folder: Path) -> None:
        """Write the inner policy's checkpoint with the encoder inside, atomically."""
        ...


@runtime_checkable
class HasEncoder(DecoderFree, Protocol):
    """A `DecoderFree` whose latents of recorded frames depend only on an encoder, which other models may share."""

    def encoder_weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the encoder, name -> [...]; models with equal ones have equal latents."""
        ...


@runtime_checkable
class DecodesLatents(DecoderFree, Protocol):
    """A `DecoderFree` that can decode its latents into images for visualisation; policies never read them."""

    def drawn(self, shown: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return images of the latent observation, key -> [B, *shape]: camera's key -> uint8 [B, height, width, 3]."""
        ...


def encoder_weights(model: DecoderFree) -> Mapping[str, Tensor]:
    """Return the weights that determine latents of recorded frames, name -> [...]: those of the encoder, or all if
    there is no separate one.
    """
    return model.encoder_weights() if isinstance(model, HasEncoder) else cast(Module, model).state_dict()


def fields_read(model: WorldModel) -> Mapping[str, Field]:
    """Return the context fields from which `model` starts episodes: those that it outputs, if it can decode them."""
    return model.reads if isinstance(model, DecoderFree) else model.spec.observation


@runtime_checkable
class LearnedModel(WorldModel, Staged, Module, Protocol):
    """A world model with weights, an nn.Module: trained in stages, with a description for its checkpoint.

    `robopolicy.testing.world_model.check_world_model` tests every requirement.
    """

    @property
    def uncertainty_quantiles(self) -> Tensor:
        """[101]: quantiles of the single-step uncertainty on held-out data."""
        ...

    @property
    def context(self) -> int:
        """Number of context frames that `initial` uses, at least 1; `initial` also accepts fewer (at least one) and
        more.
        """
        ...

    @classmethod
    def build(cls, config: Any, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Build an untrained model of the world of `spec`, with statistics from `episodes`.

        config: the settings of this kind; its weights depend on `seed`, not on global randomness. Raises DataError when
        the episodes do not match the world or lack training targets.
        """
        ...

    def calibrate(self, episodes: Episodes) -> None:
        """Calibrate thresholds and `uncertainty_quantiles` on held-out episodes, after training."""
        ...

    def description(self) -> dict[str, Any]:
        """Return the inputs that `restore` needs in addition to spec and weights, as JSON."""
        ...

    @classmethod
    def restore(cls, description: Mapping[str, Any], spec: WorldSpec, weights: Mapping[str, Tensor]) -> Self:
        """Return a model into which `weights` can be loaded.

        weights: name -> [...], as `state_dict` returns them, used for their shapes. Raises ConfigError, KeyError or
        TypeError when description and weights do not make a model; `load_world_model` converts these to
        CheckpointError.
        """
        ...


keep_former_names(
    __name__,
    {
        "combined": "merge_steps",
        "draws_of": "uniforms_of",
        "DrawsLatents": "DecodesLatents",
        "BehindEncoder": "EncodesForPolicy",
    },
)
