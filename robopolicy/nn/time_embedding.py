"""What denoisers know of time."""

import math

import torch
from torch import Tensor, nn


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
