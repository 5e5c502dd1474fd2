"""Encoder of single frames for models of image features, and the decoder that shows what it kept.

Either an encoder of its own locates objects (convolutions, a spatial softmax, a layer), or a layer on the features of
every patch of a frozen vision model does. It learns by drawing each frame again from its features alone (a deep spatial
autoencoder, Finn et al. 2016, arXiv:1509.06113), or by predicting its features of later frames
(`worldmodels.predictive`). Where further vectors are recorded, it learns to tell them as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.episodes import Episodes
from robopolicy.core.spec import Field
from robopolicy.core.vectors import StateVector
from robopolicy.nn.blocks import Members
from robopolicy.nn.configuration import ImageEncoderConfig
from robopolicy.nn.encoders import ImageEncoder, PatchEncoder, module_name
from robopolicy.nn.normalizer import in_deviations
from robopolicy.nn.pretrained import build_described_backbone
from robopolicy.nn.vision import feature_maps, load_vision_model
from worldmodels.configuration import DECODER_CHANNELS, LatentEnsembleConfig
from worldmodels.images.networks import ImageDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


SAMPLED = 1000
"""Number of frames sampled to measure the variance of the pixels."""

LABELS_WIDTH = 128
"""Width of the two hidden layers that read recorded vectors off the features while the encoder learns."""


class Vision(NamedTuple):
    """A frozen vision model of transformers, and what its images are made with: mean, std and size."""

    model: "PreTrainedModel"
    pixels: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path) -> "Vision":
        """Load the vision model of a folder written by save_pretrained; raises ConfigError when there is none."""
        return cls(*load_vision_model(folder, "worldmodel.config.encoder"))

    @classmethod
    def described(cls, description: Mapping[str, Any]) -> "Vision":
        """Build the vision model of `description`, with random weights; nothing is downloaded."""
        return cls(build_described_backbone(description["model"]), description["pixels"])

    def description(self) -> dict[str, Any]:
        """Return the inputs of `described`, as JSON."""
        return {"model": self.model.config.to_dict(), "pixels": dict(self.pixels)}


class FrameAutoencoder(nn.Module):
    """Encodes single frames, camera by camera, and reconstructs them at half their size.

    images: the cameras' fields by key; vision: a frozen vision model whose features are condensed, None for
    convolutions of its own; size: features F of a frame, all cameras together. Raises ConfigError unless images are
    square and their side a power of two from 16 up.
    """

    def __init__(self, images: Mapping[str, Field], config: LatentEnsembleConfig, vision: Vision | None = None):
        super().__init__()
        self.images, self.size = tuple(images), config.features * len(images)
        self.vision = None if vision is None else vision.model.requires_grad_(False)
        self.pixels = {} if vision is None else dict(vision.pixels)
        encoders, decoders = nn.ModuleDict(), nn.ModuleDict()
        for key, field in images.items():
            height, width, depth = field.shape
            encoders[module_name(key)] = (
                ImageEncoder(ImageEncoderConfig(features=config.features, channels=config.channels))
                if vision is None
                else PatchEncoder(int(vision.model.config.hidden_size), config.channels[-1], config.features)
            )
            decoders[module_name(key)] = ImageDecoder(
                (height // 2, width // 2, depth), DECODER_CHANNELS, config.features
            )
        self.encoders, self.decoders = encoders, decoders

    @property
    def vision_model(self) -> Vision | None:
        """The frozen vision model, None if there is none."""
        return None if self.vision is None else Vision(self.vision, self.pixels)

    def features(self, key: str, frames: Tensor) -> Tensor:
        """Return features [N, features] of a camera's images uint8 [N, height, width, 3]."""
        maps = frames if self.vision is None else feature_maps(self.vision, self.pixels, frames)
        return self.encoders[module_name(key)](maps)

    def forward(self, frames: Mapping[str, Tensor]) -> Tensor:
        """Return features [N, F] of images, key -> uint8 [N, height, width, 3]."""
        return torch.cat([self.features(key, frames[key]) for key in self.images], -1)

    def drawn(self, key: str, features: Tensor) -> Tensor:
        """Reconstruct a camera's images uint8 [N, height, width, 3] from its features [N, features]."""
        small = (255 * self.decoders[module_name(key)](features)).round().to(torch.uint8)
        return small.repeat_interleave(2, 1).repeat_interleave(2, 2)

    def drawing_errors(self, frames: Mapping[str, Tensor], features: Tensor, variance: Mapping[str, Tensor]) -> Tensor:
        """Return the squared error [N] of drawing frames, key -> uint8 [N, height, width, 3], from features [N, F], as
        a fraction of the pixels' variance in the data, a mean over cameras.
        """
        errors: list[Tensor] = []
        for key, part in zip(self.images, features.chunk(len(self.images), -1), strict=True):
            error = self.decoders[module_name(key)](part) - downsample_by_two(frames[key])
            # Divided by the variance over time: 1 is the error of always drawing the mean frame, however little moves.
            errors.append(error.square().flatten(1).mean(-1) / variance[key])
        return torch.stack(errors).mean(0)

    def pixel_variance(self, episodes: Episodes) -> dict[str, Tensor]:
        """Return key -> [], the variance over time of every camera's pixels in 0 to 1, at half their size, averaged."""
        variance: dict[str, Tensor] = {}
        for key in self.images:
            frames = episodes.observation[key]
            indices = torch.linspace(0, len(frames) - 1, min(len(frames), SAMPLED)).long()
            variance[key] = downsample_by_two(frames[indices]).var(0, correction=0).mean().clamp_min(1e-6)
        return variance

    def description(self) -> dict[str, Any]:
        """Return the description of the frozen vision model, {} if there is none; its weights are among these."""
        vision = self.vision_model
        return {} if vision is None else vision.description()


class Labels(nn.Module):
    """Recorded vectors that features should tell, and a network that reads them off while the encoder learns.

    An encoder that only draws keeps what covers many pixels, and how a block is turned changes few: of push_t's at 64
    px, features tell the turn to 9 degrees (median), with labels to 1. vector: of the fields that are read; elements:
    which of it; size: features F of a frame.
    """

    def __init__(self, vector: StateVector, elements: Sequence[int], size: int, seed: int):
        super().__init__()
        self.vector, self.elements = vector, list(elements)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = Members(1, size, LABELS_WIDTH, 2, len(self.elements))

    def standardised(self, episodes: Episodes) -> Tensor:
        """Return the elements [N, E] of all frames less their mean, in standard deviations; what never varies is 0."""
        values = self.vector.pack(episodes.observation)[:, self.elements]
        return in_deviations(values, values)

    def errors(self, features: Tensor, values: Tensor) -> Tensor:
        """Return the squared error [N] of reading standardised elements [N, E] off features [N, F], a mean over E."""
        return (self.network(features[None])[0] - values).square().mean(-1)


class DrawingEncoding(nn.Module):
    """Fits a `FrameAutoencoder` by drawing, and by `labels` if there are any; a `Regression`."""

    def __init__(self, autoencoder: FrameAutoencoder, labels: Labels | None, batch_size: int):
        super().__init__()
        self.autoencoder, self.labels = autoencoder, labels
        self.batch_size = batch_size

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield batches for `loss` indefinitely; the only state is `generator`."""
        images = {key: episodes.observation[key] for key in self.autoencoder.images}
        count, device = len(next(iter(images.values()))), next(self.autoencoder.decoders.parameters()).device
        variance = {key: value.to(device) for key, value in self.autoencoder.pixel_variance(episodes).items()}
        values = None if self.labels is None else self.labels.standardised(episodes)
        while True:
            rows = torch.randint(count, (self.batch_size,), generator=generator, device=generator.device).cpu()
            batch = {"frames": {key: value[rows].to(device) for key, value in images.items()}, "variance": variance}
            yield batch if values is None else {**batch, "labels": values[rows].to(device)}

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"drawn", "labels"}, each [N]: the errors of drawing frames from their own features, and of reading
        labels off them.

        batch: frames, key -> uint8 [N, height, width, 3]; variance: key -> [], of pixels in 0 to 1; labels: [N, E],
        standardised, if there are any.
        """
        features = self.autoencoder(batch["frames"])
        errors = {"drawn": self.autoencoder.drawing_errors(batch["frames"], features, batch["variance"])}
        if self.labels is not None:
            errors["labels"] = self.labels.errors(features, batch["labels"])
        return errors


def downsample_by_two(frames: Tensor) -> Tensor:
    """Downsample images to half size: uint8 [N, height, width, 3] -> [N, height / 2, width / 2, 3] in 0 to 1."""
    small = functional.avg_pool2d(rearrange(frames, "n h w c -> n c h w").float() / 255, 2)
    return rearrange(small, "n c h w -> n h w c")
