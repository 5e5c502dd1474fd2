"""Networks of images: vectors, reward and success read off frames in a row, and a convolutional encoder and decoder.

The latter two are DreamerV3's (Hafner et al. 2023, arXiv:2301.04104).
Axes: N rows, A action dimension, V elements of standardised vectors. Frames are uint8 [..., height, width, 3], pixels
float [..., 3, height, width] in -1 to 1; several cameras are one frame, stacked in height.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError
from robopolicy.nn.blocks import ChannelNorm, dense, perceptron
from worldmodels.heads.latent import THUMBNAIL, LatentHeads


def to_pixels(frames: Tensor) -> Tensor:
    """Return pixels of frames: uint8 [..., height, width, 3] -> float [..., 3, height, width] in -1 to 1."""
    return rearrange(frames, "... h w c -> ... c h w").float() / 127.5 - 1


def to_frames(pixels: Tensor) -> Tensor:
    """Return frames of pixels, rounded to 8 bits: [..., 3, height, width] -> uint8 [..., height, width, 3]."""
    levels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return rearrange(levels, "... c h w -> ... h w c")


class FrameReadout(nn.Module):
    """Predicts vectors, reward, success and uncertainty from two consecutive frames, the previous state and the action.

    The predicted state change combines the carried state and the images, so images correct a drifting state.
    """

    def __init__(
        self,
        height: int,
        width: int,
        *,
        depth: int,
        hidden: int,
        members: int,
        elements: int,
        actions: int,
        free: int,
        success_head: str = "contrastive",
    ):
        super().__init__()
        stages = max(1, round(math.log2(min(height, width))) - 2)
        channels = [6] + [depth * min(2**stage, 4) for stage in range(stages)]
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [nn.Conv2d(before, after, 4, 2, 1), ChannelNorm(after), nn.SiLU()]
        area = (height >> stages) * (width >> stages)
        self.encoder = nn.Sequential(*layers, nn.Flatten(), dense(area * channels[-1], hidden))
        predicted_size = free + 3 * THUMBNAIL**2
        # Last weights of zero: an untrained readout says that nothing moves.
        self.change = perceptron(hidden + elements + actions, hidden, 2, free, scale=0.0) if free else None
        about = {"elements": elements, "actions": actions, "guessed": predicted_size}
        self.heads = LatentHeads(hidden, 2, members, **about, success_head=success_head)

    def summary(self, before: Tensor, after: Tensor) -> Tensor:
        """Return features [N, F] of consecutive frames [N, height, width, 3]."""
        return self.encoder(torch.cat([to_pixels(before), to_pixels(after)], 1))

    def changes(self, summary: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """Return the change [N, free] of the free elements, in standard deviations of a step's change."""
        if self.change is None:
            return state.new_zeros(len(state), 0)
        return self.change(torch.cat([summary, state, action], -1))

    def losses(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"reward", "success", "disagreement"} and, where there are vectors, {"change", "potential"}, each [N].

        batch: frames [N, 3, height, width, 3] around the step; steps: `LatentSteps` whose summaries are not computed
        yet; given: perturbed states [N, V]; mending: [N, free], the change that corrects them.
        """
        frames, steps = batch["frames"], batch["steps"]
        before, after = self.summary(frames[:, 0], frames[:, 1]), self.summary(frames[:, 1], frames[:, 2])
        losses = self.heads.training_losses(replace(steps, before=before, after=after), generator)
        if self.change is None:
            return losses
        error = self.changes(after, batch["given"], steps.action) - batch["mending"]
        return {"change": functional.smooth_l1_loss(error, torch.zeros_like(error), reduction="none").sum(-1), **losses}


def image_channels(size: tuple[int, ...], depth: int) -> list[int]:
    """Return the channels from the image down to maps of 4 x 4 pixels: 3, depth, 2 depth, then 4 depth each.

    Raises ConfigError unless the image is square and its side a power of two from 8 up.
    """
    stages = round(math.log2(size[0])) - 2
    if tuple(size) != (2 ** (stages + 2), 2 ** (stages + 2), 3) or stages < 1:
        raise ConfigError(
            f"This model needs square images whose side is a power of two from 8, not {list(size[:2])}: record with "
            "world.image_size=64, or use worldmodel.kind=pixel_diffusion, which supports other sizes."
        )
    return [3] + [depth * min(2**stage, 4) for stage in range(stages)]


class ImageEncoder(nn.Module):
    """Halves the image down to 4 x 4: uint8 [N, height, width, 3] -> [N, outputs]."""

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
