"""Structural types for torch.nn.Module, which is not a protocol itself: the methods that other protocols require."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

import torch
from torch import nn


class Weights(Protocol):
    """Object with weights to train and save: an nn.Module, or a policy or model that is one."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As in nn.Module."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As in nn.Module."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """As in nn.Module: everything that behaviour depends on, including statistics, so that runs resume exactly."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """As in nn.Module."""
        ...


class Module(Weights, Protocol):
    """Object with weights, train and eval modes, and a device."""

    def to(self, device: torch.device | str) -> Self:
        """As in nn.Module."""
        ...

    def train(self, mode: bool = True) -> Self:
        """As in nn.Module."""
        ...

    def eval(self) -> Self:
        """As in nn.Module."""
        ...


def device_of(policy: object) -> torch.device:
    """Return the device of a policy's weights; the CPU for a policy without weights."""
    weights = policy.parameters() if isinstance(policy, nn.Module) else iter(())
    return next((weight.device for weight in weights), torch.device("cpu"))
