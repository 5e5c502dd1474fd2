"""What protocols ask of torch.nn.Module, which is no protocol itself: they name the methods of it that are called."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

import torch
from torch import nn


class Weights(Protocol):
    """What has weights to train and to keep: an nn.Module, or a policy or model that is one."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As in nn.Module."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As in nn.Module."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """As in nn.Module: all that behaviour depends on, statistics included, so that runs resume exactly."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """As in nn.Module."""
        ...


class Module(Weights, Protocol):
    """What has weights, two modes and a device."""

    def to(self, device: torch.device | str) -> Self:
        """As in nn.Module."""
        ...

    def train(self, mode: bool = True) -> Self:
        """As in nn.Module."""
        ...

    def eval(self) -> Self:
        """As in nn.Module."""
        ...
