"""What a pixel diffusion model is made of: a U-Net that denoises the next frame.

After DIAMOND (Alonso et al. 2024, arXiv:2405.12399), on diffusers' U-Net blocks. Axes: N rows, K context frames, A
action dimension. Frames are uint8 [..., height, width, 3], pixels float [..., 3, height, width] in -1 to 1; several
cameras are one frame, stacked in height.
"""

import math
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError
from robopolicy.nn import edm
from robopolicy.nn.precision import autocast
from worldmodels.images.readout import to_frames, to_pixels
from worldmodels.pixel_diffusion.configuration import PixelDiffusionConfig

MAPS = 16
"""Channels on which actions and pose are drawn."""


class PixelDenoiser(nn.Module):
    """Denoises the next frame, given context, actions and pose: images are input, the others steer every block's
    group norm and are drawn on maps beside the images.

    Deviations from DIAMOND: squares of pixels become channels, so that the finest maps have `grid` pixels a side (a
    CPU is fast on few pixels with many channels); what is diffused is the change from the last frame, in units of
    `change_std` (of which EDM's sigma_data is the standard deviation), so that a network whose output is zero repeats
    the frame; the robot's pose in the last frame is an input (as in Ctrl-World), since images alone show it coarsely.
    """

    change_std: Tensor

    def __init__(self, config: PixelDiffusionConfig, height: int, width: int, actions: int, poses: int):
        from diffusers.models.unets.unet_2d import UNet2DModel  # seconds to import: only who builds one pays

        super().__init__()
        self.config, sizes = config, config.networks
        self.patch = max(1, width // sizes.grid) if sizes.grid else 1
        coarsest = self.patch * 2 ** (len(sizes.channels) - 1)
        if height % coarsest or width % coarsest:
            raise ConfigError(
                f"This U-Net halves images down to squares of {coarsest} pixels, {height} x {width} do not divide: "
                f"use another camera size, grid or number of channels."
            )
        count, area = len(sizes.channels), 3 * self.patch**2
        self.unet = UNet2DModel(
            in_channels=area * (config.context + 1) + MAPS,
            out_channels=area,
            block_out_channels=sizes.channels,
            layers_per_block=sizes.layers,
            down_block_types=("DownBlock2D",) * count,
            up_block_types=("UpBlock2D",) * count,
            add_attention=False,
            norm_num_groups=8,
            resnet_time_scale_shift="scale_shift",
            class_embed_type="identity",
        )
        nn.init.zeros_(self.unet.conv_out.weight)
        self.register_buffer("change_std", torch.ones(()))
        features, inputs = 4 * sizes.channels[0], config.context * actions + poses
        self.steer = nn.Sequential(nn.Linear(inputs, features), nn.SiLU(), nn.Linear(features, features))
        self.drawn = MAPS, height // self.patch, width // self.patch
        self.draw = nn.Sequential(
            nn.Linear(inputs, features),
            nn.SiLU(),
            nn.Linear(features, math.prod(self.drawn)),
            nn.Unflatten(1, self.drawn),
        )

    def forward(self, noisy: Tensor, label: Tensor, maps: Tensor, steering: Tensor) -> Tensor:
        """Return EDM's F [N, 3, height, width] of scaled `noisy` changes at noise labels [N].

        maps, steering: what `conditions` makes of the past.
        """
        x = torch.cat([maps, functional.pixel_unshuffle(noisy, self.patch)], 1)
        with autocast(self.config.precision, x.device):
            # diffusers embeds time steps of up to 1000; EDM's label log(sigma) / 4 spans about one unit.
            found = self.unet(x, 100 * label, class_labels=steering).sample
        return functional.pixel_shuffle(found.float(), self.patch)

    def conditions(self, context: Tensor, actions: Tensor, pose: Tensor) -> dict[str, Tensor]:
        """Return the conditions of all denoising steps: maps [N, M, grid, grid] and steering [N, S].

        context: pixels [N, K, 3, height, width]; actions: [N, K, A], the last leads to the new frame; pose: [N, P], in
        the last frame; both are standardised.
        """
        inputs = torch.cat([actions.flatten(1), pose], 1)
        squares = functional.pixel_unshuffle(rearrange(context, "n k c h w -> n (k c) h w"), self.patch)
        return {"maps": torch.cat([squares, self.draw(inputs)], 1), "steering": self.steer(inputs)}

    def keep_statistics(self, frames: Tensor) -> None:
        """Keep how much pixels change from one to the next of frames [N, 2, height, width, 3]."""
        before, after = to_pixels(frames).unbind(1)
        change = (after - before).square().mean().sqrt()
        # A floor for data in which hardly anything moves: dividing by less would train on the noise of pixels.
        self.change_std.copy_((change / self.config.edm.sigma_data).clamp_min(1e-3))

    def losses(
        self, frames: Tensor, actions: Tensor, poses: Tensor, valid: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return EDM's error [M], averaged over the frames that count.

        frames: [M, K + U + 1, height, width, 3]; actions: [M, K + U, A] and poses: [M, K + U, P], standardised, the
        poses those in which the actions are taken; valid: [M, K + U] bool. The first unroll_share of the rows go on for
        U more steps from what was just predicted.
        """
        config, pixels = self.config, to_pixels(frames)
        past, rows = config.context, len(frames)
        context = pixels[:, :past]
        if config.context_noise:
            drawn = torch.randn(context.shape, generator=generator, device=generator.device).to(context.device)
            context = context + config.context_noise * drawn
        total, known = torch.zeros(rows, device=pixels.device), torch.zeros(rows, device=pixels.device)
        for step in range(1 + config.unroll):
            count = rows if step == 0 else round(config.unroll_share * rows)
            if not count:
                break
            context = context[:count]
            clean = (pixels[:count, past + step] - context[:, -1]) / self.change_std
            shares = config.first_share, generator, config.temperature
            noisy, sigma, _ = edm.training_noise_with_starts(clean, config.edm, *shares)
            conditions = self.conditions(context, actions[:count, step : step + past], poses[:count, step + past - 1])
            denoised = edm.denoise(partial(self, **conditions), noisy, sigma, config.edm)
            error = edm.weighted_error(denoised, clean, sigma, config.edm).mean((1, 2, 3))
            counts = valid[:count, past + step - 1].float()
            # Rows that do not go on add nothing to the sums.
            total = total + functional.pad(error * counts, (0, rows - count))
            known = known + functional.pad(counts, (0, rows - count))
            # No gradient through time, and rounded to 8 bits: the context is what imagination will read.
            new = self._shown(context[:, -1], denoised.detach())
            context = torch.cat([context[:, 1:], to_pixels(new)[:, None]], 1)
        return total * rows / known.sum().clamp_min(1)

    @torch.no_grad()
    def next_frame(self, frames: Tensor, actions: Tensor, pose: Tensor, noise: Tensor) -> Tensor:
        """Return the imagined next frame [N, height, width, 3] after frames [N, K, height, width, 3].

        actions: [N, K, A] and pose: [N, P], standardised; noise: standard normal [N, 3, height, width].
        """
        pixels = to_pixels(frames)
        network = partial(self, **self.conditions(pixels, actions, pose))
        return self._shown(
            pixels[:, -1], edm.sample(network, self.config.temperature * noise, self.config.edm, scaled=False)
        )

    def _shown(self, last: Tensor, change: Tensor) -> Tensor:
        """Return the frames [N, height, width, 3] that a change of pixels makes of the last ones, noise held back."""
        change = self.change_std * change
        # Pixels lie in -1 to 1 and the threshold in 0 to 1: hence the factor 2.
        moved = change.abs().amax(1, keepdim=True) >= 2 * self.config.change_threshold
        return to_frames(torch.where(moved, last + change, last))
