"""Convolutional encoder and decoder of images (DreamerV3, Hafner et al. 2023, arXiv:2301.04104)."""

import math
from collections.abc import Sequence
from itertools import pairwise

from einops import rearrange
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.nn.blocks import ChannelNorm, dense


def image_channels(size: tuple[int, ...], depth: int) -> list[int]:
    """Return the channels from the image down to maps of 4 x 4 pixels: 3, depth, 2 depth, then 4 depth each.

    Raises ConfigError unless the image is square and its side a power of two from 8 up.
    """
    stages = round(math.log2(size[0])) - 2
    if tuple(size) != (2 ** (stages + 2), 2 ** (stages + 2), 3) or stages < 1:
        raise ConfigError(
            f"This model reads square images whose side is a power of two from 8 up, not {list(size[:2])}: record with "
            "world.image_size=64, or use worldmodel.kind=pixel_diffusion, which takes others."
        )
    return [3] + [depth * min(2**stage, 4) for stage in range(stages)]


class ImageEncoder(nn.Module):
    """Halves the image until 4 x 4: uint8 [N, height, width, 3] -> [N, outputs]."""

    def __init__(self, size: Sequence[int], depth: int, outputs: int):
        super().__init__()
        channels = image_channels(tuple(size), depth)
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [nn.Conv2d(before, after, 4, 2, 1), ChannelNorm(after), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Flatten(), dense(16 * channels[-1], outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Encode images: uint8 [N, height, width, 3] -> [N, outputs]."""
        return self.layers(rearrange(images, "n h w c -> n c h w").float() / 255 - 0.5)


class ImageDecoder(nn.Module):
    """Doubles 4 x 4 maps up to the image: [N, inputs] -> [N, height, width, 3] in 0 to 1."""

    def __init__(self, size: Sequence[int], depth: int, inputs: int):
        super().__init__()
        channels = image_channels(tuple(size), depth)[::-1]
        layers: list[nn.Module] = [dense(inputs, 16 * channels[0]), nn.Unflatten(1, (channels[0], 4, 4))]
        for before, after in pairwise(channels):
            layers.append(nn.ConvTranspose2d(before, after, 4, 2, 1))
            layers += [ChannelNorm(after), nn.SiLU()] if after != 3 else [nn.Sigmoid()]
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        """Decode images: [N, inputs] -> [N, height, width, 3] in 0 to 1."""
        return rearrange(self.layers(features), "n c h w -> n h w c")
