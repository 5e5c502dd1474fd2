"""Encoder of single frames for models of image features, and the decoder that shows what it kept.

Either an encoder of its own locates objects (convolutions, a spatial softmax, a layer), or a layer on the features of
every patch of a frozen vision model does. It learns by drawing each frame again from its features alone (a deep spatial
autoencoder, Finn et al. 2016, arXiv:1509.06113), or by predicting its features of later frames
(`worldmodels.predictive`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.episodes import Episodes
from robopolicy.core.spec import Field
from robopolicy.nn.configuration import ImageEncoderConfig
from robopolicy.nn.encoders import ImageEncoder, PatchEncoder, module_name
from robopolicy.nn.pretrained import build_described_backbone
from robopolicy.nn.vision import feature_maps, load_vision_model
from worldmodels.configuration import DECODER_CHANNELS, LatentEnsembleConfig
from worldmodels.images.networks import ImageDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


SAMPLED = 1000
"""Number of frames sampled to measure the variance of the pixels."""


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

    def losses(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"drawn": [N]}, as `drawing_errors` of the frames' own features.

        batch: frames, key -> uint8 [N, height, width, 3]; variance: key -> [], of pixels in 0 to 1.
        """
        return {"drawn": self.drawing_errors(batch["frames"], self(batch["frames"]), batch["variance"])}

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


def downsample_by_two(frames: Tensor) -> Tensor:
    """Downsample images to half size: uint8 [N, height, width, 3] -> [N, height / 2, width / 2, 3] in 0 to 1."""
    small = functional.avg_pool2d(rearrange(frames, "n h w c -> n c h w").float() / 255, 2)
    return rearrange(small, "n c h w -> n h w c")
