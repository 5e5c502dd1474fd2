"""A diffusion model of the next picture, and a readout of everything else (DIAMOND, Alonso et al. 2024,
arXiv:2405.12399).

The next frame of all cameras is drawn by EDM diffusion from noise, given the last frames and actions. State vectors,
reward, success and uncertainty are read off the frames by a second network, fitted afterwards on true frames and on
frames that the first one imagined. Deviations from DIAMOND: its rewards come from a recurrent network, ours from a
carried state vector and two frames; actions are continuous; training goes on from own predictions in a share of the
rows only; another share starts where the sampler starts (see `PixelDiffusionConfig` and `PixelDenoiser`). Whether a
model minds its actions shows in the examination's shuffled column; fit.learning_rate=1e-3 suits it. (A dot on 16 px
after 300 steps: 5 dB between own and shuffled actions at 1e-3 and first_share .5, nothing at 3e-3 and .25. Pushing a
cube on 32 px with a grid of 8: nothing after 700 steps, pictures fade; only the states read off mind the actions.)
Axes: N or B rows, K context frames, V elements of all vector fields, A action dimension.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.progress import progress
from robopolicy.core.spec import IMAGE_PREFIX, WorldSpec
from robopolicy.core.structured import from_plain, to_plain
from worldmodels.heads import calibrated_threshold, quantiles_of
from worldmodels.imagination import context_at
from worldmodels.pixel_networks import FrameReadout, PixelDenoiser, PixelDiffusionConfig, to_pixels
from worldmodels.protocol import Context, Imagined, Latent, Regression, draws_of
from worldmodels.rssm_dynamics import BOUND
from worldmodels.rssm_heads import THUMBNAIL, LatentSteps
from worldmodels.sequences import SequenceData, Sequences
from worldmodels.statistics import read_statistics
from worldmodels.structure import StateStructure, register_structure, structure_in, structure_of
from worldmodels.transitions import PROGRESS, SUCCESS, success_bonus

CALIBRATION_STEPS = 2000
"""Thresholds are set on so many imagined steps at most."""

PART = 128
"""Frames are imagined for training in parts of so many rows."""


class PixelDiffusionModel(nn.Module):
    """A `LearnedModel` of the fields of `spec`, pictures and vectors; make one with `build` or `load_world_model`.

    success_bonus: the reward for reaching success; the spec's reward terms are ("progress", "success").
    """

    state_mean: Tensor
    state_std: Tensor
    action_mean: Tensor
    action_std: Tensor
    change_std: Tensor
    reward_mean: Tensor
    reward_std: Tensor
    success_threshold: Tensor
    uncertainty_quantiles: Tensor

    def __init__(
        self,
        config: PixelDiffusionConfig,
        spec: WorldSpec,
        structure: StateStructure,
        success_bonus: float,
        seed: int = 0,
    ):
        super().__init__()
        self.config, self.success_bonus = config, success_bonus
        self._spec = replace(spec, rewards=(PROGRESS, SUCCESS), history=1)
        self.pictures = {key: item for key, item in spec.observation.items() if key.startswith(IMAGE_PREFIX)}
        self.vectors = {key: item for key, item in spec.observation.items() if key not in self.pictures}
        self.size = _stacked_size(spec)
        register_structure(self, structure)
        elements, actions = sum(field.size for field in self.vectors.values()), spec.action.size
        free = len(structure.free)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.denoiser = PixelDenoiser(config, *self.size, actions)
            guessed = free + 3 * THUMBNAIL**2
            self.readout = FrameReadout(
                config, *self.size, elements=elements, actions=actions, free=free, guessed=guessed
            )
        for name, size in (("state", elements), ("action", actions), ("change", elements), ("reward", 1)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))
        self.register_buffer("success_threshold", torch.zeros(()))
        self.register_buffer("uncertainty_quantiles", torch.zeros(101))

    @classmethod
    def build(cls, config: PixelDiffusionConfig, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Return a fresh model of the world of `spec`, with structure and statistics read off `episodes`.

        Raises ConfigError where there is no picture, DataError where the data's fields are not the world's,
        NonFiniteError where the data is not finite.
        """
        structure, statistics = read_statistics(spec, episodes)
        model = cls(config, spec, structure, success_bonus(episodes), seed)
        for name, (mean, std) in statistics.items():
            getattr(model, f"{name}_mean").copy_(mean)
            getattr(model, f"{name}_std").copy_(std)
        model.readout.heads.change_scale.copy_(model.state_std / model.change_std)
        return model

    def description(self) -> dict[str, Any]:
        """Return what `restore` needs besides spec and weights."""
        return {"config": to_plain(self.config), "success_bonus": self.success_bonus}

    @classmethod
    def restore(cls, description: Mapping[str, Any], spec: WorldSpec, weights: Mapping[str, Tensor]) -> Self:
        """Return a model into which `weights` can be loaded."""
        config = from_plain(PixelDiffusionConfig, description["config"])
        return cls(config, spec, structure_in(weights), description["success_bonus"])

    def stages(self) -> Mapping[str, tuple[Regression, float]]:
        """First the denoiser, then what is read off its frames."""
        return {
            "denoiser": (PartStage(self.denoiser, self.denoiser_batches, self._pixel_loss), 1.0),
            "readout": (PartStage(self.readout, self.readout_batches, self.readout.losses), 1.0),
        }

    @property
    def context(self) -> int:
        """How many frames it likes to begin with."""
        return self.config.context

    @property
    def spec(self) -> WorldSpec:
        """The world that is imitated, with the reward terms that are predicted."""
        return self._spec

    @property
    def structure(self) -> StateStructure:
        """What the elements of the state are."""
        return structure_of(self)

    def _pixel_loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"pixels": [N]}, EDM's weighted error of frames; 1 would be a network that has learned nothing."""
        return {"pixels": self.denoiser.losses(batch["frames"], batch["actions"], batch["valid"], generator)}

    def denoiser_batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield what `PixelDenoiser.losses` takes for ever; `generator` is all the state."""
        data, config = SequenceData(episodes, tuple(self.pictures)), self.config
        for cut in data.sampler(config.context - 1, 1 + config.unroll, config.batch_size, generator):
            frames, actions = self._stack(cut.frames), self._standard("action", cut.actions)
            device = self.state_mean.device
            yield {"frames": frames.to(device), "actions": actions.to(device), "valid": cut.valid.to(device)}

    def readout_batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield what `FrameReadout.losses` takes for ever; `generator` is all the state.

        A share of the steps are successful, and a share shows frames that the denoiser imagined.
        """
        data, config = SequenceData(episodes), self.config
        assert episodes.step_success is not None
        won = episodes.step_success.nonzero()[:, 0]
        dreamed, frames = self._dream(data, won)
        dreamed_won = episodes.step_success[dreamed].nonzero()[:, 0]
        count = config.readout_batch_size
        dreams = round(config.dreamed_share * count)
        while True:
            size = count, 1 + len(self.structure.free)
            draws = torch.rand(size, generator=generator, device=generator.device, dtype=torch.float64).cpu()
            noise = torch.randn(size, generator=generator, device=generator.device).cpu()[:, 1:]
            chosen = _choose(draws[:dreams, 0], len(dreamed), dreamed_won, config.positive_share)
            true = _choose(draws[dreams:, 0], len(data), won, config.positive_share)
            cut = data.cut(torch.cat([dreamed[chosen], true]), 1, 1)
            seen = self._stack(cut.frames)
            seen[:dreams] = frames[chosen]
            yield self._readout_batch(cut, seen, config.state_noise * draws[:, 1:].float() * noise)

    def _readout_batch(self, cut: Sequences, seen: Tensor, noise: Tensor) -> dict[str, Any]:
        """Return a batch of the steps in `cut`, with frames `seen` [N, 3, ...] and states off by `noise` [N, free]."""
        device, structure = self.state_mean.device, self.structure
        state, after = self._vector(cut.frames, 1).to(device), self._vector(cut.frames, 2).to(device)
        given, free = state.clone(), structure.free
        given[:, free] += noise.to(device) * self.change_std[free]
        given = structure.complete(given)
        seen = seen.to(device)
        coarse = functional.adaptive_avg_pool2d(to_pixels(seen[:, 2]), THUMBNAIL).flatten(1)
        change = ((after - state) / self.change_std)[:, free].clamp(-BOUND, BOUND)
        empty = torch.zeros(len(state), 0, device=device)
        steps = LatentSteps(
            empty,
            empty,
            self._standard("state", state),
            self._standard("state", after),
            self._standard("action", cut.actions[:, -1].to(device)),
            torch.cat([change, coarse], -1),
            ((cut.reward[:, -1].to(device) - self.reward_mean) / self.reward_std),
            cut.success[:, -1].to(device),
        )
        mending = ((after - given) / self.change_std)[:, free].clamp(-BOUND, BOUND)
        return {"frames": seen, "steps": steps, "given": self._standard("state", given), "mending": mending}

    @torch.no_grad()
    def _dream(self, data: SequenceData, won: Tensor) -> tuple[Tensor, Tensor]:
        """Return steps [D] and their frames [D, 3, height, width, 3], the last two imagined one from the other."""
        past, generator = self.config.context, torch.Generator().manual_seed(0)
        draws = torch.rand(self.config.dreams, generator=generator, dtype=torch.float64)
        steps, found = _choose(draws, len(data), won, self.config.positive_share), []
        with progress("Imagining frames for the readout", len(steps)) as advance:
            for part in steps.split(PART):
                cut = data.cut(part, past, 1)
                frames = self._stack(cut.frames).to(self.state_mean.device)
                actions = self._standard("action", cut.actions.to(frames.device))
                for step in range(2):
                    noise = torch.randn(len(part), 3, *self.size, generator=generator).to(frames.device)
                    window = slice(step, step + past)
                    new = self.denoiser.next_frame(frames[:, window], actions[:, window], noise)
                    known = cut.valid[:, step + past - 1].to(frames.device)
                    frames[known, step + past] = new[known]
                found.append(frames[:, -3:].cpu())
                advance(len(part))
        return steps, torch.cat(found)

    @torch.no_grad()
    def calibrate(self, episodes: Episodes) -> None:
        """Set the threshold of success and the quantiles of the uncertainty on imagined steps of held-out episodes."""
        order = torch.randperm(episodes.step_count, generator=torch.Generator().manual_seed(0))
        steps, logits, doubt = order[:CALIBRATION_STEPS].sort().values, [], []
        assert episodes.step_success is not None
        for part in steps.split(PART):
            latent = self.initial(context_at(episodes, part, self.context), part.numpy())
            _, _, inputs, uncertainty = self._advance(latent, episodes.actions[part].to(self.state_mean.device))
            logits.append(self.readout.heads.success(inputs))
            doubt.append(uncertainty)
        self.success_threshold.copy_(calibrated_threshold(torch.cat(logits), episodes.step_success[steps]))
        self.uncertainty_quantiles.copy_(quantiles_of(torch.cat(doubt)))

    @torch.no_grad()
    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the latent: frames [R, K, height, width, 3], actions [R, K - 1, A] between them in the world's units,
        state [R, V] likewise, the episode's seed and the number of the next step.

        Missing frames repeat the first one, and their actions are zero.
        """
        device, rows, past = self.state_mean.device, len(seeds), self.config.context
        arrays = {key: np.ascontiguousarray(context.observation[key][:, -past:]) for key in self._spec.observation}
        given = {key: torch.from_numpy(value) for key, value in arrays.items()}
        frames = self._stack(given)
        count = frames.shape[1]
        frames = torch.cat([frames[:, :1].expand(-1, past - count, -1, -1, -1), frames], 1)
        actions = torch.zeros(rows, past - 1, self._spec.action.size)
        if count > 1:
            between = np.asarray(context.actions, dtype=np.float32)[:, 1 - count :]
            actions[:, past - count :] = torch.from_numpy(between)
        return {
            "frames": frames.to(device),
            "actions": actions.to(device),
            "state": self._vector(given, -1).to(device),
            "seed": torch.from_numpy(np.asarray(seeds, dtype=np.int64)).to(device),
            "step": torch.zeros(rows, dtype=torch.int64, device=device),
        }

    @torch.no_grad()
    def imagine(self, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
        """Advance every row by a frame drawn from its own noise; success is terminal where the spec says so."""
        actions = actions.to(latent["state"].dtype)
        frame, after, inputs, doubt = self._advance(latent, actions)
        success = self.readout.heads.success(inputs) > self.success_threshold
        rewards = {
            PROGRESS: self.reward_mean + self.reward_std * self.readout.heads.rewards(inputs),
            SUCCESS: self.success_bonus * success.to(after.dtype),
        }
        imagined = Imagined(self._observation(after, frame), rewards, success, torch.zeros_like(success), doubt)
        moved = {
            "frames": torch.cat([latent["frames"][:, 1:], frame[:, None]], 1),
            "actions": torch.cat([latent["actions"], actions[:, None]], 1)[:, 1:],
            "state": after,
            "seed": latent["seed"],
            "step": latent["step"] + 1,
        }
        return moved, imagined

    def _advance(self, latent: Latent, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the next frames and states, what the heads of reward and success read, and the uncertainty."""
        frames, state, structure = latent["frames"], latent["state"], self.structure
        recent = self._standard("action", torch.cat([latent["actions"], actions[:, None].to(state.dtype)], 1))
        frame = self.denoiser.next_frame(frames, recent, self._draws(latent))
        readout, given = self.readout, self._standard("state", state)
        past = readout.summary(frames[:, max(0, frames.shape[1] - 2)], frames[:, -1])
        summary = readout.summary(frames[:, -1], frame)
        after, free = state.clone(), structure.free
        after[:, free] += readout.changes(summary, given, recent[:, -1]) * self.change_std[free]
        after = structure.complete(after)
        inputs = readout.heads.inputs(summary, given, self._standard("state", after))
        return frame, after, inputs, readout.heads.disagreement(past, given, recent[:, -1])

    def _draws(self, latent: Latent) -> Tensor:
        """Return standard normal noise [B, 3, height, width], a function of each row's seed and step alone."""
        draws = torch.from_numpy(draws_of(latent, 3 * self.size[0] * self.size[1]).astype(np.float32))
        noise = torch.special.ndtri(draws.to(latent["state"].device).clamp(1e-6, 1 - 1e-6))
        return noise.reshape(-1, 3, *self.size)

    def _stack(self, frames: Mapping[str, Tensor]) -> Tensor:
        """Return the cameras' frames, key -> [N, T, *shape], as one, stacked in height."""
        return torch.cat([frames[key] for key in self.pictures], -3)

    def _vector(self, frames: Mapping[str, Tensor], index: int) -> Tensor:
        """Return the vector fields of frame `index`, key -> [N, T, *shape], one after the other, [N, V]."""
        rows = len(next(iter(frames.values())))
        return torch.cat([torch.zeros(rows, 0), *(frames[key][:, index].flatten(1).float() for key in self.vectors)], 1)

    def _observation(self, state: Tensor, frame: Tensor) -> dict[str, Tensor]:
        """Return the observations of states [B, V] and stacked frames, key -> [B, *shape]."""
        parts = state.split([field.size for field in self.vectors.values()], -1)
        pairs = zip(self.vectors.items(), parts, strict=True)
        observation = {key: part.reshape(len(state), *field.shape) for (key, field), part in pairs}
        views = frame.split([field.shape[0] for field in self.pictures.values()], -3)
        observation |= dict(zip(self.pictures, views, strict=True))
        return {key: observation[key] for key in self._spec.observation}

    def _standard(self, name: str, value: Tensor) -> Tensor:
        mean, std = getattr(self, f"{name}_mean"), getattr(self, f"{name}_std")
        return ((value - mean.to(value.device)) / std.to(value.device)).clamp(-BOUND, BOUND)


Batches = Callable[[Episodes, torch.Generator], Iterator[dict[str, Any]]]


Losses = Callable[[Mapping[str, Any], torch.Generator], dict[str, Tensor]]


class PartStage(nn.Module):
    """Fits `part` of a model on the batches that `make` yields, by `losses`; a `Regression`."""

    def __init__(self, part: nn.Module, make: Batches, losses: Losses):
        super().__init__()
        self.part, self._make, self._losses = part, make, losses

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield training batches for ever."""
        return self._make(episodes, generator)

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the parts of the loss, each [N]."""
        return self._losses(batch, generator)


def _choose(draws: Tensor, count: int, won: Tensor, share: float) -> Tensor:
    """Return indices below `count` for uniforms [N]; the first `share` of them point to successes `won`, if any."""
    index = (draws * count).long()
    successes = round(share * len(draws)) if len(won) else 0
    index[:successes] = won[(draws[:successes] * len(won)).long()]
    return index


def _stacked_size(spec: WorldSpec) -> tuple[int, int]:
    """Return height and width of all cameras' frames, one below the other."""
    shapes = [field.shape for key, field in spec.observation.items() if key.startswith(IMAGE_PREFIX)]
    if not shapes:
        raise ConfigError(f"World '{spec.name}' shows no pictures: add world.cameras, or use worldmodel.kind=ensemble.")
    if len({shape[1] for shape in shapes}) > 1:
        raise ConfigError(f"Cameras are stacked in height, so they need one width, not {shapes}.")
    return sum(shape[0] for shape in shapes), shapes[0][1]
