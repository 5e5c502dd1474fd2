"""Latents of a denoising chain: normalised actions, unless the network defines otherwise.

Pretrained policies pad actions to a size shared by many robots, start their chunks in the past, and have their own
normalisation. The full latent goes through the chain; log-probabilities only cover the executed part. Axes: N row, P
predicted step, L latent element, A action dimension, S steps of a world's action chunk.
"""

from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.former_names import keep_former_names
from robopolicy.nn.schedules import Schedule
from robopolicy.policies.configuration import DenoisingPolicyConfig


@dataclass(frozen=True)
class ExecutedSlice:
    """Executed part of latents [..., P, L]: steps [first, first + count), first `size` elements."""

    first: int
    count: int
    size: int

    def of(self, latents: Tensor) -> Tensor:
        """Return the executed part, [..., count, size]."""
        return latents[..., self.first : self.first + self.count, : self.size]

    def std_of(self, std: Tensor) -> Tensor:
        """Return the stds [..., 1 or P, 1 or L] of the executed part, broadcastable to it."""
        if std.shape[-2] != 1:
            std = std[..., self.first : self.first + self.count, :]
        return std[..., : self.size]


@runtime_checkable
class CustomLatents(Protocol):
    """Optional: a network that was trained elsewhere, with its own latents, schedule and error.

    latent_size: elements L of a latent, of which the first A represent the action; first_step: number of predicted
    steps before the first executed one; keeps_condition: whether policy calls cache the output of a frozen encoder;
    denoises_actions: whether latents are (padded) normalised actions, not another representation from which actions are
    computed; how_to_explore: settings that add noise to its steps, completing "fine-tune more steps, or ".
    """

    how_to_explore: str

    @property
    def latent_size(self) -> int:
        """Size L of one latent; see the class."""
        ...

    @property
    def first_step(self) -> int:
        """Index of the first executed step among the predicted ones; see the class."""
        ...

    @property
    def keeps_condition(self) -> bool:
        """Whether policy calls cache the encoded observation; see the class."""
        ...

    @property
    def denoises_actions(self) -> bool:
        """Whether latents are normalised actions; see the class."""
        ...

    def to_latents(self, actions: Tensor) -> Tensor:
        """Convert actions [N, P, A] in world units to clean latents [N, P, L]."""
        ...

    def to_actions(self, latents: Tensor) -> Tensor:
        """Convert clean latents [N, S, L] to actions [N, S, A] in world units."""
        ...

    def levels(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw noise levels [count] from the network's training distribution."""
        ...

    def schedule(self, config: DenoisingPolicyConfig) -> Schedule:
        """Return the schedule that the network was trained with, with the steps and the noise set in config."""
        ...

    def errors(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the error of each predicted step, [N, P], for predictions and targets [N, P, L]."""
        ...

    def why_always_as_many(self) -> str:
        """Return the reason why the network cannot denoise in fewer steps, "" if it can."""
        ...

    def of_steps(self, steps: int) -> Self:
        """Return a copy with `steps` denoising steps that shares frozen weights; raises ConfigError when impossible."""
        ...


def executed_slice(network: object, config: DenoisingPolicyConfig, action_size: int) -> ExecutedSlice:
    """Return the executed part of the network's latents."""
    return ExecutedSlice(network.first_step if isinstance(network, CustomLatents) else 0, config.chunk, action_size)


def latent_size_of(network: object, action_size: int) -> int:
    """Return L, the size of one latent."""
    return network.latent_size if isinstance(network, CustomLatents) else action_size


def step_errors(network: object, size: int, prediction: Tensor, target: Tensor) -> Tensor:
    """Return the error of each predicted step, [N, P], for predictions and targets [N, P, L]; size: A."""
    if isinstance(network, CustomLatents):
        return network.errors(prediction, target)
    return (prediction - target)[..., :size].square().mean(-1)


keep_former_names(
    __name__,
    {
        "Executed": "ExecutedSlice",
        "executed_part": "executed_slice",
        "OwnLatents": "CustomLatents",
        "size_of_latents": "latent_size_of",
    },
)
