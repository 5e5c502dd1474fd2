"""What a recurrent state-space model is made of: categorical latents, a block GRU, two-hot heads, image networks.

After DreamerV3 (Hafner et al. 2023, arXiv:2301.04104). Axes: N rows, D deterministic units, S categoricals of C
classes.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError

BINS = 255
LIMIT = 6.0
"""Two-hot bins reach from symexp(-LIMIT) to symexp(LIMIT), 402 standard deviations. DreamerV3 has 20, for rewards of
any scale; ours are standardised, and bins of 1e8 would turn a probability of 1e-8 into an error."""


def unimixed(logits: Tensor, share: float) -> Tensor:
    """Return log-probabilities [..., C] of the softmax of `logits` mixed with `share` of the uniform distribution."""
    return ((1 - share) * logits.softmax(-1) + share / logits.shape[-1]).log()


def draw(log_probability: Tensor, uniform: Tensor) -> Tensor:
    """Return class indices [...] by the inverse of the cumulative distribution at `uniform` [...]."""
    below = log_probability.detach().exp().cumsum(-1) <= uniform[..., None]
    return below.sum(-1).clamp(max=log_probability.shape[-1] - 1)


def straight_through(log_probability: Tensor, uniform: Tensor) -> Tensor:
    """Return one-hot samples [..., S, C] whose gradient is the probabilities' (Bengio 2013)."""
    probability = log_probability.exp()
    chosen = functional.one_hot(draw(log_probability, uniform), probability.shape[-1])
    return chosen.to(probability.dtype) + probability - probability.detach()


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) [...] of products of S categoricals, given log-probabilities [..., S, C]."""
    return (first.exp() * (first - second)).sum((-2, -1))


def balanced_divergence(posterior: Tensor, prior: Tensor, free_nats: float) -> tuple[Tensor, Tensor]:
    """Return KL(posterior || prior) twice, [...]: its gradient moves only the prior, and only the posterior.

    Below `free_nats` both are constant.
    """
    dynamics = divergence(posterior.detach(), prior).clamp_min(free_nats)
    representation = divergence(posterior, prior.detach()).clamp_min(free_nats)
    return dynamics, representation


def symlog(value: Tensor) -> Tensor:
    """Return sign(x) log(1 + |x|)."""
    return value.sign() * value.abs().log1p()


def symexp(value: Tensor) -> Tensor:
    """Return the inverse of `symlog`."""
    return value.sign() * value.abs().expm1()


def reward_bins() -> Tensor:
    """Return the values [BINS] that a two-hot head tells apart, in ascending order."""
    return symexp(torch.linspace(-LIMIT, LIMIT, BINS))


def two_hot(value: Tensor, bins: Tensor) -> Tensor:
    """Return weights [..., BINS] on the two bins around `value` [...], whose mean is the value."""
    value = value.clamp(bins[0], bins[-1])
    above = torch.searchsorted(bins, value.contiguous()).clamp(1, len(bins) - 1)
    low, high = bins[above - 1], bins[above]
    share = ((value - low) / (high - low))[..., None]
    weights = torch.zeros(*value.shape, len(bins), device=value.device)
    return weights.scatter(-1, above[..., None] - 1, 1 - share).scatter(-1, above[..., None], share)


def two_hot_mean(logits: Tensor, bins: Tensor) -> Tensor:
    """Return the mean [...] of distributions over bins; opposite bins are summed in pairs, so that 0 comes out as 0."""
    weighted = logits.softmax(-1) * bins
    return 0.5 * (weighted + weighted.flip(-1)).sum(-1)


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


class BlockLinear(nn.Module):
    """G linear maps side by side: [N, G, inputs] -> [N, G, outputs]."""

    def __init__(self, blocks: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(blocks, inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(blocks, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map every block."""
        return rearrange(torch.baddbmm(self.bias, rearrange(x, "n g i -> g n i"), self.weight), "g n o -> n g o")


class RecurrentCore(nn.Module):
    """The recurrent part: deterministic state [N, D] by a block GRU, prior and posterior over stochastic states.

    Each of the G blocks of the GRU sees its own units and the (shared) encoded state, sample and action. Deviation: an
    episode's state begins as a function of the first frame instead of zeros, so that it is known as exactly in a start
    from one frame as it ever is.
    """

    def __init__(
        self, *, deter: int, blocks: int, hidden: int, stochastic: int, classes: int, unimix: float, inputs: int
    ):
        super().__init__()
        if deter % blocks:
            raise ConfigError(f"{deter} deterministic units do not make {blocks} equal blocks.")
        self.blocks, self.stochastic, self.unimix = blocks, stochastic, unimix
        flat, width = stochastic * classes, deter // blocks
        self.begin = perceptron(inputs, hidden, 1, deter)
        self.read_state, self.read_sample = dense(deter, hidden), dense(flat, hidden)
        self.mix_shared = nn.Linear(3 * hidden, deter)
        self.mix_blocks = BlockLinear(blocks, width, width)
        self.mix_norm = nn.RMSNorm(deter, eps=1e-4)
        self.gates = BlockLinear(blocks, width, 3 * width)
        self.prior_head = perceptron(deter, hidden, 1, flat)
        self.posterior_state = nn.Linear(deter, hidden)
        self.posterior_frame = nn.Linear(inputs, hidden, bias=False)
        self.posterior_head = nn.Sequential(nn.RMSNorm(hidden, eps=1e-4), nn.SiLU(), nn.Linear(hidden, flat))

    def start(self, embedding: Tensor) -> Tensor:
        """Return deterministic states [N, D] of episodes whose first frames have `embedding` [N, E]."""
        return self.begin(embedding).tanh()

    def step(self, deter: Tensor, sample: Tensor, action: Tensor) -> Tensor:
        """Return the next state [N, D] after `sample` [N, S * C] and encoded actions [N, hidden]."""
        shared = torch.cat([self.read_state(deter), self.read_sample(sample), action], -1)
        units = rearrange(deter, "n (g u) -> n g u", g=self.blocks)
        mixed = self.mix_shared(shared) + self.mix_blocks(units).flatten(1)
        mixed = rearrange(functional.silu(self.mix_norm(mixed)), "n (g u) -> n g u", g=self.blocks)
        reset, candidate, update = self.gates(mixed).chunk(3, -1)
        update = (update - 1).sigmoid()
        return (update * (reset.sigmoid() * candidate).tanh() + (1 - update) * units).flatten(1)

    def prior(self, deter: Tensor) -> Tensor:
        """Return log-probabilities [N, S, C] of the sample before its frame is seen."""
        logits = self.prior_head(deter)
        return unimixed(rearrange(logits, "n (s c) -> n s c", s=self.stochastic), self.unimix)

    def posterior(self, deter: Tensor, frame: Tensor) -> Tensor:
        """Return log-probabilities [N, S, C] after a frame; `frame` is its embedding through `posterior_frame`."""
        logits = self.posterior_head(self.posterior_state(deter) + frame)
        return unimixed(rearrange(logits, "n (s c) -> n s c", s=self.stochastic), self.unimix)


class ChannelNorm(nn.Module):
    """RMS norm over the channels of maps [N, C, height, width]."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.RMSNorm(channels, eps=1e-4)

    def forward(self, maps: Tensor) -> Tensor:
        """Normalise every pixel."""
        return rearrange(self.norm(rearrange(maps, "n c h w -> n h w c")), "n h w c -> n c h w")


def image_channels(size: tuple[int, ...], depth: int) -> list[int]:
    """Return the channels from the picture down to maps of 4 x 4 pixels: 3, depth, 2 depth, then 4 depth each.

    Raises ConfigError unless the picture is square and its side a power of two from 8 up.
    """
    stages = round(math.log2(size[0])) - 2
    if tuple(size) != (2 ** (stages + 2), 2 ** (stages + 2), 3) or stages < 1:
        raise ConfigError(f"This model reads square pictures whose side is a power of two from 8 up, not {size}.")
    return [3] + [depth * min(2**stage, 4) for stage in range(stages)]


class ImageEncoder(nn.Module):
    """Halves the picture until 4 x 4: uint8 [N, height, width, 3] -> [N, outputs]."""

    def __init__(self, size: Sequence[int], depth: int, outputs: int):
        super().__init__()
        channels = image_channels(tuple(size), depth)
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [nn.Conv2d(before, after, 4, 2, 1), ChannelNorm(after), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Flatten(), dense(16 * channels[-1], outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Encode pictures."""
        return self.layers(rearrange(images, "n h w c -> n c h w").float() / 255 - 0.5)


class ImageDecoder(nn.Module):
    """Doubles 4 x 4 maps up to the picture: [N, inputs] -> [N, height, width, 3] in 0 to 1."""

    def __init__(self, size: Sequence[int], depth: int, inputs: int):
        super().__init__()
        channels = image_channels(tuple(size), depth)[::-1]
        layers: list[nn.Module] = [dense(inputs, 16 * channels[0]), nn.Unflatten(1, (channels[0], 4, 4))]
        for before, after in pairwise(channels):
            layers.append(nn.ConvTranspose2d(before, after, 4, 2, 1))
            layers += [ChannelNorm(after), nn.SiLU()] if after != 3 else [nn.Sigmoid()]
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        """Decode pictures."""
        return rearrange(self.layers(features), "n c h w -> n h w c")
