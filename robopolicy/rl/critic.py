"""Critic V(observation): an encoder followed by an MLP, and the scale of its rewards."""

from collections.abc import Mapping
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import TASK, Field
from robopolicy.core.vectors import StateVector
from robopolicy.nn.configuration import NormalizationMode
from robopolicy.nn.normalizer import Normalizer
from robopolicy.nn.precision import run_in_training_precision

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"mish": nn.Mish, "silu": nn.SiLU, "relu": nn.ReLU}
"""Activation functions of a critic by name."""


class StateFeatures(nn.Module):
    """Standardise the vector fields of an observation and concatenate them with their history: -> [N, features].

    fields: keys to read, without images (a critic may read more of the state than the policy). Standardised values are
    limited to +-10, so that states far from those in `fit` cannot destabilise the critic. instructions: of the world;
    if there are several, the current one is part of the state, one-hot.
    """

    def __init__(self, fields: Mapping[str, Field], history: int, instructions: tuple[str, ...] = ("",)):
        super().__init__()
        self.instructions = instructions
        self.keys = [key for key in StateVector.of(fields).keys if len(fields[key].shape) == 1]
        if not self.keys:
            raise ConfigError(
                f"A state critic needs a vector field, but the observation has only {', '.join(fields) or 'nothing'}: "
                "give the critic an image encoder, or add the state to the world's observation."
            )
        self.normalizers = nn.ModuleList(Normalizer(fields[key].shape, NormalizationMode.MEAN_STD) for key in self.keys)
        self.features = history * sum(fields[key].size for key in self.keys)
        if len(instructions) > 1:
            self.features += len(instructions)

    def fit(self, observation: Mapping[str, Any]) -> None:
        """Fit the standardisation on an observation [..., *shape] of many rows."""
        for key, normalizer in zip(self.keys, self.normalizers, strict=True):
            normalizer.fit(observation[key])  # type: ignore[operator]

    def forward(self, observation: Mapping[str, Any]) -> Tensor:
        """Return features [N, features] of an observation [N, H, *shape]; `task`: N texts, or their indices [N]."""
        pairs = zip(self.keys, self.normalizers, strict=True)
        parts = [normalizer(observation[key]).clamp(-10, 10).flatten(1) for key, normalizer in pairs]
        if len(self.instructions) > 1:
            task = observation[TASK]
            if not isinstance(task, Tensor):
                task = torch.tensor([self.instructions.index(text) for text in task], device=parts[0].device)
            parts.append(functional.one_hot(task, len(self.instructions)).float())
        return torch.cat(parts, dim=-1)


class Critic(nn.Module):
    """V(observation) in units of scaled rewards, [N].

    encoder: observation -> [N, features] (`StateFeatures`, or an image encoder); depth hidden layers of `width` with
    an activation function of `ACTIVATIONS` (DPPO: 256 x 3 with Mish). The last layer starts at zero, so the first
    values are 0.
    """

    def __init__(self, encoder: nn.Module, features: int, width: int = 256, depth: int = 2, activation: str = "mish"):
        super().__init__()
        self.encoder = encoder
        self.architecture = {"width": width, "depth": depth, "activation": activation}
        layers: list[nn.Module] = []
        for size in chain((features,), repeat(width, depth - 1)):
            layers += [nn.Linear(size, width), ACTIVATIONS[activation]()]
        head = nn.Linear(width, 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.layers = nn.Sequential(*layers, head)

    @property
    def reads_images(self) -> bool:
        """Whether its encoder may read camera images; `StateFeatures` does not."""
        return not isinstance(self.encoder, StateFeatures)

    def fit(self, observation: Mapping[str, Any]) -> None:
        """Fit the encoder's standardisation, if it has one, on an observation [..., *shape]; call once, before
        computing values.
        """
        if isinstance(self.encoder, StateFeatures):
            self.encoder.fit(observation)

    def forward(self, observation: Mapping[str, Any]) -> Tensor:
        """Return values [N]."""
        features = self.encoder(observation)
        hidden = run_in_training_precision(lambda: self.layers[:-1](features), features.device)
        return self.layers[-1](hidden).squeeze(-1)


def state_critic(
    fields: Mapping[str, Field],
    history: int,
    width: int = 256,
    depth: int = 2,
    instructions: tuple[str, ...] = ("",),
    activation: str = "mish",
) -> Critic:
    """Build a critic over the vector fields of a world's observation, and over its instructions if it has several."""
    encoder = StateFeatures(fields, history, instructions)
    return Critic(encoder, encoder.features, width, depth, activation)


class ReturnScale(nn.Module):
    """Divide rewards by the running standard deviation of the discounted return, so that one critic learning rate fits
    every task.

    The return is accumulated forward, G_t = R_t + gamma^h_{t-1} (1 - ended_{t-1}) G_{t-1} (as in OpenAI baselines'
    VecNormalize and DPPO), and its moments are pooled over all columns so far (Chan et al. 1979). The mean is not
    subtracted from rewards. Its state is in fp64 buffers, which are part of checkpoints.
    """

    count: Tensor
    mean: Tensor
    second_moment: Tensor

    def __init__(self):
        super().__init__()
        for name in ("count", "mean", "second_moment"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rewards: Tensor, ended: Tensor, discount: Tensor) -> None:
        """Update with chunks: rewards (chunk sums) [B, T], ended [B, T] bool, discount gamma^h [B, T].

        Streams are assumed to restart (G = 0) at the first column.
        """
        # A discounted sum of the past instead of the future: about the same spread, and it waits for no episode's end.
        running = torch.zeros(rewards.shape[0], dtype=torch.float64, device=rewards.device)
        discounted: list[Tensor] = []
        for column in range(rewards.shape[1]):
            running = rewards[:, column].double() + running
            discounted.append(running)
            running = torch.where(ended[:, column], 0.0, discount[:, column].double() * running)
        # Chan's update joins the moments of two samples exactly; fp64, because the counts grow for the whole run.
        values = torch.stack(discounted)
        count = torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)
        total = self.count + count
        shift = values.mean() - self.mean
        self.second_moment += (values - values.mean()).square().sum() + shift.square() * self.count * count / total
        self.mean += shift * count / total
        self.count.copy_(total)

    @property
    def scale(self) -> Tensor:
        """Current standard deviation, [] fp64; 1 before any update and while all returns are equal."""
        variance = self.second_moment / self.count.clamp(min=1)
        return torch.where(variance > 1e-12, variance.sqrt(), torch.ones_like(variance))
