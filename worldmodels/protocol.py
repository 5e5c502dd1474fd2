"""The `WorldModel` contract: what learned (or oracle) dynamics must offer so that `ImaginedWorld` can be a `World`.

A world model speaks torch. Axes: B row, A action dimension. An imagined episode is a pure function of its seed and its
actions: whatever noise a model draws, it derives from the seed and the step that the latent carries, so episodes do not
depend on rows or batches, and a copied latent branches exactly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.randomness import uniforms
from robopolicy.core.spec import WorldSpec

Latent = dict[str, Tensor]
"""What a model carries from step to step, name -> [B, ...]."""


def draws_of(latent: Latent, count: int) -> np.ndarray:
    """Return `count` uniforms in [0, 1) a row, [B, count]: a function of its episode's seed and step number alone."""
    seeds = latent["seed"].cpu().numpy() * np.int64(1_000_003) + latent["step"].cpu().numpy()
    return uniforms(seeds, count)


@dataclass(frozen=True)
class Context:
    """Where R imagined episodes begin: H frames each, the last of them the present one (H = 1 after a reset).

    observation: key -> [R, H, *shape]; task: [R] texts, or none where there is one instruction; actions: [R, H - 1, A],
    what was done between the frames; state: what a simulator needs to go on from there, name -> [R, ...], if known.
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


Starts = Callable[[np.ndarray], Context]
"""Episode seeds [R] -> where these episodes begin."""


@dataclass(frozen=True)
class Imagined:
    """One imagined control step of B rows.

    observation: the new frame, key -> [B, *shape]; rewards: name -> [B]; success: [B] bool, the goal is reached;
    terminated: [B] bool, the task ended (success included, where that ends it); uncertainty: [B], in the model's units.
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
        """The spec of the world it imitates, with the reward terms that it predicts."""
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


class Regression(Protocol):
    """An nn.Module that is fitted by regression on episodes: a model, or a part of one."""

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the parts of the loss by name, each [N]."""
        ...

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield training batches for ever; `generator` is all the state."""
        ...


class Staged(Protocol):
    """What is fitted in stages."""

    def stages(self) -> Mapping[str, tuple[Regression, float]]:
        """Return what is fitted one after the other, each with its share of the training steps."""
        ...


class LearnedModel(WorldModel, Staged, Protocol):
    """A world model with weights, an nn.Module: trained in stages, and able to describe itself for a checkpoint."""

    @property
    def uncertainty_quantiles(self) -> Tensor:
        """[101]: quantiles of the uncertainty of single steps on held-out data."""
        ...

    @property
    def context(self) -> int:
        """How many frames it likes to begin with; it can do with one."""
        ...

    @classmethod
    def build(cls, config: Any, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Return an untrained model of the world of `spec`, its statistics read off `episodes`."""
        ...

    def calibrate(self, episodes: Episodes) -> None:
        """Set thresholds on held-out episodes, after training."""
        ...

    def description(self) -> dict[str, Any]:
        """Return what `restore` needs besides spec and weights, as JSON."""
        ...

    @classmethod
    def restore(cls, description: Mapping[str, Any], spec: WorldSpec, weights: Mapping[str, Tensor]) -> Self:
        """Return a model into which `weights` can be loaded."""
        ...
