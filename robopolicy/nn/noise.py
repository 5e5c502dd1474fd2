"""Learned exploration noise of flow policies (ReinFlow, Zhang et al. 2025, arXiv:2505.22094)."""

import torch
from torch import Tensor, nn


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
