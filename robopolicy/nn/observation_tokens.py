"""Observations as embeddings that a transformer reads: one per vector field, one per image patch and history frame."""

from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import TensorObservation
from robopolicy.core.spec import IMAGE_PREFIX, Field
from robopolicy.nn.configuration import NormalizationMode
from robopolicy.nn.encoders import FieldReader, module_name


class ObservationTokens(FieldReader):
    """Embeds an observation [N, H, ...] as [N, S, width], fields in the order given.

    A vector with its history is normalised per element (fit `normalizer(key)`), bounded by +-`bound` and goes through a
    layer with SiLU; every history frame of a camera is cut into patches of `patch` pixels, embedded linearly with
    learned positions (ViT, arXiv:2010.11929). patch 0: images are read elsewhere (`frames`), and what is embedded here
    ends with a learned embedding that says so, be there vectors or not. random_shift: pixels of augmentation in
    training losses, 0 for none. Raises ConfigError when there is no field, or `patch` does not divide an image.
    """

    def __init__(
        self,
        fields: Mapping[str, Field],
        history: int,
        width: int,
        normalization: NormalizationMode = NormalizationMode.MIN_MAX,
        patch: int = 16,
        random_shift: int = 0,
        bound: float = 10.0,
    ):
        super().__init__(fields, normalization, bound, random_shift)
        self.layers = nn.ModuleDict()
        self.positions = nn.ParameterDict()
        self.end = None if patch else nn.Parameter(0.02 * torch.randn(width))
        for key, spec in fields.items():
            name = module_name(key)
            if not key.startswith(IMAGE_PREFIX):
                self.layers[name] = nn.Sequential(
                    nn.Linear(history * spec.size, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
                )
                continue
            if not patch:
                continue
            height, breadth, _ = spec.shape
            if height % patch or breadth % patch:
                raise ConfigError(f"token.patch is {patch}, which does not divide '{key}', {height} x {breadth}.")
            self.layers[name] = nn.Conv2d(3, width, patch, patch)
            count = history * (height // patch) * (breadth // patch)
            self.positions[name] = nn.Parameter(0.02 * torch.randn(count, width))

    def forward(self, observation: TensorObservation, generator: torch.Generator | None = None) -> Tensor:
        """Return [N, S, width]; a generator turns on the random shift of images (training losses only).

        observation: vectors [N, H, *shape], images [N, H, height, width, 3]. Raises SpecError unless images are uint8.
        """
        read = self.keys if self.end is None else [key for key in self.keys if not key.startswith(IMAGE_PREFIX)]
        embedded = [self._embed(key, observation[key], generator) for key in read]
        if self.end is not None:
            rows = len(observation[self.keys[0]])
            embedded.append(self.end.expand(rows, 1, -1))
        return torch.cat(embedded, 1)

    def cameras(self, observation: TensorObservation, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the frames [N * H, height, width, 3] of every camera; a generator shifts them at random.

        Raises SpecError unless they are uint8.
        """
        found: dict[str, Tensor] = {}
        for key in self.keys:
            value = observation[key]
            if key.startswith(IMAGE_PREFIX) and isinstance(value, Tensor):
                found[key] = self.frames(key, value, generator)
        return found

    def _embed(self, key: str, value: Tensor | list[str], generator: torch.Generator | None) -> Tensor:
        assert isinstance(value, Tensor)
        name = module_name(key)
        if not key.startswith(IMAGE_PREFIX):
            return self.layers[name](self.vector(key, value))[:, None]
        frames = self.frames(key, value, generator)
        pixels = rearrange(frames, "n h w c -> n c h w").float() / 127.5 - 1
        patches = rearrange(self.layers[name](pixels), "(n t) d h w -> n (t h w) d", n=len(value))
        return patches + self.positions[name]
