"""Draws frames from latents for policies of pixels: the first frame, changed where something moved.

Reconstructions from a frame's features alone are coarse (they train an encoder). A policy of pixels needs frames like
those that it was trained on: everything that has not changed is taken from the episode's first frame, and a small
network (Ronneberger et al. 2015, arXiv:1505.04597) draws the rest, from the first frame and the latents of then and
now. It is trained on imagined latents, so that it draws what the model believes; no gradient reaches the model.
"""

from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.spec import Field
from robopolicy.nn.encoders import module_name

CHANNELS = 16
"""Channels at half the image's size; twice as many at a quarter."""
GRID = 8
"""Side of the grid on which the latents are laid out."""
CHANGED = 0.05
"""Smallest change of a pixel, of its range, from which it weighs more in the loss."""
CHANGED_WEIGHT = 10.0
"""Weight of changed pixels relative to others."""


class CameraDrawing(nn.Module):
    """Draws the images of one camera, [N, 3, height, width] in 0 to 1; height and width are multiples of 4.

    size: elements S of a latent.
    """

    def __init__(self, size: int):
        super().__init__()
        super().__init__()
        wide = 2 * CHANNELS
        self.narrow = nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1)
        self.narrower = nn.Conv2d(CHANNELS, wide, 3, stride=2, padding=1)
        self.layout = nn.Sequential(nn.Linear(2 * size, 128), nn.SiLU(), nn.Linear(128, wide * GRID * GRID))
        self.mix = nn.Conv2d(2 * wide, wide, 3, padding=1)
        self.rise = nn.Conv2d(wide + CHANNELS, CHANNELS, 3, padding=1)
        self.last = nn.Conv2d(CHANNELS + 3, 4, 3, padding=1)

    def forward(self, first: Tensor, latents: Tensor) -> Tensor:
        """Return images [N, 3, height, width] after first frames of that shape, given the standardised latents of the
        first and the present frame, [N, 2 S].
        """
        half = functional.silu(self.narrow(first))
        quarter = functional.silu(self.narrower(half))
        layout = rearrange(self.layout(latents), "n (c h w) -> n c h w", h=GRID, w=GRID)
        layout = functional.interpolate(layout, quarter.shape[-2:], mode="bilinear")
        deep = functional.silu(self.mix(torch.cat([quarter, layout], 1)))
        deep = functional.interpolate(deep, half.shape[-2:], mode="nearest")
        deep = functional.silu(self.rise(torch.cat([deep, half], 1)))
        deep = functional.interpolate(deep, first.shape[-2:], mode="nearest")
        output = self.last(torch.cat([deep, first], 1))
        change = output[:, 3:].sigmoid()
        return change * output[:, :3].sigmoid() + (1 - change) * first


class FrameDrawing(nn.Module):
    """Draws the images of several cameras; images: their fields by key; size: elements S of a latent."""

    def __init__(self, images: Mapping[str, Field], size: int, seed: int = 0):
        super().__init__()
        self.images = dict(images)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.cameras = nn.ModuleDict({module_name(key): CameraDrawing(size) for key in images})

    def losses(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"frames": [N]}: the squared error of pixels in 0 to 1, a mean in which changed pixels weigh more.

        batch: latents, standardised, [N, 2 S]; first/KEY and frame/KEY, uint8 [N, height, width, 3].
        """
        errors: list[Tensor] = []
        for key in self.images:
            first, target = to_planes(batch[f"first/{key}"]), to_planes(batch[f"frame/{key}"])
            image = self.cameras[module_name(key)](first, batch["latents"])
            changed = (target - first).abs().amax(1, keepdim=True) > CHANGED
            weight = torch.where(changed, CHANGED_WEIGHT, 1.0)
            error = (weight * (image - target).square()).flatten(1).sum(1)
            errors.append(error / (3 * weight.flatten(1).sum(1)))
        return {"frames": torch.stack(errors).mean(0)}

    def draw(self, key: str, first: Tensor, latents: Tensor) -> Tensor:
        """Return images uint8 [N, height, width, 3] of a camera after first frames of that shape, given standardised
        latents of the first and the present frame, [N, 2 S].
        """
        image = self.cameras[module_name(key)](to_planes(first), latents)
        return rearrange((255 * image).round().to(torch.uint8), "n c h w -> n h w c")


def to_planes(images: Tensor) -> Tensor:
    """Return images uint8 [N, height, width, 3] as [N, 3, height, width] in 0 to 1."""
    return rearrange(images, "n h w c -> n c h w").float() / 255
