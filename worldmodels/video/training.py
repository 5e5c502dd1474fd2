"""Training of the latent video dynamics: noisy history, the future frames of one chunk, own predictions.

Sources: Ctrl-World (Guo et al. 2025, arXiv:2510.10125) for noise on history frames, masked actions and collapsed
history. Sword's dynamic latent bootstrapping for the cache: the model's own predictions of training frames are stored,
and a growing fraction of the rows uses them as history instead of the true frames. Axes: M rows, L frames of a
subsequence, K history frames, F future frames, A action dimension, P pose elements.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes
from robopolicy.core.exchange import rows_of_all
from robopolicy.nn import edm
from worldmodels.configuration import ACTION_DROPOUT, VideoConfig
from worldmodels.video.networks import VideoTransformer


@dataclass(frozen=True)
class LatentVideo:
    """Latents of all frames of all episodes, concatenated.

    latents: [frames, C, height, width]; poses: [frames, P]; actions: [frames, A], standardised, the action before the
    frame (zero in the world's units at an episode's start); first, last: [frames], frame indices of its episode's ends.
    """

    latents: Tensor
    poses: Tensor
    actions: Tensor
    first: Tensor
    last: Tensor

    @staticmethod
    def of(episodes: Episodes, latents: Tensor, poses: Tensor, actions: Tensor) -> "LatentVideo":
        """Return the frames of `episodes`.

        latents: [frames, C, height, width]; poses: [frames, P]; actions: [frames, A]; see the class.
        """
        count = episodes.lengths + 1
        first = torch.repeat_interleave(episodes.frame_starts, count)
        return LatentVideo(latents, poses, actions, first, first + torch.repeat_interleave(episodes.lengths, count))


@dataclass(frozen=True)
class Subsequence:
    """History and future of M current frames.

    history, history_poses, history_actions: [M, K, ...], the current frame last; before an episode its first frame
    repeats, without an action; future, actions: [M, F, ...]; valid: [M, F] bool, inside of the episode; places: index
    [M, K + F] of the frames.
    """

    history: Tensor
    history_poses: Tensor
    history_actions: Tensor
    future: Tensor
    actions: Tensor
    valid: Tensor
    places: Tensor

    def to(self, device: torch.device) -> "Subsequence":
        """Move every tensor to a device."""
        return Subsequence(*(value.to(device) for value in self.__dict__.values()))


def subsequence_at(video: LatentVideo, present: Tensor, config: VideoConfig) -> Subsequence:
    """Return history and future of the frames `present` [M]; history frames are spaced by `config.history_offsets`."""
    ages = torch.tensor(config.history_offsets)
    history = (present[:, None] - ages).maximum(video.first[present][:, None])
    indices = present[:, None] + torch.arange(1, 1 + config.chunk)
    future = indices.minimum(video.last[present][:, None])
    return Subsequence(
        video.latents[history],
        video.poses[history],
        video.actions[history],
        video.latents[future],
        video.actions[future],
        indices == future,
        torch.cat([history, future], 1),
    )


class DynamicsStage(nn.Module):
    """Fits the transformer of a latent video model; a `Regression`.

    encode: episodes -> `LatentVideo`, which sets the statistics of latents; change_std: [C], of one step's change. The
    cache of own predictions and the update counter are buffers, so that an interrupted run resumes exactly.
    """

    cache: Tensor
    updates: Tensor

    def __init__(
        self,
        transformer: VideoTransformer,
        config: VideoConfig,
        change_std: Tensor,
        encode: Callable[[Episodes], LatentVideo],
    ):
        super().__init__()
        self.transformer = transformer
        self.config = config
        self._encode = encode
        self._change_std, self._still = change_std, torch.zeros(1, 1)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(0))

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield {"subsequence": Subsequence} indefinitely; the only state is `generator`."""
        video = self._encode(episodes)
        self._still = video.actions[:1].to(self._change_std.device)
        if self.config.bootstrap_fraction:
            # As large as the encoded dataset, hence in half precision.
            self.cache = video.latents.half()
        return self._batches(video, len(video.latents), generator)

    def _batches(self, video: LatentVideo, count: int, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        present = (video.last > torch.arange(count)).nonzero()[:, 0]
        while True:
            draws = torch.randint(len(present), (self.config.batch_size,), generator=generator, device=generator.device)
            yield {"subsequence": subsequence_at(video, present[draws.cpu()], self.config).to(self._change_std.device)}

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"latents": [M]}, EDM's weighted error of future frames; repeating the frame has an error of 1 one
        step ahead.

        The history is degraded first, as in imagination: own predictions, collapse, noise. The future is predicted as a
        change from the degraded current frame, so the network learns to correct its errors.
        """
        subsequence, config = batch["subsequence"], self.config
        rows = len(subsequence.future)

        # Drawn on the generator's device and then moved, so that the numbers do not depend on where the model is.
        def draw(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=generator.device).to(subsequence.future.device)

        history, actions, poses = self._degraded(subsequence, draw)
        reach = torch.full(history.shape[1:2], config.memory_noise, device=history.device)
        # Every frame draws its own deviation up to its reach, and `remember` is told it. Imagination says 0.
        reach[-config.recent :] = config.present_noise
        noise = reach * draw(*history.shape[:2])
        history_noise = torch.randn(history.shape, generator=generator, device=generator.device).to(history.device)
        history = history + noise[..., None, None, None] * history_noise
        present, scale = history[:, -1], self._change_std[:, None, None]
        change = (subsequence.future - present[:, None]) / scale
        shares = config.max_noise_fraction, generator, config.temperature
        noisy, sigma, first = edm.training_noise_with_starts(change, config.edm, *shares)
        action_mask = draw(*subsequence.valid.shape) >= ACTION_DROPOUT
        memory = self.transformer.remember(history, actions, poses, noise)
        network = self.transformer.network(memory, present, subsequence.actions, action_mask)
        denoised = edm.denoise(network, noisy, sigma, config.edm)
        if self.config.bootstrap_fraction and self.training:
            self._keep(subsequence, present[:, None] + denoised.detach() * scale, first)
        error = edm.weighted_error(denoised, change, sigma, config.edm).mean((2, 3, 4))
        # Summed over a row's valid frames, and scaled so that the mean over rows is the mean over all valid frames.
        return {"latents": (error * subsequence.valid).sum(1) * rows / subsequence.valid.sum().clamp_min(1)}

    def _degraded(self, subsequence: Subsequence, draw: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the history frames with their actions and poses; in some rows the frames are replaced by predictions
        or collapsed to the current frame.
        """
        config, history = self.config, subsequence.history
        count = history.shape[1]
        draws, collapsed = draw(len(history)), draw(len(history)) < config.repeat_present_fraction
        if config.bootstrap_fraction:
            # Early predictions are hardly better than noise: their share grows with the updates.
            share = config.bootstrap_fraction * min(1.0, float(self.updates) / config.bootstrap_steps)
            predictions = self.cache[subsequence.places[:, :count].to(self.cache.device)].to(history)
            history = torch.where((draws < share)[:, None, None, None, None], predictions, history)
        last = collapsed[:, None, None]
        actions = torch.where(last, self._still, subsequence.history_actions)
        poses = torch.where(last, subsequence.history_poses[:, -1:], subsequence.history_poses)
        return torch.where(last[..., None, None], history[:, -1:], history), actions, poses

    @torch.no_grad()
    def _keep(self, subsequence: Subsequence, predicted: Tensor, first: Tensor) -> None:
        """Store predictions [M, F, ...] of rows at the sampler's initial noise level in the cache, and count the
        update.
        """
        # Rows at other noise levels saw the truth through the noise: their predictions are better than imagined ones.
        places = subsequence.places[:, -predicted.shape[1] :]
        # Those of all data-parallel processes, so that their caches stay equal.
        chosen = (rows_of_all(each[first]) for each in (places, subsequence.valid, predicted))
        for place, valid, frames in zip(*chosen, strict=True):
            self.cache[place[valid].to(self.cache.device)] = frames[valid].to(self.cache)
        self.updates += 1
