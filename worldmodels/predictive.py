"""Encoder that learns to predict its own features of later frames, with a guard against collapse.

A joint-embedding predictive architecture (JEPA): features of a frame, the robot's vectors and the actions in between
predict the features of the frames 1, 3 and 8 steps later, and nothing is drawn again, so that textures and moving
backgrounds that say nothing of what follows cost nothing. Constant features would be predicted perfectly: SIGReg
(LeJEPA, Balestriero and LeCun 2025, arXiv:2511.08544; for world models LeWM, arXiv:2603.19312) keeps their
distribution close to a standard normal one, along random directions. As there, gradients flow through the predicted
features too. A decoder learns beside it to show what the features kept; nothing of it reaches the encoder.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.episodes import Episodes
from robopolicy.core.randomness import normal
from robopolicy.core.sequences import SequenceData
from robopolicy.core.vectors import StateVector
from robopolicy.nn.blocks import Members
from worldmodels.frame_encoder import FrameAutoencoder, Labels

OFFSETS = (0, 1, 3, 8)
"""Control steps between the first frame of a window and each of its frames."""

GUARD = 0.1
"""Weight of the guard against collapse."""

DIRECTIONS = 128
"""Number of random directions along which the features' distribution is compared, drawn for every batch."""

LIMIT, KNOTS = 4.0, 17
"""The statistic's integral over frequencies ends at LIMIT, and is a trapezoidal sum over KNOTS of them."""

VISIBLE = 0.1
"""Standard deviation from which a direction of the features counts."""

WIDTH = 256
"""Width of the predictor's two hidden layers."""


def sigreg(features: Tensor, directions: Tensor) -> Tensor:
    """Return the Epps-Pulley statistic [...] of features [..., N, D] along unit directions [D, M], a mean over them.

    N times the integral over t of |phi(t) - exp(-t^2 / 2)|^2 exp(-t^2 / 2), for the empirical characteristic function
    phi of the N projections: about 1.06 for standard normal features (with any N), and growing with N for all others.
    """
    frequency = torch.linspace(0, LIMIT, KNOTS, device=features.device)
    normal_function = (-frequency.square() / 2).exp()
    spacing = torch.full_like(frequency, 2 * LIMIT / (KNOTS - 1))  # twice: negative frequencies have the same error
    spacing[[0, -1]] /= 2
    angles = (features @ directions)[..., None] * frequency
    error = (angles.cos().mean(-3) - normal_function).square() + angles.sin().mean(-3).square()
    return features.shape[-2] * (error * spacing * normal_function).sum(-1).mean(-1)


def feature_rank(features: Tensor) -> int:
    """Return the rank of features [N, D]: the number of orthogonal directions in which they vary by more than VISIBLE.

    The guard asks for D directions of deviation 1; of collapsed features none is left, whose tiny rest may well spread
    over many, so that ratios of variances do not show it.
    """
    variances = torch.linalg.eigvalsh(torch.cov(features.double().T).reshape(features.shape[1], -1))
    return int((variances > VISIBLE**2).sum())


class PredictiveEncoding(nn.Module):
    """Fits a `FrameAutoencoder` by prediction; a `Regression`.

    labels: recorded vectors that the features should tell, None for none; vector: of the fields of a frame that are no
    images, known beside the features; actions: their size A; batch_size: number of windows N.
    """

    def __init__(
        self,
        autoencoder: FrameAutoencoder,
        labels: Labels | None,
        vector: StateVector,
        actions: int,
        batch_size: int,
        seed: int,
    ):
        super().__init__()
        self.autoencoder, self.labels = autoencoder, labels
        self.vector, self.batch_size = vector, batch_size
        size = vector.size + autoencoder.size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.predictor = Members(1, size + actions, WIDTH, 2, size)

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield batches of N windows indefinitely; `generator` is the only state.

        frames: key -> uint8 [N, 4, height, width, 3], OFFSETS steps from the first one; vectors [N, 4, V] and actions
        [N, 8, A], standardised; valid: [N, 4] bool, the frame belongs to the episode, whose last one is repeated;
        variance: key -> [], of the pixels; labels: [N, E] of the first frames, standardised, if there are any.
        """
        data, device = SequenceData(episodes, ()), next(self.predictor.parameters()).device
        actions = standardised(episodes.actions)
        vectors = torch.zeros(episodes.step_count + len(episodes), 0)
        if self.vector.size:
            vectors = standardised(self.vector.pack(episodes.observation))
        variance = {key: value.to(device) for key, value in self.autoencoder.pixel_variance(episodes).items()}
        labels = None if self.labels is None else self.labels.standardised(episodes)
        offsets = torch.tensor(OFFSETS)
        while True:
            rows = torch.randint(len(data), (self.batch_size,), generator=generator, device=generator.device).cpu()
            episode = episodes.episode_of_step[rows]
            remaining = ((episodes.starts + episodes.lengths)[episode] - rows)[:, None]
            frames = (rows + episode)[:, None] + offsets.minimum(remaining)
            steps = rows[:, None] + torch.arange(OFFSETS[-1]).minimum(remaining - 1)
            batch = {"vectors": vectors[frames], "actions": actions[steps], "valid": offsets <= remaining}
            if labels is not None:
                batch["labels"] = labels[frames[:, 0]]
            images = {key: episodes.observation[key][frames].to(device) for key in self.autoencoder.images}
            yield {**{k: v.to(device) for k, v in batch.items()}, "frames": images, "variance": variance}

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"predicted", "guard", "drawn", "labels"}: each [N], for a batch of `batches`.

        predicted: squared error of the vectors and features of the later frames, a mean over elements and frames of the
        episode; guard: GUARD times SIGReg of the features, a mean over OFFSETS; drawn: error of the decoder; labels: of
        reading labels off the first frames, if there are any.
        """
        frames: Mapping[str, Tensor] = batch["frames"]
        valid, actions = batch["valid"], batch["actions"]
        flat = {key: value.flatten(0, 1) for key, value in frames.items()}
        features = self.autoencoder(flat).unflatten(0, valid.shape)
        latents = torch.cat([batch["vectors"], features], -1)
        present, total = latents[:, 0], torch.zeros(len(valid), device=features.device)
        for step in range(1, OFFSETS[-1] + 1):
            present = present + self.predictor(torch.cat([present, actions[:, step - 1]], -1)[None])[0]
            if step in OFFSETS:
                place = OFFSETS.index(step)
                error = (present - latents[:, place]).square().mean(-1)
                total = total + torch.where(valid[:, place], error, 0.0)
        directions = normal((features.shape[-1], DIRECTIONS), generator, features.device)
        guard = GUARD * sigreg(features.movedim(1, 0), functional.normalize(directions, dim=0)).mean()
        first = {key: value[:, 0] for key, value in frames.items()}
        errors = {
            "predicted": total / valid[:, 1:].sum(1),
            "guard": guard.expand(len(valid)),
            "drawn": self.autoencoder.drawing_errors(first, features[:, 0].detach(), batch["variance"]),
        }
        if self.labels is not None:
            errors["labels"] = self.labels.errors(features[:, 0], batch["labels"])
        return errors


def standardised(values: Tensor) -> Tensor:
    """Return values [N, D] less their mean, in standard deviations; what never varies is 0."""
    return (values - values.mean(0)) / values.std(0, correction=0).clamp_min(1e-6)
