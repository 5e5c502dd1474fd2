"""Small layers that several networks share: normalised linear layers, perceptrons, channel norm."""

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
