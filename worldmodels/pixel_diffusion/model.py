"""A diffusion model of the next image, and a readout of everything else (DIAMOND, Alonso et al. 2024,
arXiv:2405.12399).

The next frame of all cameras is drawn by EDM diffusion from noise, given the last frames, actions and the robot's
pose. State vectors, reward, success and uncertainty are read off the frames by a second network, fitted afterwards on
true frames and on frames that the first one imagined. Deviations from DIAMOND: its rewards come from a recurrent
network, ours from a carried state vector and two frames; the pose is an input (Ctrl-World's idea); actions
are continuous; training goes on from own predictions in a share of the rows only; another share starts where the
sampler starts, what is diffused is the change from the last frame, and pixels that hardly change are held (see
`PixelDiffusionConfig` and `PixelDenoiser`). Diffusing whole frames instead, images faded and ignored their actions
after as long.

On `reach_planar`, where nothing is left to chance, states read off after 20 imagined steps err by 0.56 standard
deviations at 64 px (2,000 steps of training), by 0.32 with the pose as an input, and by 0.18 at 32 px with one step of
sampling, which is all that is trained (first_share=1, 4,000 steps). fit.learning_rate=1e-3 suits it.

Axes: N or B rows, K context frames, V elements of all vector fields, A action dimension.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.regression import Regression
from robopolicy.core.sequences import SequenceData
from robopolicy.core.spec import WorldSpec
from worldmodels.data.structure import StateStructure
from worldmodels.images.model import ImageModel, PartStage
from worldmodels.images.reader import FrameReader
from worldmodels.pixel_diffusion.configuration import PixelDiffusionConfig
from worldmodels.pixel_diffusion.networks import PixelDenoiser
from worldmodels.protocol import Context, Imagined, Latent, counters

MEASURED = 2000
"""Changes of pixels are measured over so many steps at most."""


class PixelDiffusionModel(ImageModel[PixelDiffusionConfig]):
    """A `LearnedModel` of the fields of `spec`, images and vectors; make one with `build` or `load_world_model`.

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
        """Return a fresh model of the world of `spec`, and see `ImageModel`."""
        model = super().build(config, spec, episodes, seed)
        data = SequenceData(episodes, tuple(model.reader.images))
        steps = torch.linspace(0, episodes.step_count - 1, min(MEASURED, episodes.step_count)).long()
        model.denoiser.keep_statistics(model.reader.stack(data.cut(steps, 0, 1).frames))
        return model

    def stages(self) -> Mapping[str, tuple[Regression, float]]:
        """First the denoiser, then what is read off its frames."""
        denoiser = PartStage(self.denoiser, self.denoiser_batches, self._pixel_loss)
        return {"denoiser": (denoiser, 1.0), "readout": (self.readout_stage(), 1.0)}

    @property
    def context(self) -> int:
        """Frames of a context that it reads; where there are fewer, the first one is repeated."""
        return self.config.context

    def _pixel_loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"pixels": [N]}, EDM's weighted error of frames; 1 would be a network that has learned nothing."""
        return {"pixels": self.denoiser.losses(**batch, generator=generator)}

    def denoiser_batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield what `PixelDenoiser.losses` takes for ever; `generator` is all the state."""
        reader, config = self.reader, self.config
        data, device = SequenceData(episodes), reader.state_mean.device
        for cut in data.sampler(config.context - 1, 1 + config.unroll, config.batch_size, generator):
            states = reader.vector(cut.frames, slice(-1)).to(device)
            size = *states.shape[:-1], len(reader.structure.free)
            # Poses are off as they will be in imagination, where they come from the readout.
            noise = config.readout.state_noise * torch.randn(size, generator=generator, device=generator.device)
            yield {
                "frames": reader.stack(cut.frames).to(device),
                "actions": reader.standard("action", cut.actions.to(device)),
                "poses": reader.poses(reader.perturbed(states, noise)),
                "valid": cut.valid.to(device),
            }

    def _imagine_frames(self, data: SequenceData, steps: Tensor, generator: torch.Generator) -> Tensor:
        """Return frames [n, 3, height, width, 3] around `steps`, the last two imagined one from the other."""
        reader, past = self.reader, self.config.context
        cut = data.cut(steps, past, 1)
        frames = reader.stack(cut.frames).to(reader.state_mean.device)
        actions = reader.standard("action", cut.actions.to(frames.device))
        poses = reader.poses(reader.vector(cut.frames, slice(None)).to(frames.device))
        # The second frame follows an imagined one, so the readout meets this model's own errors in both.
        for step in range(2):
            noise = torch.randn(len(steps), 3, *reader.size, generator=generator).to(frames.device)
            window = slice(step, step + past)
            new = self.denoiser.next_frame(frames[:, window], actions[:, window], poses[:, step + past - 1], noise)
            # Where no step was recorded, the repeated true frame stays.
            known = cut.valid[:, step + past - 1].to(frames.device)
            frames[known, step + past] = new[known]
        return frames[:, -3:]

    @torch.no_grad()
    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the latent: frames [R, K, height, width, 3], actions [R, K - 1, A] between them in the world's units,
        state [R, V] likewise, the episode's seed and the number of the next step.

        Missing frames repeat the first one, and their actions are zero.
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
        """Advance every row by a frame drawn from its own noise; success is terminal where the spec says so.

        actions: [B, A], in the world's units; the next latent has the shapes that `initial` says.
        """
        actions = actions.to(latent["state"].dtype)
        frame, after, inputs, uncertainty = self._advance(latent, actions)
        moved = {
            "frames": torch.cat([latent["frames"][:, 1:], frame[:, None]], 1),
            "actions": torch.cat([latent["actions"], actions[:, None]], 1)[:, 1:],
            "state": after,
            "seed": latent["seed"],
            "step": latent["step"] + 1,
        }
        return moved, self.reader.imagined(frame, after, inputs, uncertainty)

    def _judge(self, latent: Latent, actions: Tensor) -> tuple[Tensor, Tensor]:
        """See `ImageModel._judge`."""
        return self._advance(latent, actions)[2:]

    def _advance(self, latent: Latent, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the next frames and states, what the heads of reward and success read, and the uncertainty."""
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
        seen = torch.stack([before, frames[:, -1], frame], 1)
        return frame, *reader.read(seen, state, actions)
