"""Small layers shared by several networks: normalised linear layers, MLPs (one, or M at once), time embedding, noise
head; `follow` for target networks.
"""

import math
from itertools import chain, pairwise, repeat

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional


def dense(inputs: int, outputs: int) -> nn.Sequential:
    """A linear layer, RMS norm and SiLU."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.RMSNorm(outputs, eps=1e-4), nn.SiLU())


def perceptron(inputs: int, width: int, layers: int, outputs: int, scale: float = 1.0) -> nn.Sequential:
    """MLP with `layers` dense layers and a linear output layer; its initial weights are multiplied by `scale`, its
    biases are zero.
    """
    head = nn.Linear(width if layers else inputs, outputs)
    with torch.no_grad():
        head.weight.mul_(scale)
        head.bias.zero_()
    return nn.Sequential(*(dense(width if layer else inputs, width) for layer in range(layers)), head)


class ChannelNorm(nn.Module):
    """RMS norm over the channels of feature maps [N, C, height, width]."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.RMSNorm(channels, eps=1e-4)

    def forward(self, maps: Tensor) -> Tensor:
        """Normalise every pixel of feature maps [N, C, height, width]."""
        return rearrange(self.norm(rearrange(maps, "n c h w -> n h w c")), "n h w c -> n c h w")


class TimeEmbedding(nn.Module):
    """Fourier features of times in [0, 1], with 1/4 to 16 periods over the range, followed by one hidden layer."""

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
    """ReinFlow's learned noise: bounded std per denoising step and action dimension, from observation and time.

    The last layer is initialised to zero, so exploration starts in the middle of [low, high].
    """

    def __init__(self, condition: int, action_size: int, low: float, high: float, width: int = 64):
        super().__init__()
        self.low, self.high = low, max(low, high)  # min_sampling_std may have raised `low` above `high`
        last = nn.Linear(width, action_size)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(nn.Linear(condition + 1, width), nn.SiLU(), last)

    def forward(self, condition: Tensor, times: Tensor) -> Tensor:
        """Return stds [N, K, 1, A] for conditions [N, D] at times [K] or [N, K]; the 1 is for all predicted steps."""
        times = times.expand(len(condition), -1)
        inputs = torch.cat([condition[:, None].expand(-1, times.shape[1], -1), times[..., None]], -1)
        return (self.low + (self.high - self.low) * self.layers(inputs).sigmoid())[:, :, None]


class Members(nn.Module):
    """M MLPs with `depth` hidden layers: [M, N, inputs] -> [M, N, outputs], each member on its own batch.

    activation: silu (smooth) or relu (extrapolates linearly); layer_norm: normalise hidden layers, which limits
    extrapolated predictions far from the data (Ball et al. 2023, arXiv:2302.02948).
    """

    def __init__(
        self,
        members: int,
        inputs: int,
        width: int,
        depth: int,
        outputs: int,
        activation: str = "silu",
        layer_norm: bool = False,
    ):
        super().__init__()
        sizes = chain((inputs,), repeat(width, depth), (outputs,))  # no list: a strange checkpoint has 10^9 layers
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for before, after in pairwise(sizes):
            self.weights.append(nn.Parameter(torch.randn(members, before, after) / before**0.5))
            self.biases.append(nn.Parameter(torch.zeros(members, 1, after)))
        scales = (torch.ones(members, 1, width) for _ in range(depth if layer_norm else 0))
        self.scales = nn.ParameterList(nn.Parameter(scale) for scale in scales)
        # Each is called with inplace=.
        self.activation = {"silu": functional.silu, "relu": functional.relu}[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Run every member on its own batch, x [M, N, inputs] -> [M, N, outputs]."""
        last, inplace = len(self.weights) - 1, not torch.is_grad_enabled()
        # Indexing a ParameterList costs as much as multiplying a small batch: what it holds is read directly.
        layers = zip(self.weights._parameters.values(), self.biases._parameters.values(), strict=True)
        for layer, (weight, bias) in enumerate(layers):
            assert weight is not None and bias is not None
            x = torch.baddbmm(bias, x, weight)
            if layer == last:
                return x
            if len(self.scales):
                x = functional.layer_norm(x, x.shape[-1:]) * self.scales[layer]
            x = self.activation(x, inplace=inplace)  # without gradients, activations may be overwritten
        return x


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    """Polyak-average the parameters of a target network: move them by `rate` of the difference towards `fast`. Buffers
    are not copied.
    """
    for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
        old.lerp_(new, rate)
