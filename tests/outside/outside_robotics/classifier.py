"""A success classifier of one's own: logistic regression on all vectors, and on the mean colour of every image."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.spec import Field
from robopolicy.nn.normalizer import Normalizer


@dataclass(frozen=True)
class LinearConfig:
    """squares: also read the square of every number."""

    squares: bool = True


class LinearClassifier(nn.Module):
    """See `robopolicy.success.classifier.SuccessNetwork`."""

    configuration = LinearConfig

    def __init__(self, config: LinearConfig, fields: Mapping[str, Field]):
        super().__init__()
        self.config, self.keys = config, tuple(fields)
        size = sum(3 if field.is_image else field.size for field in fields.values())
        vectors = {key.replace(".", "/"): field for key, field in fields.items() if not field.is_image}
        self.scales = nn.ModuleDict({name: Normalizer(field.shape) for name, field in vectors.items()})
        self.layer = nn.Linear(size * (2 if config.squares else 1), 1)

    def normalizers(self) -> dict[str, Any]:
        """Return the normalisers of vectors by key."""
        return {name.replace("/", "."): each for name, each in self.scales.items()}

    def prepare(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return {"numbers": [N, F]}."""
        parts = [
            self.scales[key.replace(".", "/")](observation[key].float()).flatten(1)
            if key.replace(".", "/") in self.scales
            else observation[key].float().mean((1, 2)) / 255
            for key in self.keys
        ]
        numbers = torch.cat(parts, 1)
        return {"numbers": torch.cat([numbers, numbers.square()], 1) if self.config.squares else numbers}

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return logits [N]."""
        return self.layer(inputs["numbers"])[:, 0]

    def loss(self, inputs: Mapping[str, Tensor], label: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cross-entropy [N]."""
        return functional.binary_cross_entropy_with_logits(self(inputs), label.float(), reduction="none")

    def description(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"squares": self.config.squares}

    @classmethod
    def restore(cls, description: Mapping[str, Any], fields: Mapping[str, Field]) -> "LinearClassifier":
        """Rebuild from `description`."""
        return cls(LinearConfig(bool(description["squares"])), fields)
