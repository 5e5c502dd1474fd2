"""Interfaces for regression on recorded episodes, in one or several stages: policies, world models, critics and
heads.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.modules import Module


class Regressor(Module, Protocol):
    """Model trained by regression: an nn.Module with a loss."""

    def loss(self, batch: Any, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Return named losses, one value per row [N] (or [B, T]); the sum of their means is minimised."""
        ...


class Regression(Regressor, Protocol):
    """A model, or part of one, that is trained by regression on episodes."""

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield training batches indefinitely; `generator` is the only state. Raises DataError on unsuitable
        episodes.
        """
        ...


@runtime_checkable
class DividesBatches(Protocol):
    """A regressor whose batches have their rows in places of its own, for data-parallel training."""

    def rows(self, batch: Any) -> int:
        """Return the number of rows N of a batch."""
        ...

    def divided(self, batch: Any, own: slice) -> Any:
        """Return the rows `own` of a batch."""
        ...


@runtime_checkable
class ScalesLearningRate(Protocol):
    """A stage of training with a learning rate of its own."""

    @property
    def learning_rate_scale(self) -> float:
        """Factor on the learning rate of the other stages."""
        ...


@runtime_checkable
class Staged(Protocol):
    """A model that is trained in several stages."""

    def stages(self) -> Mapping[str, tuple[Regression, float]]:
        """Return the stages in training order, each with its fraction of the training steps."""
        ...
