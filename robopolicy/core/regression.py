"""What is fitted by regression on recorded episodes, whole or in stages: policies, world models, critics and heads."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.modules import Module


class Regressor(Module, Protocol):
    """Anything trained by regression: an nn.Module with a loss."""

    def loss(self, batch: Any, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Return named losses, one value per row [N] (or [B, T]); the sum of their means is minimised."""
        ...


class Regression(Regressor, Protocol):
    """What is fitted by regression on episodes: a model, or a part of one."""

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield training batches for ever; `generator` is all the state. Raises DataError on unfit episodes."""
        ...


@runtime_checkable
class Staged(Protocol):
    """What is fitted in stages."""

    def stages(self) -> Mapping[str, tuple[Regression, float]]:
        """Return what is fitted one after the other, each with its share of the training steps."""
        ...
