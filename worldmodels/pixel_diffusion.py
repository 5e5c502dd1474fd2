"""Pixel diffusion world model (DIAMOND, Alonso et al. 2024, arXiv:2405.12399): diffuses the next image, and predicts
the rest from it.

The next frame of all cameras is drawn by EDM diffusion from noise, given the last frames, actions and the robot's
pose, by a U-Net of diffusers' blocks. State vectors, reward, success and uncertainty are read off the frames by a
second network, fitted afterwards on true frames and on frames that the first one imagined. Deviations from DIAMOND: its
rewards come from a recurrent network, ours from a carried state vector and two frames; the pose is an input
(Ctrl-World's idea); actions are continuous; training goes on from own predictions in a share of the rows only; another
share starts where the sampler starts, what is diffused is the change from the last frame, and pixels that hardly change
are held (see `PixelDiffusionConfig` and `PixelDenoiser`). Diffusing whole frames instead, images faded and ignored
their actions after as long.

On the deterministic `reach_planar`, states predicted after 20 imagined steps have an error of 0.56 standard deviations
at 64 px (2,000 training steps) and 0.32 with the pose as an input. At 32 px with one sampling step, the only one
trained, it is 0.18 (max_noise_fraction=1, 4,000 steps). fit.learning_rate=1e-3 works well.

Axes: N or B rows, K context frames, V elements of all vector fields, A action dimension. Frames are uint8 [..., height,
width, 3], pixels float [..., 3, height, width] in -1 to 1; several cameras are one frame, stacked in height.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.regression import Regression
from robopolicy.core.sequences import SequenceData
from robopolicy.core.spec import WorldSpec
from robopolicy.nn import edm
from robopolicy.nn.precision import autocast
from worldmodels.configuration import UNROLL_SHARE, PixelDiffusionConfig
from worldmodels.data import StateStructure
from worldmodels.images.model import FrameReader, ImageModel, PartStage
from worldmodels.images.networks import to_frames, to_pixels
from worldmodels.protocol import Context, Imagined, Latent, counters

MAPS = 16
"""Number of channels for maps of actions and pose."""


class PixelDenoiser(nn.Module):
    """Denoises the next frame, conditioned on context, actions and pose. Images are input channels; actions and pose
    modulate every block's group norm and are also concatenated to the images as maps.

    Deviations from DIAMOND: squares of pixels become channels, so the finest maps have `grid` pixels per side (a CPU is
    fast on few pixels with many channels). The change from the last frame is diffused in units of `change_std` (of
    which EDM's sigma_data is the standard deviation), so zero output repeats the frame. The robot's pose in the last
    frame is an input (as in Ctrl-World), because images alone show it only coarsely.
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
                f"This U-Net halves images down to squares of {coarsest} pixels, which does not divide {height} x "
                f"{width}: use another camera size, grid or number of channels."
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

        maps, steering: outputs of `conditions` for the past.
        """
        x = torch.cat([maps, functional.pixel_unshuffle(noisy, self.patch)], 1)
        with autocast(self.config.precision, x.device):
            # diffusers embeds time steps of up to 1000; EDM's label log(sigma) / 4 spans about one unit.
            output = self.unet(x, 100 * label, class_labels=steering).sample
        return functional.pixel_shuffle(output.float(), self.patch)

    def conditions(self, context: Tensor, actions: Tensor, pose: Tensor) -> dict[str, Tensor]:
        """Return the conditions of all denoising steps: maps [N, M, grid, grid], and vectors [N, S] that modulate the
        group norms.

        context: pixels [N, K, 3, height, width]; actions: [N, K, A], the last one produces the new frame; pose: [N, P],
        in the last frame; both are standardised.
        """
        inputs = torch.cat([actions.flatten(1), pose], 1)
        squares = functional.pixel_unshuffle(rearrange(context, "n k c h w -> n (k c) h w"), self.patch)
        return {"maps": torch.cat([squares, self.draw(inputs)], 1), "steering": self.steer(inputs)}

    def keep_statistics(self, frames: Tensor) -> None:
        """Measure and store the pixels' change between consecutive frames [N, 2, height, width, 3]."""
        before, after = to_pixels(frames).unbind(1)
        change = (after - before).square().mean().sqrt()
        # A floor for data in which hardly anything moves: dividing by less would train on the noise of pixels.
        self.change_std.copy_((change / self.config.edm.sigma_data).clamp_min(1e-3))

    def losses(
        self, frames: Tensor, actions: Tensor, poses: Tensor, valid: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return EDM's error [M], averaged over the valid frames.

        frames: [M, K + U + 1, height, width, 3]; actions: [M, K + U, A] and poses: [M, K + U, P], standardised, the
        poses those in which the actions are taken; valid: [M, K + U] bool. The first UNROLL_SHARE of the rows go on for
        U more steps from what was just predicted.
        """
        config, pixels = self.config, to_pixels(frames)
        past, rows = config.context, len(frames)
        context = pixels[:, :past]
        if config.context_noise:
            context_noise = torch.randn(context.shape, generator=generator, device=generator.device).to(context.device)
            context = context + config.context_noise * context_noise
        total, valid_count = torch.zeros(rows, device=pixels.device), torch.zeros(rows, device=pixels.device)
        for step in range(1 + config.unroll):
            count = rows if step == 0 else round(UNROLL_SHARE * rows)
            if not count:
                break
            context = context[:count]
            clean = (pixels[:count, past + step] - context[:, -1]) / self.change_std
            shares = config.max_noise_fraction, generator, config.temperature
            noisy, sigma, _ = edm.training_noise_with_starts(clean, config.edm, *shares)
            conditions = self.conditions(context, actions[:count, step : step + past], poses[:count, step + past - 1])
            denoised = edm.denoise(partial(self, **conditions), noisy, sigma, config.edm)
            error = edm.weighted_error(denoised, clean, sigma, config.edm).mean((1, 2, 3))
            counts = valid[:count, past + step - 1].float()
            # Rows that do not go on add nothing to the sums.
            total = total + functional.pad(error * counts, (0, rows - count))
            valid_count = valid_count + functional.pad(counts, (0, rows - count))
            # No gradient through time, and rounded to 8 bits: the context is what imagination will read.
            new = self._shown(context[:, -1], denoised.detach())
            context = torch.cat([context[:, 1:], to_pixels(new)[:, None]], 1)
        return total * rows / valid_count.sum().clamp_min(1)

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
        """Return the frames [N, height, width, 3] that result from a pixel change of the last ones, with noise
        suppressed.
        """
        change = self.change_std * change
        # Pixels lie in -1 to 1 and the threshold in 0 to 1: hence the factor 2.
        changed_mask = change.abs().amax(1, keepdim=True) >= 2 * self.config.change_threshold
        return to_frames(torch.where(changed_mask, last + change, last))


MEASURED = 2000
"""Maximum number of steps used to measure changes of pixels."""


class PixelDiffusionModel(ImageModel[PixelDiffusionConfig]):
    """A `LearnedModel` of the fields of `spec`, images and vectors; create it with `build` or `load_world_model`.

    success_bonus: the reward for reaching success; the spec's reward terms are ("progress", "success").
    """

    configuration = PixelDiffusionConfig

    def __init__(
        self,
        config: PixelDiffusionConfig,
        spec: WorldSpec,
        structure: StateStructure,
        success_bonus: float,
        seed: int = 0,
    ):
        super().__init__(config, spec, structure, success_bonus, seed)
        sizes = config.networks
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fields = config.readout, spec, structure, success_bonus
            head = config.success_head
            self.reader = FrameReader(*fields, depth=sizes.readout, hidden=sizes.hidden, success_head=head)
            self.denoiser = PixelDenoiser(config, *self.reader.size, spec.action.size, self.reader.pose_size)

    @classmethod
    def build(cls, config: PixelDiffusionConfig, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Build an untrained model of the world of `spec`; see `ImageModel`."""
        model = super().build(config, spec, episodes, seed)
        data = SequenceData(episodes, tuple(model.reader.images))
        steps = torch.linspace(0, episodes.step_count - 1, min(MEASURED, episodes.step_count)).long()
        model.denoiser.keep_statistics(model.reader.stack(data.cut(steps, 0, 1).frames))
        return model

    def stages(self) -> Mapping[str, tuple[Regression, float]]:
        """First the denoiser, then the readout on its frames."""
        denoiser = PartStage(self.denoiser, self.denoiser_batches, self._pixel_loss)
        return {"denoiser": (denoiser, 1.0), "readout": (self.readout_stage(), 1.0)}

    @property
    def context(self) -> int:
        """Number of context frames that the model reads; when there are fewer, the first one is repeated."""
        return self.config.context

    def _pixel_loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"pixels": [N]}, EDM's weighted error of frames; an untrained network has an error of 1."""
        return {"pixels": self.denoiser.losses(**batch, generator=generator)}

    def denoiser_batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield batches for `PixelDenoiser.losses` indefinitely; the only state is `generator`."""
        reader, config = self.reader, self.config
        data, device = SequenceData(episodes), reader.state_mean.device
        for sequences in data.sampler(config.context - 1, 1 + config.unroll, config.batch_size, generator):
            states = reader.vector(sequences.frames, slice(-1)).to(device)
            size = *states.shape[:-1], len(reader.structure.free)
            # Poses are off as they will be in imagination, where they come from the readout.
            noise = torch.randn(size, generator=generator, device=generator.device)
            yield {
                "frames": reader.stack(sequences.frames).to(device),
                "actions": reader.standard("action", sequences.actions.to(device)),
                "poses": reader.poses(reader.perturbed(states, noise)),
                "valid": sequences.valid.to(device),
            }

    def _imagine_frames(self, data: SequenceData, steps: Tensor, generator: torch.Generator) -> Tensor:
        """Return frames [n, 3, height, width, 3] around `steps`, the last two imagined one after the other."""
        reader, past = self.reader, self.config.context
        sequences = data.cut(steps, past, 1)
        frames = reader.stack(sequences.frames).to(reader.state_mean.device)
        actions = reader.standard("action", sequences.actions.to(frames.device))
        poses = reader.poses(reader.vector(sequences.frames, slice(None)).to(frames.device))
        # The second frame follows an imagined one, so the readout meets this model's own errors in both.
        for step in range(2):
            noise = torch.randn(len(steps), 3, *reader.size, generator=generator).to(frames.device)
            window = slice(step, step + past)
            new = self.denoiser.next_frame(frames[:, window], actions[:, window], poses[:, step + past - 1], noise)
            # Where no step was recorded, the repeated true frame stays.
            valid_rows = sequences.valid[:, step + past - 1].to(frames.device)
            frames[valid_rows, step + past] = new[valid_rows]
        return frames[:, -3:]

    @torch.no_grad()
    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the latent: frames [R, K, height, width, 3], actions [R, K - 1, A] between them in the world's units,
        state [R, V] likewise, the episode's seed and the number of the next step.

        Missing frames repeat the first one, with zero actions.
        """
        device = self.reader.state_mean.device
        frames, actions, _ = self.reader.begin(context, self.context)
        return {
            "frames": self.reader.stack(frames).to(device),
            "actions": actions.to(device),
            "state": self.reader.vector(frames, -1).to(device),
            **counters(seeds, self.reader.state_mean.device),
        }

    @torch.no_grad()
    def imagine(self, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
        """Advance every row by one frame sampled from its own noise; success terminates the episode if the spec ends
        episodes at success.

        actions: [B, A], in the world's units; the next latent has the shapes of that from `initial`.
        """
        actions = actions.to(latent["state"].dtype)
        frame, after, inputs, uncertainty = self._advance(latent, actions)
        next_latent = {
            "frames": torch.cat([latent["frames"][:, 1:], frame[:, None]], 1),
            "actions": torch.cat([latent["actions"], actions[:, None]], 1)[:, 1:],
            "state": after,
            "seed": latent["seed"],
            "step": latent["step"] + 1,
        }
        return next_latent, self.reader.imagined(frame, after, inputs, uncertainty)

    def _judge(self, latent: Latent, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Implement `ImageModel._judge`."""
        return self._advance(latent, actions)[2:]

    def _advance(self, latent: Latent, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the next frames and states, the inputs of the reward and success heads, and the uncertainty."""
        frames = latent["frames"]
        state = latent["state"]
        reader = self.reader
        actions = actions.to(state.dtype)
        recent = reader.standard("action", torch.cat([latent["actions"], actions[:, None]], 1))
        if self.config.temperature:
            noise = reader.noise(latent, (3, *reader.size))
        else:
            noise = state.new_zeros(len(state), 3, *reader.size)
        frame = self.denoiser.next_frame(frames, recent, reader.poses(state), noise)
        # With a context of one frame, that frame stands for its own predecessor.
        before = frames[:, max(0, frames.shape[1] - 2)]
        window = torch.stack([before, frames[:, -1], frame], 1)
        return frame, *reader.read(window, state, actions)
