"""What is fitted by regression on recorded episodes, whole or in stages: policies, world models, critics and heads."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes


class Regressor(Protocol):
    """Anything trained by regression: an nn.Module with a loss."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As in nn.Module."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """As in nn.Module."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """As in nn.Module."""
        ...

    def train(self, mode: bool = True) -> Any:
        """As in nn.Module."""
        ...

    def eval(self) -> Any:
        """As in nn.Module."""
        ...

    def loss(self, batch: Any, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Return named losses, one value per row [N] (or [B, T]); the sum of their means is minimised."""
        ...


class Regression(Regressor, Protocol):
    """What is fitted by regression on episodes: a model, or a part of one."""

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the parts of the loss by name, each [N]; the sum of their means is minimised."""
        ...

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield training batches for ever; `generator` is all the state. Raises DataError on unfit episodes."""
        ...


@runtime_checkable
class Staged(Protocol):
    """What is fitted in stages."""

    def stages(self) -> Mapping[str, tuple[Regression, float]]:
        """Return what is fitted one after the other, each with its share of the training steps."""
        ...
