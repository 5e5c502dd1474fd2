"""Built-in networks of success classifiers: a trained encoder, and frozen features of a vision model.

Axes: N frame.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import IMAGE_PREFIX, Field
from robopolicy.core.structured import from_plain, to_plain
from robopolicy.nn.configuration import NormalizationMode
from robopolicy.nn.encoders import FieldReader, ObservationEncoder
from robopolicy.nn.normalizer import Normalizer
from robopolicy.nn.pretrained import build_described_backbone
from robopolicy.nn.vision import load_vision_model, pooled_features
from robopolicy.success.configuration import EncoderConfig, FeaturesConfig
from worldmodels.heads.success import make_success_head
from worldmodels.registry import SUCCESS_HEADS

BOUND = 10.0
"""Limit of normalised vectors."""


class EncoderNetwork(nn.Module):
    """Convolutions per camera and normalised vectors, followed by a success head; trained as a whole."""

    configuration = EncoderConfig

    def __init__(self, config: EncoderConfig, fields: Mapping[str, Field]):
        super().__init__()
        self.config = config
        self.encoder = ObservationEncoder(fields, 1, NormalizationMode.MEAN_STD, config.image, BOUND)
        self.head = make_success_head(config.head, self.encoder.dimension, config.width, config.depth)

    def normalizers(self) -> dict[str, Normalizer]:
        """Return the normalisers of vector fields by key, which are fitted before training."""
        return {key: self.encoder.normalizer(key) for key in self.encoder.keys if not key.startswith(IMAGE_PREFIX)}

    def prepare(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of `forward` and `loss`: the observation, key -> [N, *shape], unchanged."""
        return dict(observation)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return logits [N] of frames, key -> [N, *shape]."""
        return self.head(self.encoder({key: value[:, None] for key, value in inputs.items()}))

    def loss(self, inputs: Mapping[str, Tensor], label: Tensor, generator: torch.Generator) -> Tensor:
        """Return losses [N] with randomly shifted images; label: [N] bool."""
        shifted = self.encoder({key: value[:, None] for key, value in inputs.items()}, generator)
        return self.head.loss(shifted, label)

    def description(self) -> dict[str, Any]:
        """Return the inputs of `restore` other than the fields."""
        return {"config": to_plain(self.config)}

    @classmethod
    def restore(cls, description: Mapping[str, Any], fields: Mapping[str, Field]) -> "EncoderNetwork":
        """Rebuild an untrained network from `description()`; raises CheckpointError for an untrusted success head."""
        SUCCESS_HEADS.load_saved(description["config"]["head"], "the success classifier")
        return cls(from_plain(EncoderConfig, description["config"]), fields)


class FeatureNetwork(nn.Module):
    """Frozen features of a vision model for every camera, and normalised vectors, followed by a success head.

    backbone: description of the vision model in a checkpoint, None to load the model from config.model. Features are
    computed once before training.
    """

    configuration = FeaturesConfig

    def __init__(self, config: FeaturesConfig, fields: Mapping[str, Field], backbone: Mapping[str, Any] | None = None):
        super().__init__()
        self.config = config
        self.reader = FieldReader(fields, NormalizationMode.MEAN_STD, BOUND, 0)
        self.images = [key for key in fields if key.startswith(IMAGE_PREFIX)]
        if not self.images:
            raise ConfigError(
                "success.kind=features reads images, but success.inputs names no camera: use success.kind=encoder."
            )
        if backbone is None:
            if config.model is None:
                raise ConfigError("No vision model is given. Set success.config.model=FOLDER (DINOv2, CLIP, SigLIP).")
            self.model, pixels = load_vision_model(config.model, "success.config.model")
        else:
            self.model, pixels = build_described_backbone(backbone["model"]), backbone["pixels"]
        self.pixels = dict(pixels)
        self.model.requires_grad_(False)
        vectors = sum(field.size for key, field in fields.items() if key not in self.images)
        inputs = len(self.images) * int(self.model.config.hidden_size) + vectors
        self.head = make_success_head(config.head, inputs, config.width, config.depth)

    def normalizers(self) -> dict[str, Normalizer]:
        """Return the normalisers of vector fields by key, which are fitted before training."""
        return {key: self.reader.normalizer(key) for key in self.reader.keys if key not in self.images}

    @torch.no_grad()
    def prepare(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the features of frames as {"features": [N, F]}; observation: key -> [N, *shape]."""
        parts: list[Tensor] = []
        for key in self.reader.keys:
            value = observation[key][:, None]
            if key in self.images:
                parts.append(pooled_features(self.model, self.pixels, self.reader.frames(key, value, None)))
            else:
                parts.append(self.reader.vector(key, value))
        return {"features": torch.cat(parts, 1)}

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return logits [N] of `prepare`d frames, or of an observation, key -> [N, *shape]."""
        prepared = inputs if "features" in inputs else self.prepare(inputs)
        return self.head(prepared["features"])

    def loss(self, inputs: Mapping[str, Tensor], label: Tensor, generator: torch.Generator) -> Tensor:
        """Return losses [N] of `prepare`d frames; label: [N] bool."""
        return self.head.loss(inputs["features"], label)

    def description(self) -> dict[str, Any]:
        """Return the inputs of `restore` other than the fields; the vision model's weights are among the weights."""
        backbone = {"model": self.model.config.to_dict(), "pixels": self.pixels}
        return {"config": {**to_plain(self.config), "model": None}, "backbone": backbone}

    @classmethod
    def restore(cls, description: Mapping[str, Any], fields: Mapping[str, Field]) -> "FeatureNetwork":
        """Rebuild an untrained network from `description()`; nothing is downloaded.

        Raises CheckpointError for an untrusted success head or vision model, ConfigError without the extra vla.
        """
        SUCCESS_HEADS.load_saved(description["config"]["head"], "the success classifier")
        return cls(from_plain(FeaturesConfig, description["config"]), fields, description["backbone"])
