"""Training of success classifiers on labelled frames, in balanced batches."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes
from robopolicy.success.classifier import chunks
from robopolicy.success.labels import UNKNOWN, Labels

SAME_EPISODE = 0.5
"""Fraction of the negative frames that come from successful episodes, if they have any: those before success."""


class ClassifierTraining(nn.Module):
    """A `Regressor`: a success network and the batches that it is trained on."""

    def __init__(self, network: Any):
        super().__init__()
        self.network = network

    def fit_normalizers(self, frames: Mapping[str, Tensor]) -> None:
        """Fit the network's normalisers on training frames, key -> [N, *shape]."""
        for key, normalizer in self.network.normalizers().items():
            normalizer.fit(frames[key].float())

    def batches(
        self, frames: Mapping[str, Tensor], labels: Labels, episode: Tensor, size: int, generator: torch.Generator
    ) -> Iterator[dict[str, Any]]:
        """Yield {"inputs", "label"} of `size` frames indefinitely, half of them successes.

        frames: key -> [F, *shape]; episode: [F], episode of each frame. Half of the other frames come from successful
        episodes before success, where they are hardest to tell apart, and half from failed episodes. Balanced batches
        keep rare successes from being ignored; the calibration corrects the fraction.
        """
        device = generator.device
        inputs = self._prepared(frames, device)
        label = labels.frames
        positive = (label == 1).nonzero()[:, 0].to(device)
        in_success = labels.episodes[episode]
        pools = [((label == 0) & mask).nonzero()[:, 0].to(device) for mask in (in_success, ~in_success)]
        pools = [pool for pool in pools if len(pool)]
        while True:
            parts = [_drawn(positive, size // 2, generator)]
            for place, pool in enumerate(pools):
                count = (size - size // 2 + place) // len(pools)
                parts.append(_drawn(pool, count, generator))
            rows = torch.cat(parts)
            target = torch.zeros(len(rows), dtype=torch.bool, device=device)
            target[: len(parts[0])] = True
            yield {"inputs": {key: value[rows] for key, value in inputs.items()}, "label": target}

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"success": [N]}."""
        return {"success": self.network.loss(batch["inputs"], batch["label"], generator)}

    def _prepared(self, frames: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return the inputs of all frames; frozen features are computed once."""
        parts = [
            self.network.prepare({key: value.to(device) for key, value in part.items()}) for part in chunks(frames)
        ]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _drawn(pool: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return pool[torch.randint(len(pool), (count,), generator=generator, device=generator.device)]


def episode_of_frame(episodes: Episodes) -> Tensor:
    """Return the episode of every frame, [F] int64."""
    return torch.repeat_interleave(torch.arange(len(episodes)), episodes.lengths.cpu() + 1)


def known_frames(
    frames: Mapping[str, Tensor], labels: Labels, episode: Tensor
) -> tuple[dict[str, Tensor], Labels, Tensor]:
    """Return frames, labels and episodes [F] of the frames whose label is known."""
    mask = labels.frames != UNKNOWN
    kept = {key: value[mask] for key, value in frames.items()}
    return kept, Labels(labels.frames[mask], labels.episodes), episode[mask]
