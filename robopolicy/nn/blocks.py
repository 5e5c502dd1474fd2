"""Small layers that several networks share: normalised linear layers, perceptrons, channel norm, time and noise."""

import math

import torch
from einops import rearrange
from torch import Tensor, nn


def dense(inputs: int, outputs: int) -> nn.Sequential:
    """A linear layer, RMS norm and SiLU."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.RMSNorm(outputs, eps=1e-4), nn.SiLU())


def perceptron(inputs: int, width: int, layers: int, outputs: int, scale: float = 1.0) -> nn.Sequential:
    """`layers` dense layers, then a linear one whose initial weights are multiplied by `scale`."""
    head = nn.Linear(width if layers else inputs, outputs)
    with torch.no_grad():
        head.weight.mul_(scale)
        head.bias.zero_()
    return nn.Sequential(*(dense(width if layer else inputs, width) for layer in range(layers)), head)


class ChannelNorm(nn.Module):
    """RMS norm over the channels of maps [N, C, height, width]."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.RMSNorm(channels, eps=1e-4)

    def forward(self, maps: Tensor) -> Tensor:
        """Normalise every pixel of maps [N, C, height, width]."""
        return rearrange(self.norm(rearrange(maps, "n c h w -> n h w c")), "n h w c -> n c h w")


class TimeEmbedding(nn.Module):
    """Fourier features of times in [0, 1], from 1/4 to 16 periods over the range, then one hidden layer."""

    frequencies: Tensor

    def __init__(self, size: int, count: int = 16, hidden: int = 64):
        super().__init__()
        self.register_buffer("frequencies", 2 * math.pi * torch.logspace(-2, 4, count, base=2.0), persistent=False)
        self.layers = nn.Sequential(nn.Linear(2 * count, hidden), nn.SiLU(), nn.Linear(hidden, size))

    def forward(self, time: Tensor) -> Tensor:
        """Return [..., size] for times [...]."""
        angles = time[..., None] * self.frequencies
        return self.layers(torch.cat([angles.sin(), angles.cos()], -1))


class NoiseHead(nn.Module):
    """ReinFlow's learned noise: the std of every step and action dimension, bounded, from observation and time.

    The last layer starts at zero, so exploration begins in the middle of [low, high].
    """

    def __init__(self, condition: int, action_size: int, low: float, high: float, width: int = 64):
        super().__init__()
        self.low, self.high = low, max(low, high)
        last = nn.Linear(width, action_size)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(nn.Linear(condition + 1, width), nn.SiLU(), last)

    def forward(self, condition: Tensor, times: Tensor) -> Tensor:
        """Return stds [N, K, 1, A] of conditions [N, D] at times [K] or [N, K]."""
        times = times.expand(len(condition), -1)
        inputs = torch.cat([condition[:, None].expand(-1, times.shape[1], -1), times[..., None]], -1)
        return (self.low + (self.high - self.low) * self.layers(inputs).sigmoid())[:, :, None]
