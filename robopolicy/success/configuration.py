"""Registry of success classifiers, and the settings of the built-in kinds; no heavy imports."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from robopolicy.core.ranges import Count
from robopolicy.core.registry import Kinds
from robopolicy.core.structured import REGISTRY
from robopolicy.nn.configuration import ImageEncoderConfig

CLASSIFIERS = Kinds(
    "success classifier",
    "robopolicy.success_classifiers",
    {
        "encoder": "robopolicy.success.configuration:EncoderConfig",
        "features": "robopolicy.success.configuration:FeaturesConfig",
    },
)
"""Kinds of success classifiers. A class is a `robopolicy.success.classifier.SuccessNetwork`."""


@dataclass(frozen=True)
class EncoderConfig:
    """A small convolutional encoder per camera and normalised vectors, trained together with a success head."""

    builds: ClassVar[str] = "robopolicy.success.networks:EncoderNetwork"

    image: ImageEncoderConfig = field(default_factory=lambda: ImageEncoderConfig(random_shift=2, layer_norm=True))
    width: Count = 128
    """Number of units per layer of the success head."""
    depth: Count = 2
    """Number of layers of the success head."""
    head: str = field(default="logistic", metadata={REGISTRY: "worldmodels.registry:SUCCESS_HEADS"})
    """Success head: logistic (cross-entropy), contrastive (DiWA, arXiv:2508.03645), or an import path."""


@dataclass(frozen=True)
class FeaturesConfig:
    """Frozen features of a pre-trained vision model, read by a trained success head."""

    builds: ClassVar[str] = "robopolicy.success.networks:FeatureNetwork"

    model: Path | None = None
    """Folder of a vision model that transformers reads, such as DINOv2, V-JEPA 2 or CLIP (extra vla). Its weights are
    copied into the classifier's checkpoint.
    """
    width: Count = 128
    """Number of units per layer of the success head."""
    depth: Count = 1
    """Number of layers of the success head."""
    head: str = field(default="logistic", metadata={REGISTRY: "worldmodels.registry:SUCCESS_HEADS"})
    """Success head: logistic, contrastive, or an import path."""
