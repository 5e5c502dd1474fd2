"""Subsequences of recorded episodes, for training sequence models and starting imagined rollouts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.returns import progress_reward


@dataclass(frozen=True)
class Sequences:
    """M subsequences of T actions with T + 1 frames.

    frames: key -> [M, T + 1, *shape]; actions: [M, T, A]; reward: [M, T], without the success term; success,
    terminated: [M, T] bool, after the action; valid: [M, T] bool, the action belongs to the episode. Before an episode
    its first frame is repeated and actions are zero; after it its last frame is repeated.
    """

    frames: Mapping[str, Tensor]
    actions: Tensor
    reward: Tensor
    success: Tensor
    terminated: Tensor
    valid: Tensor

    def to(self, device: torch.device | str) -> "Sequences":
        """Move every tensor to a device."""
        frames = {key: value.to(device) for key, value in self.frames.items()}
        others_moved = {name: value.to(device) for name, value in self.__dict__.items() if name != "frames"}
        return Sequences(frames, **others_moved)


class SequenceData:
    """Extracts subsequences from `episodes` with the observation `keys` (None: all).

    Raises DataError when reward, success or final frames are missing.
    """

    def __init__(self, episodes: Episodes, keys: Sequence[str] | None = None):
        self.episodes, self._reward = episodes, progress_reward(episodes)
        self._keys = tuple(episodes.observation) if keys is None else tuple(keys)
        assert episodes.step_success is not None
        self._success = episodes.step_success
        last = torch.zeros(episodes.step_count, dtype=torch.bool)
        if episodes.terminated is not None:
            last[(episodes.starts + episodes.lengths - 1)[episodes.terminated]] = True
        self._terminated = last

    def __len__(self) -> int:
        return self.episodes.step_count

    def cut(self, steps: Tensor, past: int, future: int) -> Sequences:
        """Return subsequences from `past` actions before the actions `steps` [M] to `future` after them, T = past +
        future.

        The frame at index `past` is the observation in which the action `steps` is taken.
        """
        episodes = self.episodes
        episode = episodes.episode_of_step[steps]
        first, length = episodes.starts[episode][:, None], episodes.lengths[episode][:, None]
        place = (steps[:, None] - first) + torch.arange(-past, future)
        valid = (place >= 0) & (place < length)
        index = first + place.clamp(min=0).minimum(length - 1)
        frame_place = (steps[:, None] - first) + torch.arange(-past, future + 1)
        frames = episodes.frame_starts[episode][:, None] + frame_place.clamp(min=0).minimum(length)
        return Sequences(
            {key: episodes.observation[key][frames] for key in self._keys},
            torch.where(valid[..., None], episodes.actions[index], 0.0),
            torch.where(valid, self._reward[index], 0.0),
            self._success[index] & (place >= 0),
            self._terminated[index] & valid,
            valid,
        )

    def sampler(self, past: int, future: int, batch_size: int, generator: torch.Generator) -> Iterator[Sequences]:
        """Yield subsequences at random steps indefinitely; `generator` is the only state."""
        while True:
            steps = torch.randint(len(self), (batch_size,), generator=generator, device=generator.device)
            yield self.cut(steps.cpu(), past, future)
