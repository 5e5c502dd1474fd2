"""Coverage: how often a policy is where a world model has no data, and its imagined success therefore is a guess.

A model predicts something everywhere, and errors on its own data say nothing of other places. The distance of a step
(what the model predicts, and the action) to the nearest one in the data tells such places apart; data held out sets
the scale. It needs neither the model's uncertainty nor its rollouts, which drift back to what it knows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.evaluation.tables import TOLERANCE
from worldmodels.encoding import encode_episodes
from worldmodels.protocol import DecoderFree, LearnedModel

NEIGHBOURS, QUERIES = 20_000, 4_000
"""Largest numbers of steps of data, and of steps that are compared with them."""
CONSTANT = 1e-2
"""Deviation that stands for that of an element which never changed in the data: who changes it is elsewhere."""
THUMBNAIL = 8
"""Pixels along one side of the images that are compared, for models that predict images."""


@dataclass(frozen=True)
class Coverage:
    """Steps [N, D] that a model has learned from, standardised; threshold: distance from the nearest of them beyond
    which a step counts as unlike them; scale [D]: what the elements, standard deviations apart, are multiplied with.
    """

    model: LearnedModel
    known: Tensor
    mean: Tensor
    scale: Tensor
    threshold: float

    @classmethod
    def of(cls, model: LearnedModel, data: Episodes, generator: torch.Generator) -> "Coverage":
        """Measure the data of a model; a tenth of its episodes is held out for the threshold. Raises DataError for
        fewer than two episodes.
        """
        if len(data) < 2:
            raise DataError("Coverage needs at least two recorded episodes: one is held out.")
        steps = [elements(model, part) for part in data.split(0.1, generator)]
        deviation = steps[0].std(0)
        scale = 1 / torch.where(deviation > 1e-6, deviation, CONSTANT)
        mean = steps[0].mean(0)
        known, held_out = (
            drawn(scale * (part - mean), count, generator)
            for part, count in zip(steps, (NEIGHBOURS, QUERIES), strict=True)
        )
        threshold = float(nearest(held_out, known).quantile(1 - TOLERANCE))
        return cls(model, known, mean, scale, threshold)

    def unlike(self, steps: Tensor, generator: torch.Generator) -> float:
        """Return the fraction of `steps` [N, D], as of `elements`, that are unlike the data; `TOLERANCE` for its own
        behaviour.
        """
        standardised = drawn(self.scale * (steps - self.mean), QUERIES, generator)
        return float((nearest(standardised, self.known) > self.threshold).float().mean())


def elements(model: LearnedModel, episodes: Episodes) -> Tensor:
    """Return the predicted fields, vectors or latents or thumbnails of images, and the action at every recorded step
    [N, D]. Raises SpecError when the episodes lack a field that the model reads.
    """
    if isinstance(model, DecoderFree):
        episodes = encode_episodes(model, episodes)
    frames = torch.arange(episodes.step_count) + episodes.episode_of_step  # every episode has one frame more than steps
    parts = [episodes.actions.flatten(1)]
    for key in model.spec.observation:
        if key in episodes.observation:
            value = episodes.observation[key][frames]
            parts.append(thumbnails(value) if key.startswith(IMAGE_PREFIX) else value.flatten(1))
    return torch.cat([part.cpu().float() for part in parts], 1)


def thumbnails(images: Tensor) -> Tensor:
    """Return images [N, H, W, 3] uint8 as small ones [N, THUMBNAIL * THUMBNAIL * 3], in 0 to 1."""
    parts = [
        torch.nn.functional.adaptive_avg_pool2d(part.permute(0, 3, 1, 2).float() / 255, THUMBNAIL).flatten(1)
        for part in images.split(1024)
    ]
    return torch.cat(parts)


def drawn(steps: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return at most `count` of `steps` [N, D], drawn without replacement."""
    if len(steps) <= count:
        return steps
    return steps[torch.randperm(len(steps), generator=generator)[:count]]


def nearest(steps: Tensor, known: Tensor) -> Tensor:
    """Return the distance [N] of each of `steps` [N, D] from the nearest of `known` [M, D]."""
    return torch.cat([torch.cdist(part, known).min(1).values for part in steps.split(512)])
