"""An action-conditioned latent video diffusion world model of all cameras, with a pose-conditioned memory of frames.

After Ctrl-World (Guo et al. 2025, arXiv:2510.10125), at a size that two CPU cores can train. It has three parts. (1) An
autoencoder of single views, as differences from the camera's mean image. (2) A transformer between convolutions that
denoises the latents of the next frames, all views of a frame together, conditioned on recent and sparse older frames,
each with the robot's pose. (3) A readout that predicts state vectors, reward, success and uncertainty from imagined
frames. Deviations from Ctrl-World (1.5 B parameters, Stable Video Diffusion): trained from scratch. Actions are the
world's own, by adaptive layer norm as in IRASim (Zhu et al. 2024, arXiv:2406.14540) instead of cross-attention. Latents
are predicted as changes from the current frame, so zero output repeats it. Future frames attend only to earlier ones
(causal), so frames can be imagined one by one. A fraction of the training rows is at the sampler's initial noise level
(see `VideoConfig.max_noise_fraction`), so few denoising steps are enough. Pixels keep their value where nothing
changes. Axes: N, B or R rows, K history frames, L frames that the history spans, T or F future frames, C latent
channels, V elements of all vector fields (in `view_batches`: views), A action dimension.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any, Self

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.progress import progress
from robopolicy.core.regression import Regression
from robopolicy.core.sequences import SequenceData
from robopolicy.core.spec import WorldSpec
from robopolicy.nn import edm
from robopolicy.nn.branches import Caching
from worldmodels.configuration import VideoConfig
from worldmodels.data import StateStructure
from worldmodels.images.model import PART, FrameReader, ImageModel, PartStage
from worldmodels.images.networks import to_frames, to_pixels
from worldmodels.protocol import Context, Imagined, Latent, counters, merge_steps
from worldmodels.video.networks import VideoTransformer, ViewAutoencoder
from worldmodels.video.training import DynamicsStage, LatentVideo

BACKGROUND_FRAMES = 2000
"""Largest number of frames that a camera's mean image is averaged over."""


class VideoModel(ImageModel[VideoConfig]):
    """A `LearnedModel` of the fields of `spec`, images and vectors; create it with `build` or `load_world_model`.

    success_bonus: the reward for reaching success; the spec's reward terms are ("progress", "success").
    """

    configuration = VideoConfig
    change_std: Tensor
    caching: Caching | None = None
    """Cache of transformer branches between the steps of a denoising chain; see `with_caching`."""

    def __init__(
        self, config: VideoConfig, spec: WorldSpec, structure: StateStructure, success_bonus: float, seed: int = 0
    ):
        super().__init__(config, spec, structure, success_bonus, seed)
        sizes = config.sizes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fields = config.readout, spec, structure, success_bonus
            head = config.success_head
            self.reader = FrameReader(*fields, depth=sizes.readout, hidden=sizes.hidden, success_head=head)
            shapes = {field.shape for field in self.reader.images.values()}
            if len(shapes) > 1:
                raise ConfigError(
                    f"One autoencoder encodes all cameras, so they need the same size, but have {sorted(shapes)}."
                )
            height, width, _ = next(iter(shapes))
            self.autoencoder = ViewAutoencoder(sizes, len(self.reader.images), height, width, config.precision)
            factor = self.autoencoder.factor
            self.latent = sizes.latent, self.reader.size[0] // factor, width // factor
            self.transformer = VideoTransformer(
                sizes,
                self.latent,
                views=len(self.reader.images),
                history=len(config.history_offsets),
                chunk=config.chunk,
                actions=spec.action.size,
                poses=self.reader.pose_size,
                precision=config.precision,
            )
        self.register_buffer("change_std", torch.ones(sizes.latent))

    @classmethod
    def build(cls, config: VideoConfig, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Return an untrained model of the world of `spec`, with each camera's mean image computed from `episodes`.

        The rest is as in `ImageModel.build`.
        """
        model = super().build(config, spec, episodes, seed)
        for view, key in enumerate(model.reader.images):
            frames = episodes.observation[key]
            indices = torch.linspace(0, len(frames) - 1, min(BACKGROUND_FRAMES, len(frames))).long()
            model.autoencoder.background[view] = to_pixels(frames[indices]).mean(0)
        return model

    def stages(self) -> Mapping[str, tuple[Regression, float]]:
        """Training stages: the autoencoder, the dynamics of its latents, the readout of imagined frames."""
        config, autoencoder = self.config, PartStage(self.autoencoder, self.view_batches, self._view_loss)
        return {
            "autoencoder": (autoencoder, config.autoencoder_step_fraction),
            "dynamics": (DynamicsStage(self.transformer, config, self.change_std, self.encode_episodes), 1.0),
            "readout": (self.readout_stage(), config.readout_step_fraction),
        }

    @property
    def context(self) -> int:
        """Number of observed frames that the model is conditioned on: those of the history, and one before the first
        action.
        """
        return self.config.history_span + 1

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the transformer's residual branches, in the order of their computation."""
        return self.transformer.block_names

    @property
    def calls(self) -> int:
        """Number of transformer calls per chain."""
        return edm.calls(self.config.edm)

    @property
    def chunk(self) -> int:
        """Maximum number of steps that one chain imagines."""
        return self.config.chunk

    def with_caching(self, caching: Caching | None) -> Self:
        """Return a model with the same weights whose chains use the cache plan `caching`; raises the errors of
        `Cacheable`.
        """
        if caching is not None:
            caching.check(self.block_names, self.calls)
        # A shallow copy: both models share their modules, hence their weights.
        model = copy(self)
        model.caching = caching
        return model

    def view_batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield {"views": [N, V, 3, height, width]}, pixels of random frames, all randomness from `generator`."""
        cameras = [episodes.observation[key] for key in self.reader.images]
        size = (self.config.view_batch_size,)
        while True:
            indices = torch.randint(len(cameras[0]), size, generator=generator, device=generator.device).cpu()
            views = torch.stack([frames[indices] for frames in cameras], 1)
            yield {"views": to_pixels(views.to(self.change_std.device))}

    def _view_loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the terms of the autoencoder's loss, {"pixels", "divergence" (KL)}, each [N]."""
        losses = self.autoencoder.losses(batch["views"], self.config.motion_weight, generator)
        return {**losses, "divergence": self.config.kl_weight * losses["divergence"]}

    @torch.no_grad()
    def encode_episodes(self, episodes: Episodes) -> LatentVideo:
        """Encode all frames of `episodes`; sets the statistics that normalise latents and their changes."""
        reader, coder = self.reader, self.autoencoder
        # With mean 0 and deviation 1 `encode` returns raw latents, from which the statistics are taken.
        coder.mean.zero_()
        coder.std.fill_(1.0)
        latents = self.frame_latents(episodes)
        coder.mean.copy_(latents.mean((0, 2, 3)))
        coder.std.copy_(latents.std((0, 2, 3), correction=0).clamp_min(1e-6))
        latents = (latents - coder.mean.cpu()[:, None, None]) / coder.std.cpu()[:, None, None]
        # An action stands at the frame that it led to. An episode has one frame more than steps, so frames of later
        # episodes are further on; at first frames zero stays.
        shifted = torch.zeros(len(latents), episodes.actions.shape[1])
        shifted[torch.arange(episodes.step_count) + episodes.episode_of_step + 1] = episodes.actions
        video = LatentVideo.of(episodes, latents, self.frame_poses(episodes), reader.standard("action", shifted))
        steps = (video.first < torch.arange(len(latents))).nonzero()[:, 0]
        change = torch.zeros(len(coder.mean), dtype=torch.float64)
        for part in steps.split(2048):
            change += (latents[part] - latents[part - 1]).square().double().sum((0, 2, 3))
        # The root mean square change of each channel, summed in parts to save memory and in double precision because
        # the sums are long.
        each = len(steps) * latents[0, 0].numel()
        self.change_std.copy_((change / each).sqrt().clamp_min(1e-6))
        return video

    @torch.no_grad()
    def frame_latents(self, episodes: Episodes) -> Tensor:
        """Return the latents [frames, C, height, width] of all frames of `episodes`, with the present statistics."""
        frames, parts = [episodes.observation[key] for key in self.reader.images], []
        with progress("Encoding frames", len(frames[0])) as advance:
            for part in torch.arange(len(frames[0])).split(PART):
                stacked = torch.cat([view[part] for view in frames], -3)
                parts.append(self._encode(stacked.to(self.change_std.device)).cpu())
                advance(len(part))
        return torch.cat(parts)

    def frame_poses(self, episodes: Episodes) -> Tensor:
        """Return the standardised robot states [frames, P] of all frames of `episodes`."""
        frames = {key: value[None] for key, value in episodes.observation.items()}
        return self.reader.poses(self.reader.vector(frames, slice(None))[0])

    def _imagine_frames(self, data: SequenceData, steps: Tensor, generator: torch.Generator) -> Tensor:
        """Return frames [n, 3, height, width, 3] before, at and after `steps`, as imagined, to train the readout.

        The imagined chunk starts up to chunk - 1 steps earlier at random, so that every position in a chunk occurs.
        """
        span, length = self.config.history_span, self.config.chunk
        back = torch.randint(length, (len(steps),), generator=generator)
        back = back.minimum(steps - data.episodes.starts[data.episodes.episode_of_step[steps]])
        sequences = data.cut(steps - back, span, length)
        stacked = self.reader.stack(sequences.frames).to(self.change_std.device)
        states = self.reader.vector(sequences.frames, slice(1, span + 1))
        latent = self._latent(stacked[:, : span + 1], states, sequences.actions[:, :span], steps.numpy(), brief=True)
        new, _ = self._shown(latent, self._predict(latent, sequences.actions[:, span:].to(stacked.device)))
        window = torch.cat([stacked[:, span - 1 : span + 1], new], 1)
        return window[torch.arange(len(steps))[:, None], back[:, None] + torch.arange(3)]

    def _judge(self, latent: Latent, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the reward and success heads' inputs for a step under actions [B, A], and its uncertainty [B]."""
        frames, _ = self._shown(latent, self._predict(latent, actions[:, None]))
        return self.reader.read(torch.cat([latent["frames"], frames], 1), latent["state"], actions)[1:]

    @torch.no_grad()
    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the latent of episodes that start in `context`; missing frames repeat the first one, with zero
        actions.

        History, up to the start of the current chunk: latents [R, L, C, height, width], states [R, L, V] and the
        actions that led to them [R, L, A], both in the world's units. The chunk so far: phase [R], the number of its
        frames imagined, their states [R, F, V] (since) and actions [R, F, A] (moves). The current step: state [R, V],
        frames [R, 2, height, width, 3], the last two, and decoded [R, height, width, 3], the image decoded where pixels
        last changed. Then the episode's seed and the number of the next step.
        """
        frames, actions, frame_count = self.reader.begin(context, self.context)
        stacked, states = self.reader.stack(frames), self.reader.vector(frames, slice(1, None))
        return self._latent(stacked.to(self.change_std.device), states, actions, seeds, frame_count)

    def _latent(
        self,
        frames: Tensor,
        states: Tensor,
        actions: Tensor,
        seeds: np.ndarray,
        known: int = 0,
        brief: bool = False,
    ) -> Latent:
        """Return the latent after frames [R, L + 1, height, width, 3], of which the last `known` differ (0: all).

        states, actions: [R, L, ...], of the last L frames, and the actions before them; brief: for one chunk only,
        which reads some of the frames, so that the others are not encoded.
        """
        device = self.change_std.device
        length = self.config.history_span
        chunk = self.config.chunk
        # A repeated frame is encoded once, and its latent copied.
        place = torch.arange(length, device=device).clamp_min(length - min(known or length, length))
        encoded_places = torch.tensor(self._slots, device=device) if brief else place.unique()
        flat = rearrange(frames[:, 1:][:, encoded_places], "r l h w c -> (r l) h w c")
        encoded = self._encode(flat).unflatten(0, (len(frames), len(encoded_places)))
        latents = encoded.new_zeros(len(frames), length, *self.latent)
        latents[:, encoded_places] = encoded
        latents = latents if brief else latents[:, place]
        states = states.to(device)
        actions = actions.to(device)
        places = counters(seeds, device)
        return {
            "latents": latents,
            "states": states,
            "actions": actions,
            "since": states.new_zeros(len(states), chunk, states.shape[2]),
            "moves": actions.new_zeros(len(actions), chunk, actions.shape[2]),
            "phase": torch.zeros_like(places["step"]),
            "state": states[:, -1],
            "frames": frames[:, -2:],
            "decoded": self._decode(latents[:, -1]),
            **places,
        }

    @torch.no_grad()
    def imagine(self, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
        """Imagine one step: sample the next frame of every row, each with its own noise seed.

        Success terminates the episode when the spec says so.

        actions: [B, A], in the world's units; the next latent has the shapes of that from `initial`.
        """
        latent, outcomes = self.generate(latent, actions[:, None])
        return latent, outcomes[0]

    @torch.no_grad()
    def generate(self, latent: Latent, actions: Tensor) -> tuple[Latent, list[Imagined]]:
        """Advance every row by T frames under actions [B, T, A] in the world's units: the same frames as `imagine` one
        by one, predicted together up to the end of a chunk.
        """
        places = latent["phase"].unique()
        if len(places) > 1:  # rows at the same place of their chunks go together
            rows = [(latent["phase"] == place).nonzero()[:, 0] for place in places]
            order = torch.cat(rows).argsort()
            parts = [
                self.generate({name: value[part] for name, value in latent.items()}, actions[part]) for part in rows
            ]
            next_latent = {name: torch.cat([part[name] for part, _ in parts])[order] for name in latent}
            steps = zip(*(results for _, results in parts), strict=True)
            return next_latent, [merge_steps(step, lambda values: torch.cat(values)[order]) for step in steps]
        outcomes: list[Imagined] = []
        actions = actions.to(latent["state"].dtype)
        while actions.shape[1]:
            count = min(actions.shape[1], self.config.chunk - int(latent["phase"][0]))
            latent, new_outcomes = self._advance(latent, actions[:, :count])
            actions, outcomes = actions[:, count:], outcomes + new_outcomes
        return latent, outcomes

    def _advance(self, latent: Latent, actions: Tensor) -> tuple[Latent, list[Imagined]]:
        """Advance rows that share a position in their chunks by T frames under actions [B, T, A], within the chunk.

        Frames of a chunk attend only to earlier ones, so known frames are reproduced unchanged and errors do not
        accumulate within a chunk. Rows that reach the end of their chunks start new ones.
        """
        count, begin = actions.shape[1], int(latent["phase"][0])
        moves = latent["moves"].clone()
        since = latent["since"].clone()
        state = latent["state"]
        outcomes = []
        moves[:, begin : begin + count] = actions
        latents = self._predict(latent, moves[:, : begin + count])
        frames, decoded = self._shown(latent, latents[:, begin:])
        window = torch.cat([latent["frames"], frames], 1)
        for step in range(count):
            state, *inputs = self.reader.read(window[:, step : step + 3], state, actions[:, step])
            outcomes.append(self.reader.imagined(frames[:, step], state, *inputs))
            since[:, begin + step] = state
        next_latent = {**latent, "since": since, "moves": moves, "phase": latent["phase"] + count, "state": state}
        if begin + count == self.config.chunk:
            new = {"latents": latents, "states": since, "actions": moves}
            next_latent |= {
                name: torch.cat([latent[name], value], 1)[:, -self.config.history_span :] for name, value in new.items()
            }
            next_latent |= {name: torch.zeros_like(next_latent[name]) for name in ("since", "moves", "phase")}
        return {**next_latent, "frames": window[:, -2:], "decoded": decoded, "step": latent["step"] + count}, outcomes

    def _predict(self, latent: Latent, actions: Tensor) -> Tensor:
        """Return the latents [B, F, C, height, width] of a chunk's first frames under actions [B, F, A]."""
        config, reader = self.config, self.reader
        slots = self._slots
        history, poses = latent["latents"][:, slots], reader.poses(latent["states"][:, slots])
        past_actions = reader.standard("action", latent["actions"][:, slots])
        memory = self.transformer.remember(history, past_actions, poses, history.new_zeros(history.shape[:2]))
        present, begin = history[:, -1], latent["step"] - latent["phase"]
        network = self.transformer.network(memory, present, reader.standard("action", actions), caching=self.caching)
        # Every frame has the noise of its own step, whether it is predicted alone or within a chunk.
        frames = [{**latent, "step": begin + step} for step in range(actions.shape[1])]
        noise = torch.stack([reader.noise(frame, self.latent) for frame in frames], 1)
        change = edm.sample(network, config.temperature * noise, config.edm, scaled=False)
        return present[:, None] + change * self.change_std[:, None, None]

    def _shown(self, latent: Latent, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Decode latents [B, T, C, height, width] to frames [B, T, height, width, 3] that follow the current frame.

        A pixel keeps its value until its decoded colour has changed by more than `change_threshold`. Also returns the
        reference of that comparison [B, height, width, 3]: the colour decoded when each pixel last changed.
        """
        decoded = self._decode(latents.flatten(0, 1)).unflatten(0, latents.shape[:2])
        frame = latent["frames"][:, -1]
        reference = latent["decoded"]
        frames = []
        for new in decoded.unbind(1):
            # As int: differences of uint8 would wrap around.
            changed_mask = (new.int() - reference.int()).abs().amax(
                -1, keepdim=True
            ) >= 255 * self.config.change_threshold
            frame, reference = torch.where(changed_mask, new, frame), torch.where(changed_mask, new, reference)
            frames.append(frame)
        return torch.stack(frames, 1), reference

    @property
    def _slots(self) -> list[int]:
        """Indices of the K history frames among the last L."""
        return [self.config.history_span - 1 - age for age in self.config.history_offsets]

    def _encode(self, frames: Tensor) -> Tensor:
        """Return latents [N, C, height, width] of frames with all views stacked, uint8 [N, height, width, 3]."""
        views = rearrange(to_pixels(frames), "n c (v h) w -> n v c h w", v=len(self.reader.images))
        return torch.cat([self.autoencoder.encode(part) for part in views.split(PART)])

    def _decode(self, latents: Tensor) -> Tensor:
        """Return frames with all views stacked, uint8 [N, height, width, 3], of latents [N, C, height, width]."""
        pixels = torch.cat([self.autoencoder.decode(part) for part in latents.split(PART)])
        return to_frames(rearrange(pixels, "n v c h w -> n c (v h) w"))
