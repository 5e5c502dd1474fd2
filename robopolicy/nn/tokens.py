"""Inputs and outputs of a token policy: actions as tokens, observations as embeddings.

Chunks of normalised actions [N, C, A] become K integers in 0..V-1 and back; K is the same for all chunks. Actions are
expected in [-1, 1] (what lies outside is clipped to it). Observations become one embedding per vector field, one per
image patch and history frame.
"""

import math
from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import TensorObservation
from robopolicy.core.spec import IMAGE_PREFIX, Field
from robopolicy.nn.configuration import ActionTokens, NormalizationMode
from robopolicy.nn.encoders import FieldReader, module_name


class BinTokenizer(nn.Module):
    """Binning: one of `bins` evenly spaced values per element (RT-2, arXiv:2307.15818; OpenVLA, arXiv:2406.09246).

    The values include -1 and 1, so full speed is represented exactly; an odd number includes 0. Tokens are ordered by
    control step, then action dimension. Round trips have an error of at most 1 / (bins - 1). Raises ConfigError below
    two bins.
    """

    def __init__(self, chunk: int, action_size: int, bins: int):
        super().__init__()
        if bins < 2:
            raise ConfigError(f"token.bins={bins} must be at least 2.")
        self.action_size, self.vocabulary = action_size, bins
        self.length, self.steps_per_action = chunk * action_size, action_size

    def encode(self, actions: Tensor) -> Tensor:
        """Encode actions [N, C, A] as tokens [N, K] int64."""
        share = (actions.clamp(-1, 1) + 1) / 2
        return rearrange((share * (self.vocabulary - 1)).round().long(), "n c a -> n (c a)")

    def decode(self, tokens: Tensor) -> Tensor:
        """Decode tokens [N, K] to actions [N, C, A]."""
        values = 2 * tokens.float() / (self.vocabulary - 1) - 1
        return rearrange(values, "n (c a) -> n c a", a=self.action_size)


class FrequencyTokenizer(nn.Module):
    """Rounded coefficients of the chunk's discrete cosine transform, lowest frequencies first (FAST, arXiv:2501.09747).

    A coefficient x of the orthonormal transform along time becomes round(x * resolution), as in FAST with its scale of
    10. Differences: no byte-pair merges, so the number of tokens is fixed, K = frequencies * A; sequences are shortened
    by dropping the highest frequencies (0 keeps all) instead of merging zeros; the vocabulary covers every possible
    coefficient, so none is clipped. Actions decoded from unlikely tokens are clipped to [-1, 1]. Raises ConfigError
    unless 0 <= frequencies <= chunk and resolution > 0.
    """

    transform: Tensor

    def __init__(self, chunk: int, action_size: int, resolution: float, frequencies: int = 0):
        super().__init__()
        count = frequencies or chunk
        if not 1 <= count <= chunk or resolution <= 0:
            raise ConfigError(
                f"token.frequencies={frequencies} and token.resolution={resolution} are invalid: a chunk of {chunk} "
                f"steps has 1 to {chunk} frequencies (0: all), and the resolution must be positive."
            )
        self.action_size, self.resolution = action_size, resolution
        # A coefficient of C numbers in [-1, 1] is at most sqrt(C): the transform keeps lengths.
        self.largest = math.ceil(resolution * math.sqrt(chunk))
        self.vocabulary = 2 * self.largest + 1
        self.length, self.steps_per_action = count * action_size, 0
        from scipy.fft import dct  # who makes these tokens, pays for its import

        basis = torch.tensor(dct(torch.eye(chunk).double().numpy(), axis=0, norm="ortho"))[:count]
        self.register_buffer("transform", basis.float(), persistent=False)

    def encode(self, actions: Tensor) -> Tensor:
        """Encode actions [N, C, A] as tokens [N, K] int64."""
        coefficients = self.transform @ actions.clamp(-1, 1)
        return rearrange((coefficients * self.resolution).round().long() + self.largest, "n f a -> n (f a)")

    def decode(self, tokens: Tensor) -> Tensor:
        """Decode tokens [N, K] to actions [N, C, A]."""
        coefficients = rearrange(tokens - self.largest, "n (f a) -> n f a", a=self.action_size) / self.resolution
        return (self.transform.T @ coefficients).clamp(-1, 1)


def make_action_tokenizer(
    kind: ActionTokens, chunk: int, action_size: int, *, bins: int, resolution: float, frequencies: int
) -> BinTokenizer | FrequencyTokenizer:
    """Build the tokenizer for chunks [N, chunk, action_size]."""
    if kind is ActionTokens.BINS:
        return BinTokenizer(chunk, action_size, bins)
    return FrequencyTokenizer(chunk, action_size, resolution, frequencies)


class ObservationTokens(FieldReader):
    """Embeds an observation [N, H, ...] as [N, S, width], fields in the order given.

    A vector with its history is normalised per element (fit `normalizer(key)`), bounded by +-`bound` and passed through
    a layer with SiLU. Every history frame of a camera is split into patches of `patch` pixels, embedded linearly with
    learned positions (ViT, arXiv:2010.11929). patch 0: images are encoded elsewhere (`frames`), and the embeddings here
    end with a learned end marker, whether or not there are vectors. random_shift: pixels of augmentation in training
    losses, 0 for none. Raises ConfigError when there is no field, or `patch` does not divide an image.
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
                raise ConfigError(f"token.patch={patch} does not divide '{key}', {height} x {breadth}.")
            self.layers[name] = nn.Conv2d(3, width, patch, patch)
            count = history * (height // patch) * (breadth // patch)
            self.positions[name] = nn.Parameter(0.02 * torch.randn(count, width))

    def forward(self, observation: TensorObservation, generator: torch.Generator | None = None) -> Tensor:
        """Return [N, S, width]; a generator enables the random shift of images (training losses only).

        observation: vectors [N, H, *shape], images [N, H, height, width, 3]. Raises SpecError unless images are uint8.
        """
        keys = self.keys if self.end is None else [key for key in self.keys if not key.startswith(IMAGE_PREFIX)]
        embedded = [self._embed(key, observation[key], generator) for key in keys]
        if self.end is not None:
            rows = len(observation[self.keys[0]])
            embedded.append(self.end.expand(rows, 1, -1))
        return torch.cat(embedded, 1)

    def cameras(self, observation: TensorObservation, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the frames [N * H, height, width, 3] of every camera; a generator enables random shifts.

        Raises SpecError unless images are uint8.
        """
        frames_of_camera: dict[str, Tensor] = {}
        for key in self.keys:
            value = observation[key]
            if key.startswith(IMAGE_PREFIX) and isinstance(value, Tensor):
                frames_of_camera[key] = self.frames(key, value, generator)
        return frames_of_camera

    def _embed(self, key: str, value: Tensor | list[str], generator: torch.Generator | None) -> Tensor:
        assert isinstance(value, Tensor)
        name = module_name(key)
        if not key.startswith(IMAGE_PREFIX):
            return self.layers[name](self.vector(key, value))[:, None]
        frames = self.frames(key, value, generator)
        pixels = rearrange(frames, "n h w c -> n c h w").float() / 127.5 - 1
        patches = rearrange(self.layers[name](pixels), "(n t) d h w -> n (t h w) d", n=len(value))
        return patches + self.positions[name]
